"""From Steps to flat programs: the list of tensor operations that is simulated, metered and executed."""
