"""The order of events: which program runs when, on what, and what is kept in between, on any machine."""
