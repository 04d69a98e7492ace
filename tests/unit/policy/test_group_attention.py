"""Attention over packed groups against plain attention of each sequence, values and gradients."""

import math

import pytest
import torch

HEADS, GROUPS, DIM = 6, 2, 32


@pytest.fixture
def attention(megatron_config):
    """The module, and a function that builds its core attention as megatron does."""
    from megatron_rl.policy import attention as module

    def make(scale=None, rollout_kernel=False):
        return module.GroupAttention(
            megatron_config, 1, None, "self", softmax_scale=scale, rollout_kernel=rollout_kernel
        )

    return module, make


def operands(tokens, groups=GROUPS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(tokens, 1, heads, DIM, generator=generator).requires_grad_()
        for heads in (HEADS, groups, groups)
    )


def spans_of(shapes):
    from megatron_rl.policy.packing import GroupSpan

    spans, start = [], 0
    for prompt, responses in shapes:
        spans.append(GroupSpan(start=start, prompt_length=prompt, response_lengths=responses))
        start += spans[-1].length
    return tuple(spans), start


def run(core, qkv, spans):
    from megatron_rl.policy.attention import PackedGroupParams

    return core(*qkv, None, packed_seq_params=PackedGroupParams(spans=spans))


def literal(q, k, v, spans, scale=None):
    """softmax(q k^T) v by hand, a sequence a response, each key/value head repeated."""
    scale = scale or 1 / math.sqrt(DIM)
    k, v = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    out = [None] * len(q)
    for span in spans:
        prompt = list(range(span.start, span.start + span.prompt_length))
        first = prompt[-1] + 1
        for length in span.response_lengths or (0,):
            sequence = [*prompt, *range(first, first + length)]
            first += length
            scores = torch.einsum("qhd,khd->hqk", q[sequence, 0], k[sequence, 0]) * scale
            hidden = torch.ones(len(sequence), len(sequence)).tril() == 0
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            result = torch.einsum("hqk,khd->qhd", weights, v[sequence, 0])
            for place, row in zip(sequence, result, strict=True):
                if out[place] is None:  # the prompt is the same in every sequence of its group
                    out[place] = row
    return torch.stack(out).reshape(len(q), 1, -1)


SHAPES = [
    [(7, ())],
    [(5, (4,))],
    [(5, (4, 1, 6))],
    [(3, (0, 2, 0, 5))],
    [(1, (1, 1))],
    [(6, (0, 0))],
    [(4, (3, 2)), (2, (5,)), (3, ()), (1, (2, 0, 4))],
]


@pytest.mark.parametrize("groups", [1, 2, HEADS], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("limit", [0, 10_000], ids=["per-response", "dense"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_both_paths_equal_plain_attention(attention, monkeypatch, shapes, limit, groups):
    module, make = attention
    monkeypatch.setattr(module, "DENSE_LIMIT_TOKENS", limit)
    spans, tokens = spans_of(shapes)
    ours, plain = operands(tokens, groups), operands(tokens, groups)
    weight = torch.linspace(-1, 1, tokens * HEADS * DIM).reshape(tokens, 1, -1)
    out, expected = run(make(), ours, spans), literal(*plain, spans)
    for result in (out, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "rollout"])
def test_the_softmax_scale_is_used(attention, kernel):
    spans, tokens = spans_of([(4, (3, 2))])
    qkv = operands(tokens)
    expected = literal(*qkv, spans, scale=0.5)
    found = run(attention[1](0.5, kernel), qkv, spans)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shapes", [*SHAPES, [(33, (40, 3)), (64, (1, 33))]], ids=str)
def test_the_rollout_kernel_equals_plain_attention(attention, shapes):
    spans, tokens = spans_of(shapes)
    ours, plain = operands(tokens), operands(tokens)
    weight = torch.linspace(-1, 1, tokens * HEADS * DIM).reshape(tokens, 1, -1)
    out, expected = run(attention[1](None, True), ours, spans), literal(*plain, spans)
    for result in (out, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=2e-6)


def test_the_rollout_kernel_computes_a_token_from_its_own_operands_alone(attention):
    """A sequence's bits are the same alone, beside others, and behind a shared prompt."""
    spans, tokens = spans_of([(37, (40, 30)), (5, (9,))])
    qkv = [x.detach().bfloat16() for x in operands(tokens)]
    packed = run(attention[1](None, True), qkv, spans)
    first = 37 + 40
    alone = [*range(37), *range(first, first + 30)]
    single, _ = spans_of([(67, ())])
    again = run(attention[1](None, True), [x[alone] for x in qkv], single)
    assert torch.equal(packed[alone], again)


@pytest.mark.parametrize("limit", [0, 10_000], ids=["per-response", "dense"])
def test_no_gradient_crosses_groups_or_siblings(attention, monkeypatch, limit):
    module, make = attention
    monkeypatch.setattr(module, "DENSE_LIMIT_TOKENS", limit)
    spans, tokens = spans_of([(4, (3, 2)), (2, (3, 3))])
    qkv = operands(tokens)
    run(make(), qkv, spans)[4:7].sum().backward()  # the first response of the first group
    for operand in qkv[1:]:
        seen = operand.grad.flatten(1).any(1)
        assert seen.tolist() == [True] * 7 + [False] * (tokens - 7)


def test_spans_that_miss_tokens_are_a_programming_error(attention):
    spans, tokens = spans_of([(4, (3,))])
    with pytest.raises(AssertionError, match="do not cover"):
        run(attention[1](), operands(tokens + 1), spans)
