"""vLLM's general plugin: called once in every process that vLLM starts.

Registers what the precision flow needs inside vLLM. The ``bf16`` and ``fp32`` flows run on vLLM's
own kernels, so there is nothing to register for them.
"""


def register() -> None:
    """Entry point ``vllm.general_plugins``; safe to call more than once."""
