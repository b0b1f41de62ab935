"""From a byte budget to a plan."""
