"""Plans on real tensors."""
