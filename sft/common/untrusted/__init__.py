"""Files and names of unknown origin, used without running code that the caller does not trust."""
