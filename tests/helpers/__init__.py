"""Common helpers of tests: the exactness rule, poisoned buffers, random networks, small models."""
