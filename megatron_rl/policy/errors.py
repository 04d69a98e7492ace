"""Errors of the policy that the command line tells from faults of the program; imports nothing."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or Inf."""
