"""Log-probs and entropy of response tokens from hidden states, a chunk of tokens at a time.

For hidden state ``h``, vocabulary weight ``W`` and temperature ``tau``:

    z = float32(h @ W^T) / tau        the product rounds to the flow's dtype, everything after is
    FP32 logprob(y) = z_y - logsumexp(z) entropy    = logsumexp(z) - sum_v softmax(z)_v * z_v

The FP32 logits of a whole batch ``[T, V]`` would be its largest tensor by far (a vocabulary of
150,000 and 8,192 tokens: 4.9 GB), and autograd would keep several. Here only ``chunk_tokens`` rows
exist at a time, in forward and in backward, where they are computed again. Vocabulary-parallel:
each TP rank holds ``V / tp`` rows of ``W`` and one MAX and one SUM all-reduce per chunk complete
the softmax. Rows that pad the vocabulary never take part.

Gradients (``g`` from log-prob, ``e`` from entropy):

    dz = g * (1[v = y] - p) - e * p * (z - sum_v p_v z_v),    dh = dz @ W / tau,    dW = dz^T @ h /
    tau

Legend: R tokens, H hidden, V vocabulary, C chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's part of the vocabulary."""

    start: int
    """First token id of the shard."""
    num_valid: int
    """Rows that are tokens; the rest are padding."""
    group: dist.ProcessGroup | None
    """TP group, or None when the shard is the whole vocabulary."""


def vocab_shard(vocab_size: int, rows: int, group: dist.ProcessGroup | None) -> VocabShard:
    """The shard of this rank, given the rows that its weight has (padding included)."""
    if group is None or group.size() == 1:
        return VocabShard(start=0, num_valid=vocab_size, group=None)
    start = group.rank() * rows
    num_valid = min(rows, vocab_size - start)
    assert num_valid > 0, "a TP rank holds vocabulary padding only"
    return VocabShard(start=start, num_valid=num_valid, group=group)


def token_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_R: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each distribution.

    Args:
        hidden_RH: ``[R, H]`` hidden states that predict the targets, flow dtype; the same on all TP
            ranks.
        weight_VH: ``[V / tp, H]`` output weight of this rank, padding rows included.
        target_R: ``[R]`` int64 token ids.
        shard: This rank's part of the vocabulary.
        temperature: Divides the logits; the sampling temperature.
        chunk_tokens: Rows of logits alive at one time.
        with_entropy: Compute the entropy; zeros otherwise.

    Returns:
        Log-probs ``[R]`` and entropies ``[R]``, both float32.
    """
    return _TokenLogprobs.apply(
        hidden_RH, weight_VH, target_R, shard, temperature, chunk_tokens, with_entropy
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_R: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"dtype": torch.float32, "device": hidden_RH.device}
        logprob_R, lse_R, mean_z_R = (torch.empty(len(target_R), **options) for _ in range(3))
        for rows in _chunks(len(target_R), chunk_tokens):
            z_CV = _logits(hidden_RH[rows], weight_VH, shard, temperature)
            stats = _whole_softmax if shard.group is None else _sharded_softmax
            logprob_R[rows], lse_R[rows], mean_z_R[rows] = stats(
                z_CV, target_R[rows], shard, with_entropy
            )
        ctx.save_for_backward(hidden_RH, weight_VH, target_R, lse_R, mean_z_R)
        ctx.options = (shard, temperature, chunk_tokens, with_entropy)
        entropy_R = lse_R - mean_z_R if with_entropy else torch.zeros_like(lse_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprob_R: torch.Tensor, grad_entropy_R: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_RH, weight_VH, target_R, lse_R, mean_z_R = ctx.saved_tensors
        shard, temperature, chunk_tokens, with_entropy = ctx.options
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        valid_VH = grad_weight_VH[: shard.num_valid]
        has_entropy_grad = with_entropy and bool(grad_entropy_R.any())
        for rows in _chunks(len(target_R), chunk_tokens):
            z_CV = _logits(hidden_RH[rows], weight_VH, shard, temperature)
            p_CV = (z_CV - lse_R[rows, None]).exp_()
            g_C, e_C = grad_logprob_R[rows, None], grad_entropy_R[rows, None]
            if has_entropy_grad:
                factor_CV = (z_CV.sub_(mean_z_R[rows, None])).mul_(e_C).add_(g_C)
                dz_CV = p_CV.mul_(factor_CV).neg_()
            else:
                dz_CV = p_CV.mul_(-g_C)
            index_C, owned_C = _local_targets(target_R[rows], shard)
            dz_CV.scatter_add_(1, index_C[:, None], (grad_logprob_R[rows] * owned_C)[:, None])
            dz_CV = dz_CV.mul_(1.0 / temperature).to(weight_VH.dtype)
            grad_hidden_RH[rows] = dz_CV @ weight_VH[: shard.num_valid]
            valid_VH += (dz_CV.t() @ hidden_RH[rows]).float()
        if shard.group is not None:
            dist.all_reduce(grad_hidden_RH, group=shard.group)
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, shard: VocabShard, temperature: float
) -> torch.Tensor:
    z_CV = torch.nn.functional.linear(hidden_CH, weight_VH[: shard.num_valid]).float()
    return z_CV if temperature == 1.0 else z_CV.div_(temperature)


def _local_targets(target_C: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each target in this shard (0 where absent) and whether the shard owns it."""
    index_C = target_C - shard.start
    owned_C = (index_C >= 0) & (index_C < shard.num_valid)
    return index_C.where(owned_C, 0), owned_C


def _whole_softmax(
    z_CV: torch.Tensor, target_C: torch.Tensor, shard: VocabShard, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, logsumexp and mean logit where this rank has every logit.

    ``log_softmax`` is the sampler's own formula, so the log-prob has the sampler's bits when the
    logits do.
    """
    logp_CV = torch.log_softmax(z_CV, dim=-1)
    logprob_C = logp_CV.gather(1, target_C[:, None])[:, 0]
    lse_C = z_CV.gather(1, target_C[:, None])[:, 0] - logprob_C
    if not with_entropy:
        return logprob_C, lse_C, torch.zeros_like(lse_C)
    mean_z_C = torch.linalg.vecdot(logp_CV.exp_(), z_CV)
    return logprob_C, lse_C, mean_z_C


def _sharded_softmax(
    z_CV: torch.Tensor, target_C: torch.Tensor, shard: VocabShard, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from a vocabulary shard: one MAX and one SUM all-reduce."""
    index_C, owned_C = _local_targets(target_C, shard)
    max_C = z_CV.amax(-1)
    target_z_C = z_CV.gather(1, index_C[:, None])[:, 0] * owned_C
    dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=shard.group)
    exp_CV = (z_CV - max_C[:, None]).exp_()
    weighted_C = torch.linalg.vecdot(exp_CV, z_CV) if with_entropy else torch.zeros_like(max_C)
    sums = torch.stack([exp_CV.sum(-1), target_z_C, weighted_C])
    dist.all_reduce(sums, group=shard.group)
    lse_C = sums[0].log() + max_C
    return sums[1] - lse_C, lse_C, sums[2] / sums[0]
