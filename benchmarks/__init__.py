"""Side-by-side measurements. Each is a command that prints a table; see docs/benchmarks.md."""
