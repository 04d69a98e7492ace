"""The order of prompts: a function of seed and position, whatever was interrupted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.loader import PromptLoader

PROMPTS = list("abcdefghijk")


def stream(loader, count):
    return [item for _ in range(count) for item in loader.next_batch()]


@given(st.integers(1, 11), st.integers(0, 12), st.integers(0, 5), st.booleans())
def test_a_resumed_stream_equals_the_unbroken_one(batch, before, seed, shuffle):
    unbroken = PromptLoader(PROMPTS, batch, seed, shuffle)
    expected = stream(unbroken, before + 5)
    first = PromptLoader(PROMPTS, batch, seed, shuffle)
    stream(first, before)
    second = PromptLoader(PROMPTS, batch, seed, shuffle)
    second.load_state_dict(first.state_dict())
    assert stream(second, 5) == expected[before * batch :]


@given(st.integers(1, 11), st.integers(0, 5))
def test_every_epoch_has_every_prompt_once(batch, seed):
    items = stream(PromptLoader(PROMPTS, batch, seed, True), 11)
    for epoch in range(batch):
        assert sorted(items[epoch * 11 : (epoch + 1) * 11]) == PROMPTS


def test_epochs_and_seeds_differ_and_global_state_does_not_matter():
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    items = stream(PromptLoader(PROMPTS, 11, 0, True), 2)
    assert np.random.get_state()[1].tolist() == state
    assert items[:11] != items[11:] and items[:11] != PROMPTS
    assert items != stream(PromptLoader(PROMPTS, 11, 1, True), 2)
    assert stream(PromptLoader(PROMPTS, 11, 0, False), 2) == PROMPTS * 2


def test_too_few_prompts_and_changed_data_are_refused():
    with pytest.raises(ValueError, match="data.train_batch_size=12 is more than the 11"):
        PromptLoader(PROMPTS, 12, 0, True)
    loader = PromptLoader(PROMPTS, 2, 0, True)
    with pytest.raises(ValueError, match="made with 9 training prompts"):
        loader.load_state_dict({"position": 4, "num_prompts": 9})
