"""The sub-commands of `checkpoints-tools`, one module each.

A module has `add_parser(commands)`, which declares the arguments and sets `run`, and imports what
needs torch only when it runs.
"""
