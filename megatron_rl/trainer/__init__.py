"""The loop - sample, score, update, sync - with evaluation, checkpoints and run directory."""
