"""Corners of the log-prob head: padding rows, parts of the loss that are off, extreme logits."""

import pytest
import torch

from megatron_rl.policy.logprobs import token_logprobs, vocab_shard

ROWS, HIDDEN, VOCAB = 19, 12, 53


def case(padding=0, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(ROWS, HIDDEN, generator=generator) * scale
    w = torch.randn(VOCAB + padding, HIDDEN, generator=generator)
    y = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return h.requires_grad_(), w.requires_grad_(), y, vocab_shard(VOCAB, VOCAB + padding, None)


def head(h, w, y, shard, *, temperature=1.0, chunk_tokens=7, **options):
    return token_logprobs(
        h, w, y, shard=shard, temperature=temperature, chunk_tokens=chunk_tokens, **options
    )


def literal(h, w, y, temperature=1.0):
    """The same in float64 by autograd."""
    h, w = (x.detach().double().requires_grad_() for x in (h, w))
    logp = (h @ w[:VOCAB].t() / temperature).log_softmax(-1)
    return h, w, logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def test_padding_rows_may_hold_anything():
    h, w, y, shard = case(padding=11)
    with torch.no_grad():
        w[VOCAB:] = float("nan")
    logprob, entropy = head(h, w, y, shard)
    (logprob.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(x).all() for x in (logprob, entropy, h.grad, w.grad))
    assert w.grad[:VOCAB].any() and not w.grad[VOCAB:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("part", ["logprob", "entropy"])
def test_each_output_alone_has_its_own_gradient(part, temperature):
    h, w, y, shard = case()
    outputs = dict(
        zip(("logprob", "entropy"), head(h, w, y, shard, temperature=temperature), strict=True)
    )
    weight = torch.linspace(-1, 2, ROWS)
    (outputs[part] * weight).sum().backward()
    h64, w64, logprob, entropy = literal(h, w, y, temperature)
    ({"logprob": logprob, "entropy": entropy}[part] * weight.double()).sum().backward()
    # FP32 logits of size 30 leave softmax a relative error of a few 1e-6.
    for ours, exact in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (ours.double() - exact).norm() <= 1e-5 * exact.norm()


def test_an_entropy_that_was_not_computed_has_no_gradient():
    h, w, y, shard = case()
    logprob, entropy = head(h, w, y, shard, with_entropy=False)
    (logprob.sum() + 3 * entropy.sum()).backward()
    h2, w2, _, _ = case()
    head(h2, w2, y, shard)[0].sum().backward()
    assert torch.equal(h.grad, h2.grad) and torch.equal(w.grad, w2.grad)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 3000.0])
def test_flat_and_sharp_distributions_stay_accurate(scale):
    h, w, y, shard = case(scale=scale)
    logprob, entropy = head(h, w, y, shard)
    (logprob.sum() + entropy.sum()).backward()
    _, _, expected, expected_entropy = literal(h, w, y)
    torch.testing.assert_close(logprob.double(), expected, rtol=1e-6, atol=4e-6)
    # The entropy is a difference of numbers of the logits' size.
    largest = (h @ w.t()).abs().max().item()
    torch.testing.assert_close(
        entropy.double(), expected_entropy, rtol=0, atol=4e-6 + 3e-7 * largest
    )
    assert torch.isfinite(h.grad).all() and torch.isfinite(w.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_operands_and_do_not_depend_on_the_chunk(dtype):
    results = []
    for chunk in (1, 6, ROWS, 4 * ROWS):
        h, w, y, shard = case(padding=3)
        h, w = (x.detach().to(dtype).requires_grad_() for x in (h, w))
        logprob, entropy = head(h, w, y, shard, temperature=0.9, chunk_tokens=chunk)
        (logprob * 0.3 + entropy).sum().backward()
        assert logprob.dtype == entropy.dtype == torch.float32
        assert h.grad.dtype == w.grad.dtype == dtype
        results.append([x.detach().float() for x in (logprob, entropy, h.grad, w.grad)])
    # A matrix product may sum in another order for another number of rows. A logit then moves by
    # an ulp, and its probability by that much of itself.
    largest_logit = (h @ w.t()).abs().max().item() / 0.9
    tolerance = torch.finfo(torch.float32).eps * largest_logit if dtype == torch.float32 else 8e-3
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a - b).norm() <= tolerance * a.norm()


def test_no_token_is_no_work():
    h, w, y, shard = case()
    logprob, entropy = head(h[:0], w, y[:0], shard)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert not w.grad.any()
