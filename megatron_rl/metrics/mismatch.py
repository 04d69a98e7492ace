"""How far the trainer's log-probs are from those of the rollout engine that sampled the tokens.

Why: in RL the two are computed by different programs. Their difference is the first thing to look
at in a run that stops learning, and it has to be exactly 0 where a precision flow promises bitwise
agreement. The numbers here are therefore exact in that case, not merely small, and the same however
the batch was cut into micro-batches and ranks.

Over the response tokens, which were sampled by the rollout engine, with

    d = log train - log rollout,   rho = exp(d),   p = train probability,   q = rollout probability

and over the sequences that have a response token, with D = sum of d and n its number of tokens:

    training/rollout_probs_diff_mean, _max    mean, max of |p - q|
    training/rollout_probs_diff_std           sample standard deviation of |p - q|; 0 for one token
    training/rollout_actor_probs_pearson_corr correlation of p and q (MiniMax-M1, arXiv 2506.13585);
                                              1 if all log-probs are equal, else NaN where p or q is
                                              constant, for it is then undefined
    rollout_corr/kl                           mean of -d: estimates KL(rollout || train)
    rollout_corr/k3_kl                        mean of rho - 1 - d: the same, never negative
    rollout_corr/logp_diff_abs_mean, _max     mean, max of |d|
    rollout_corr/log_ppl_diff                 sequence mean of -D / n: log ppl of train - rollout
    rollout_corr/ppl_ratio                    sequence mean of exp(-D / n)
    rollout_corr/chi2_token                   mean of rho^2, minus 1
    rollout_corr/chi2_seq                     sequence mean of exp(D)^2, minus 1
    rollout_corr/ess                          (sum rho)^2 / (tokens * sum rho^2), in (0, 1]
    rollout_corr/token_mult_prob_error        mean of exp |d|; healthy below about 1.05 (NeMo-RL)
    rollout_corr/exact_share                  share of tokens whose two log-probs are equal

and over the tokens of responses with a positive, or a negative, advantage (:func:`signed_means`):

    rollout_corr/logp_diff_mean_pos, _neg     mean of d: a skew between the two grows before the KL
                                              does (VeXact, arXiv 2605.14220)

Log-ratios are clamped to +-20 inside exp, so one wild token cannot make a metric infinite; d itself
is not. All arithmetic is in float64. Keys follow verl's, whose dashboards users have.

Nothing is corrected here (see `megatron_rl.algorithms.correction`), nothing is judged, and there is
no process group: ranks exchange `MismatchAccumulator.state()`.
"""

import math

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0

# The state of an accumulator is one float64 vector of three parts, each merged in its own way.
_SUMS = (
    "tokens",
    "sequences",
    "equal",
    "neg_d",
    "abs_d",
    "k3",
    "rho",
    "rho2",
    "chi2",
    "exp_abs_d",
    "log_ppl_diff",
    "ppl_ratio",
    "chi2_seq",
)
_MAXES = ("abs_d", "probs_diff")
# Means of (p, q, |p - q|), then the centred second moments of these pairs of them.
_PAIRS = ((0, 0), (1, 1), (0, 1), (2, 2))
_SIZES = (len(_SUMS), len(_MAXES), 3, len(_PAIRS))


def mismatch_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Mismatch of one whole batch; see the module for the keys and their definitions.

    Args:
        train_logprobs: [B, S] float, log-probs of the sampled tokens under the trainer.
        rollout_logprobs: [B, S] float, the same as the rollout engine reported them, of the
            distribution that was sampled (temperature applied).
        mask: [B, S] bool or 0/1, the response tokens. Values elsewhere are never read.

    Returns:
        Metric key to value.

    Raises:
        ValueError: no response token, a log-prob under the mask that is not finite, or shapes that
            differ.
    """
    accumulator = MismatchAccumulator()
    accumulator.add(train_logprobs, rollout_logprobs, mask)
    return accumulator.metrics()


def signed_means(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, advantages: Tensor
) -> dict[str, float]:
    """Mean difference of log-probs by the sign of the advantage.

    Args:
        train_logprobs: [B, S] float, as in `mismatch_metrics`.
        rollout_logprobs: [B, S] float, likewise.
        mask: [B, S] bool or 0/1, the tokens to look at.
        advantages: [B] float, of each sequence.

    Returns:
        Metric key to value; a sign that no token has is left out.
    """
    d_BS = train_logprobs.detach().double() - rollout_logprobs.detach().double()
    means = {}
    for name, chosen_B in (("pos", advantages > 0), ("neg", advantages < 0)):
        d_N = d_BS[mask.bool() & chosen_B[:, None]]
        if d_N.numel():
            means[f"rollout_corr/logp_diff_mean_{name}"] = d_N.mean().item()
    return means


class MismatchAccumulator:
    """Mismatch of a batch that arrives in parts.

    Each part holds whole sequences. Across ranks, gather the states and merge them:

        accumulator.add(train_logprobs, rollout_logprobs, mask)      # for each micro-batch
        state = accumulator.state()      # on the CPU: move it to the GPU for an NCCL group
        states = [torch.empty_like(state) for _ in range(world_size)]
        torch.distributed.all_gather(states, state)
        metrics = MismatchAccumulator.from_states(torch.stack(states)).metrics()

    A gather rather than a sum, because variances and the correlation are kept as centred moments
    (Chan, Golub, LeVeque 1979): raw sums of squares cancel when probabilities hardly vary, and
    centred ones cannot be added without their means. It also gives every rank the same bits.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._state = torch.zeros(sum(_SIZES), dtype=torch.float64)

    def add(self, train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Add a part; arguments and errors as for `mismatch_metrics`, but it may have no token."""
        self.merge(_summarise(train_logprobs, rollout_logprobs, mask))

    def state(self) -> Tensor:
        """What was added so far: a new [K] float64 tensor on the CPU, to be sent to other ranks."""
        return self._state.clone()

    def merge(self, state: Tensor) -> None:
        """Add what another accumulator's `state()` holds."""
        assert state.shape == self._state.shape, f"not a mismatch state: {list(state.shape)}"
        self._state = _combine(self._state, state.to(self._state))

    @classmethod
    def from_states(cls, states: Tensor) -> "MismatchAccumulator":
        """Merge the states [R, K] of R accumulators, in order."""
        accumulator = cls()
        for state in states:
            accumulator.merge(state)
        return accumulator

    def metrics(self) -> dict[str, float]:
        """Metrics of everything added.

        Raises:
            ValueError: no response token was added.
        """
        sums_T, maxes_T, means_T, moments_T = torch.split(self._state, list(_SIZES))
        sums = dict(zip(_SUMS, sums_T.tolist(), strict=True))
        maxes = dict(zip(_MAXES, maxes_T.tolist(), strict=True))
        tokens, sequences = sums["tokens"], sums["sequences"]
        if tokens == 0:
            raise ValueError(
                "mismatch of a batch without response tokens is undefined; check that rollouts "
                "returned tokens and that the mask marks them."
            )
        var_p, var_q, cov_pq, var_diff = moments_T.tolist()
        return {
            "training/rollout_probs_diff_mean": means_T[2].item(),
            "training/rollout_probs_diff_max": maxes["probs_diff"],
            "training/rollout_probs_diff_std": math.sqrt(var_diff / max(tokens - 1, 1)),
            "training/rollout_actor_probs_pearson_corr": (
                1.0 if sums["equal"] == tokens else _pearson(var_p, var_q, cov_pq)
            ),
            "rollout_corr/kl": sums["neg_d"] / tokens,
            "rollout_corr/k3_kl": sums["k3"] / tokens,
            "rollout_corr/logp_diff_abs_mean": sums["abs_d"] / tokens,
            "rollout_corr/logp_diff_abs_max": maxes["abs_d"],
            "rollout_corr/log_ppl_diff": sums["log_ppl_diff"] / sequences,
            "rollout_corr/ppl_ratio": sums["ppl_ratio"] / sequences,
            "rollout_corr/chi2_token": sums["chi2"] / tokens,
            "rollout_corr/chi2_seq": sums["chi2_seq"] / sequences,
            # By Cauchy-Schwarz at most 1; rounding may say otherwise.
            "rollout_corr/ess": min(sums["rho"] ** 2 / (tokens * sums["rho2"]), 1.0),
            "rollout_corr/token_mult_prob_error": sums["exp_abs_d"] / tokens,
            "rollout_corr/exact_share": sums["equal"] / tokens,
        }


def _summarise(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The state [K] of one part. N tokens; sequences without a token are left out."""
    _check(train_logprobs, rollout_logprobs, mask)
    keep_B = mask.bool().any(dim=1)
    if not keep_B.any():
        return torch.zeros(sum(_SIZES), dtype=torch.float64)
    mask_BS = mask.bool()[keep_B]
    train_BS = train_logprobs.detach()[keep_B]
    rollout_BS = rollout_logprobs.detach()[keep_B]

    equal_N = train_BS[mask_BS] == rollout_BS[mask_BS]
    d_BS = (train_BS.double() - rollout_BS.double()).masked_fill(~mask_BS, 0.0)
    d_N = d_BS[mask_BS]
    clamped_N = d_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1 and not exp - 1: chi2 and k3 are of the order of d^2, far below the rounding of 1.
    below_N = d_N.clamp(max=_MAX_LOG_RATIO)
    sum_B = d_BS.sum(dim=1)
    log_ppl_diff_B = -sum_B / mask_BS.sum(dim=1)
    sums = torch.stack(
        [
            mask_BS.sum().double(),
            keep_B.sum().double(),
            equal_N.sum().double(),
            (-d_N).sum(),
            d_N.abs().sum(),
            (torch.expm1(below_N) - below_N).sum(),
            torch.exp(clamped_N).sum(),
            torch.exp(2 * clamped_N).sum(),
            torch.expm1(2 * clamped_N).sum(),
            torch.exp(clamped_N.abs()).sum(),
            log_ppl_diff_B.sum(),
            torch.exp(log_ppl_diff_B.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)).sum(),
            torch.expm1(2 * sum_B.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)).sum(),
        ]
    )
    p_N, q_N = train_BS[mask_BS].double().exp(), rollout_BS[mask_BS].double().exp()
    x_3N = torch.stack([p_N, q_N, (p_N - q_N).abs()])
    maxes = torch.stack([d_N.abs().max(), x_3N[2].max()])
    # Around the first token, so that a constant has exactly its own value as mean and no variance.
    first_31 = x_3N[:, :1]
    means_31 = first_31 + (x_3N - first_31).mean(dim=1, keepdim=True)
    centred_3N = x_3N - means_31
    moments = torch.stack([(centred_3N[i] * centred_3N[j]).sum() for i, j in _PAIRS])
    return torch.cat([sums, maxes, means_31[:, 0], moments]).cpu()


def _combine(a: Tensor, b: Tensor) -> Tensor:
    """Merge two states."""
    sums_a, maxes_a, means_a, moments_a = torch.split(a, list(_SIZES))
    sums_b, maxes_b, means_b, moments_b = torch.split(b, list(_SIZES))
    sums = sums_a + sums_b
    tokens_a, tokens_b, tokens = sums_a[0], sums_b[0], sums[0].clamp(min=1)
    delta = means_b - means_a
    shift = torch.stack([delta[i] * delta[j] for i, j in _PAIRS])
    return torch.cat(
        [
            sums,
            torch.maximum(maxes_a, maxes_b),
            means_a + delta * (tokens_b / tokens),
            moments_a + moments_b + shift * (tokens_a * tokens_b / tokens),
        ]
    )


def _pearson(var_p: float, var_q: float, cov_pq: float) -> float:
    scale = math.sqrt(var_p * var_q)
    return max(-1.0, min(1.0, cov_pq / scale)) if scale > 0 else math.nan


def _check(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
    shapes = [list(t.shape) for t in (train_logprobs, rollout_logprobs, mask)]
    if mask.dim() != 2 or shapes[0] != shapes[2] or shapes[1] != shapes[2]:
        raise ValueError(
            f"train_logprobs, rollout_logprobs and mask have shapes {shapes}, expected one [B, S]; "
            "pass response positions only, padded to one length."
        )
    finite = torch.isfinite(train_logprobs) & torch.isfinite(rollout_logprobs)
    not_finite = (mask.bool() & ~finite).nonzero()
    if not_finite.numel():
        b, s = not_finite[0].tolist()
        raise ValueError(
            f"log-probs at [{b}, {s}] are {train_logprobs[b, s].item()} (train) and "
            f"{rollout_logprobs[b, s].item()} (rollout), expected finite numbers; look for NaN "
            "weights after the last weight sync, or mask the position."
        )
