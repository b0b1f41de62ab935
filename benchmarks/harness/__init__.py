"""What the benchmark scripts share: cases, worker processes, gradient checks, memory readings, reports."""
