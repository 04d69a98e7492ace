"""Errors of a run that the command line tells from faults of the program; imports nothing."""


class MismatchError(RuntimeError):
    """Log-probs of rollout and policy differ by more than ``precision.gate=stop`` accepts."""
