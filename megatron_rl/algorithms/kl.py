"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

With r = reference(y) / policy(y) for a sampled token y (Schulman, "Approximating KL divergence",
joschu.net/blog/kl-approx.html):

    k1 = -log r              unbiased, high variance, negative for some tokens
    k2 = (log r)^2 / 2       biased, low variance
    k3 = (r - 1) - log r     unbiased, never negative, lower variance than k1 near agreement

As a *value* (a penalty inside the reward, a metric) any of them serves. As a *loss* that is
differentiated per token they are three different objectives, because the gradient of an estimate of
the KL is not an estimate of its gradient (arXiv 2506.09477). Over tokens sampled by the policy:

    gradient                         its expectation
    d k1 = d log policy              0: noise, no regularisation at all
    d k2 = -log r * d log policy     d KL(policy || reference): what the formula promises
    d k3 = (1 - r) * d log policy    d KL(reference || policy): the other direction, equal to
                                     k2's to first order near agreement

so `k1` belongs in the reward (detached), and `k2` or `k3` in the loss. GRPO uses k3
(arXiv 2402.03300).

All three work token by token and read no mask: what they return at a padded position is whatever
the two inputs make of it, so aggregate with the mask, and keep padding finite where gradients flow.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms._checks import full_precision

MAX_LOG_RATIO = 20.0
"""Upper clamp of log r in `k3`: exp(20) is 4.9e8, and exp(89) would leave float32's range."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = log policy - log reference; see the module for what its gradient does not do.

    Args:
        logprobs: [B, S] float32, log-probs of the sampled tokens under the policy.
        ref_logprobs: [B, S] float32, the same tokens under the reference; gets no gradient.

    Returns:
        [B, S] float32, in nats.

    Raises:
        ValueError: shapes differ, or a dtype is below float32.
    """
    return -_log_ratio(logprobs, ref_logprobs).to(logprobs.dtype)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 = (log policy - log reference)^2 / 2; arguments, result and errors as for `k1`."""
    return (_log_ratio(logprobs, ref_logprobs).square() / 2).to(logprobs.dtype)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = expm1(log r) - log r; arguments, result and errors as for `k1`.

    The difference is taken in float64: near agreement k3 is about (log r)^2 / 2, and in float32 the
    two terms cancel to noise as |log r| falls below 1e-4.

    log r is clamped to at most `MAX_LOG_RATIO`; above it the gradient is zero. Below, no clamp is
    needed (k3 grows linearly) and the gradient stays right.
    """
    log_ratio = _log_ratio(logprobs, ref_logprobs).clamp(max=MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).to(logprobs.dtype)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Log r = log reference - log policy, in float64."""
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"ref_logprobs have shape {list(ref_logprobs.shape)}, expected logprobs' "
            f"{list(logprobs.shape)}; score the same tokens under both models."
        )
    full_precision(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return ref_logprobs.detach().double() - logprobs.double()
