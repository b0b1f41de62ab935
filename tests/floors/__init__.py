"""Memory floors: the least bytes that networks can be planned with, in a committed table, and the gate that compares."""
