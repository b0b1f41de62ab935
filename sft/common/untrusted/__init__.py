"""Files and names that may be of another person, used without running code that the caller does not trust."""
