"""Seeds of single samples, and isolation of the host's random state.

A sample's seed is a hash of (call seed, prompt index, sample index), so a run repeats itself
whatever the batching, and no two samples of a run share a stream of random numbers.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 62-bit seed that depends on every part, in order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """Restores Python's, NumPy's and torch's random states on exit.

    vLLM reseeds all three when an engine is built, and draws from torch's when it generates.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
