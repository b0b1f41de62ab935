"""Which implementation runs an operation of a program, and the pass that puts kernels into programs."""
