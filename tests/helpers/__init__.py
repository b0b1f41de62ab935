"""What several tests share: the exactness rule, poisoned buffers, random networks, small models."""
