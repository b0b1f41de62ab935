"""Memory floors: bytes of the smallest plans of networks, in a committed table, and the gate that compares."""
