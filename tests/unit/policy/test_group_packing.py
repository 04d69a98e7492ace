"""The packed stream against a literal construction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.policy.packing import PromptGroup, Response, pack_groups, split_groups

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)
group_lists = st.lists(
    st.tuples(tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=4
)


def build(raw):
    groups, row = [], 0
    for prompt, responses in raw:
        members = tuple(Response(row=row + i, token_ids=r) for i, r in enumerate(responses))
        row += len(responses)
        groups.append(PromptGroup(prompt_ids=prompt, responses=members))
    return groups


@settings(max_examples=60)
@given(group_lists, st.booleans())
def test_every_response_token_is_predicted_from_its_context(raw, share):
    groups = build(raw)
    units = split_groups(groups, share_prefix=share)
    packed = pack_groups(units)
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    assert packed.num_tokens == sum(u.num_tokens for u in units) == len(ids)
    assert sum(span.length for span in packed.spans) == len(ids)
    wanted = {
        (r.row, c): (list(g.prompt_ids), list(r.token_ids), c)
        for g in groups
        for r in g.responses
        for c in range(len(r.token_ids))
    }
    for index, target, row, column in zip(
        *(
            x.tolist()
            for x in (packed.predict_index, packed.target_ids, packed.rows, packed.columns)
        ),
        strict=True,
    ):
        prompt, response, c = wanted.pop((row, column))
        assert target == response[c]
        # The last token before the prediction, and its position in the plain sequence.
        context = prompt + response[:c]
        assert ids[index] == context[-1] and positions[index] == len(context) - 1
    assert not wanted


@settings(max_examples=60)
@given(group_lists)
def test_the_mask_shows_exactly_the_plain_context(raw):
    from megatron_rl.policy.attention_masks import suffix_mask, tree_mask

    for group in build(raw):
        packed = pack_groups([group])
        span = packed.spans[0]
        mask = tree_mask(span.prompt_length, span.response_lengths)
        branch = [0] * span.prompt_length
        for number, length in enumerate(span.response_lengths, start=1):
            branch += [number] * length
        positions = packed.position_ids[0].tolist()
        for query in range(span.length):
            for key in range(span.length):
                related = branch[key] in (0, branch[query])
                expected = related and positions[key] <= positions[query]
                assert bool(mask[query, key]) == expected
    assert torch.equal(suffix_mask(2, 2), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool())


def test_empty_prompts_and_responses_are_refused():
    for prompt, response in (([], [1]), ([1], [])):
        group = PromptGroup(prompt_ids=prompt, responses=(Response(row=0, token_ids=response),))
        with pytest.raises(ValueError, match="at least one token"):
            pack_groups([group])
