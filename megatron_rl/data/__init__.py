"""Prompts: rows, tokens, order, micro-batches."""
