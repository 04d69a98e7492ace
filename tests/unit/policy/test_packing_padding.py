"""Padding of a packed stream, which predicts nothing and changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.policy.packing import pack_groups, split_groups
from support.groups import random_groups, shape_of

sizes = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)
FIELDS = ("predict_index", "target_ids", "rows", "columns")


@settings(max_examples=60)
@given(sizes, st.integers(1, 8))
def test_padding_only_appends_a_group_that_predicts_nothing(shapes, multiple):
    groups = random_groups(sizes=shapes)
    plain, padded = pack_groups(groups), pack_groups(groups, pad_to_multiple=multiple)
    assert padded.num_tokens % multiple == 0
    assert 0 <= padded.num_tokens - plain.num_tokens < multiple
    for name in FIELDS:
        assert torch.equal(getattr(padded, name), getattr(plain, name))
    for name in ("input_ids", "position_ids"):
        assert torch.equal(getattr(padded, name)[:, : plain.num_tokens], getattr(plain, name))
    assert padded.spans[: len(plain.spans)] == plain.spans
    assert sum(span.length for span in padded.spans) == padded.num_tokens
    for span, following in zip(padded.spans, padded.spans[1:], strict=False):
        assert span.start + span.length == following.start


@pytest.mark.parametrize("multiple", [1, 4])
def test_no_groups_make_a_stream_of_padding(multiple):
    packed = pack_groups([], pad_to_multiple=multiple)
    assert packed.num_tokens == multiple == packed.spans[0].length
    assert all(getattr(packed, name).shape == (0,) for name in FIELDS)
    assert all(getattr(packed, name).dtype == torch.int64 for name in FIELDS)


@settings(max_examples=40)
@given(sizes)
def test_groups_of_one_are_the_plain_sequences(shapes):
    groups = random_groups(sizes=shapes)
    singles = split_groups(groups, share_prefix=False)
    plain = [[*g.prompt_ids, *r.token_ids] for g in groups for r in g.responses]
    for single, sequence in zip(singles, plain, strict=True):
        packed = pack_groups([single])
        assert packed.input_ids[0].tolist() == sequence[:-1]
        assert packed.position_ids[0].tolist() == list(range(len(sequence) - 1))
    assert split_groups(groups, share_prefix=True) == groups
    shared = sum(g.num_tokens for g in groups)
    repeats = sum(len(g.prompt_ids) * (len(g.responses) - 1) for g in groups)
    assert sum(s.num_tokens for s in singles) - shared == repeats


def test_a_padded_stream_has_the_logprobs_of_a_plain_one(tiny_policy):
    policy = tiny_policy()
    groups = random_groups()
    plain = pack_groups(groups)
    padded = pack_groups(groups, pad_to_multiple=plain.num_tokens + 5)
    with torch.no_grad():
        first, second = (
            policy.wrapped(p.input_ids, p.position_ids, packed=p)[0] for p in (plain, padded)
        )
    assert len(first) == sum(len(r.token_ids) for g in groups for r in g.responses)
    assert shape_of(groups)[0] == len({*plain.rows.tolist()})
    torch.testing.assert_close(first, second, rtol=0, atol=2e-6)
