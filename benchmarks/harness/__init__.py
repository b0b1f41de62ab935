"""Common parts of the benchmark scripts: cases, worker processes, gradient checks, memory readings, reports."""
