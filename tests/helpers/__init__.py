"""Helpers of several tests: the exactness rule, poisoned buffers, random networks, small models."""
