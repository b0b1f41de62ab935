"""Runnable examples, and the model builders that tests and benchmarks share with them."""
