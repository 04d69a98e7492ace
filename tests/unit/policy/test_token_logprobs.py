"""The chunked log-prob head against autograd, and its memory; RMSNorm against transformers."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.policy.logprobs import VocabShard, token_logprobs, vocab_shard


def case(dtype=torch.float32, rows=37, vocab=101, padding=0, hidden=16):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(rows, hidden, generator=generator).to(dtype)
    w = (torch.randn(vocab + padding, hidden, generator=generator) * 0.5).to(dtype)
    y = torch.randint(0, vocab, (rows,), generator=generator)
    coefficients = torch.randn(2, rows, generator=generator)
    shard = vocab_shard(vocab, vocab + padding, None)
    return h.requires_grad_(), w.requires_grad_(), y, coefficients, shard


@pytest.mark.parametrize("chunk", [1, 5, 37, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 27])
def test_values_and_gradients_equal_autograd(chunk, temperature, padding):
    h, w, y, (a, b), shard = case(padding=padding)
    logprob, entropy = token_logprobs(
        h, w, y, shard=shard, temperature=temperature, chunk_tokens=chunk
    )
    ((a * logprob).sum() + (b * entropy).sum()).backward()
    h2, w2 = (x.detach().double().requires_grad_() for x in (h, w))
    logp = ((h2 @ w2[: shard.num_valid].t()) / temperature).log_softmax(-1)
    expected_lp = logp.gather(1, y[:, None])[:, 0]
    expected_entropy = -(logp.exp() * logp).sum(-1)
    ((a * expected_lp).sum() + (b * expected_entropy).sum()).backward()
    torch.testing.assert_close(logprob.double(), expected_lp, rtol=0, atol=4e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=5e-6)
    torch.testing.assert_close(h.grad.double(), h2.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), w2.grad, rtol=0, atol=2e-5)
    assert not w.grad[shard.num_valid :].any()


def test_the_logprob_has_the_bits_of_log_softmax():
    h, w, y, _, shard = case(torch.bfloat16)
    logprob, _ = token_logprobs(h, w, y, shard=shard, temperature=1.0, chunk_tokens=8)
    expected = torch.cat(
        [torch.nn.functional.linear(x, w).float().log_softmax(-1) for x in h.split(8)]
    )
    assert torch.equal(logprob, expected.gather(1, y[:, None])[:, 0])


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operator made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_exists():
    h, w, y, (a, b), shard = case(rows=256, vocab=1000, hidden=8)
    with LargestTensor() as seen:
        logprob, entropy = token_logprobs(h, w, y, shard=shard, temperature=1.0, chunk_tokens=16)
        ((a * logprob).sum() + (b * entropy).sum()).backward()
    # The chunk's logits, and the weight itself; far from 256 x 1000.
    assert seen.numel == max(16 * 1000, 1000 * 8)


def test_entropy_is_optional_and_bounded():
    h, w, y, _, shard = case()
    with torch.no_grad():
        options = {"shard": shard, "temperature": 1.0, "chunk_tokens": 8}
        _, none = token_logprobs(h, w, y, with_entropy=False, **options)
        _, entropy = token_logprobs(h, w, y, **options)
    assert not none.any() and (entropy > 0).all() and (entropy <= math.log(101) + 1e-5).all()


def test_a_rank_with_padding_only_is_a_programming_error():
    class Group:
        def size(self):
            return 2

        def rank(self):
            return 1

    group = Group()
    assert vocab_shard(5, 3, group) == VocabShard(start=3, num_valid=2, group=group)
    with pytest.raises(AssertionError):
        vocab_shard(3, 3, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_bits_of_transformers(tiny_policy, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = tiny_policy(flow="fp32" if dtype == torch.float32 else "bf16").megatron_config
    from megatron_rl.policy.norm import RMSNorm

    for width in (128, 576):
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(50, width, generator=generator).to(dtype)
        weight = torch.randn(width, generator=generator).to(dtype)
        ours, theirs = RMSNorm(config, width, eps=1e-5), LlamaRMSNorm(width, eps=1e-5).to(dtype)
        grads = []
        outputs = []
        for norm in (ours, theirs):
            norm.weight.data.copy_(weight)
            leaf = x.clone().requires_grad_()
            out = norm(leaf)
            (out.float() * torch.linspace(-1, 1, width)).sum().backward()
            outputs.append(out)
            grads.append((leaf.grad.float(), norm.weight.grad.float()))
        assert torch.equal(*outputs)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        for a, b in zip(*grads, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()
