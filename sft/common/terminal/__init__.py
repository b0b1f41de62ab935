"""Output for terminals."""
