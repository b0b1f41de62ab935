"""Models that other people wrote, against eager PyTorch: what is exact, what runs in strips, what is refused and why."""
