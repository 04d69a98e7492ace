"""Command line and start-up: everything that happens before torch is imported."""
