"""What ``benchmarks.step`` compares: one process each, which measures when it is its turn."""
