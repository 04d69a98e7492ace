"""Rewards: from a response to a number, with a time limit."""
