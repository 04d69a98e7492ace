"""Advantages of whole responses from their scalar rewards.

Why: each estimator is a few lines, but the same few faults recur in practice: groups taken by
position after samples were reordered or dropped, NaN from the standard deviation of a single
sample, and a group of equal rewards that gets an advantage of rounding size, which a division by
its tiny standard deviation then blows up. The grouping below is shared, so these are handled once:

- a sample belongs to the group of its id, wherever it stands in the batch;
- a group whose largest and smallest reward are equal has advantage exactly 0;
- a group of one sample has no baseline: advantage 0, counted apart.

Sums run on the CPU, in float64, in an order that depends on the values alone: neither the order in
which samples arrive nor an atomic add on a GPU changes a bit. Critic-based estimators and
token-level rewards are not here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

EstimatorName = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
ESTIMATOR_NAMES: tuple[EstimatorName, ...] = get_args(EstimatorName)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Advantages:
    """Advantages of a batch, and what its groups could teach."""

    values: Tensor
    """[B] float32, on the rewards' device; one number for all tokens of a response."""
    num_zero_spread_groups: int
    """Groups of two or more samples with equal rewards: no group-relative signal."""
    num_singleton_groups: int
    """Groups of one sample, usually because the others failed."""


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Advantages:
    """Group-relative advantage.

        A_i = (r_i - mean_g(r)) / (std_g(r) + epsilon)

    Source: DeepSeekMath, arXiv 2402.03300, outcome supervision. The paper does not say which
    standard deviation; this is the sample one (divisor K - 1), as verl and TRL compute it.

    Args:
        rewards: [B] float, finite.
        group_ids: [B] int64; samples of one prompt share an id. Any values, any order.
        normalize_by_std: divide by the group's standard deviation.
        epsilon: added to the standard deviation; in units of reward, positive.

    Raises:
        ValueError: a reward that is not finite, shapes or dtypes that do not fit, epsilon <= 0.
    """
    groups = _Groups.of(rewards, group_ids)
    centred_B = groups.centred()
    if normalize_by_std:
        _require_positive(epsilon)
        variance_G = groups.sum(centred_B.square()) / (groups.counts_G - 1).clamp(min=1)
        centred_B = centred_B / (variance_G.sqrt()[groups.index_B] + epsilon)
    return groups.result(centred_B)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Advantages:
    """Group-relative advantage without the division by the standard deviation.

        A_i = r_i - mean_g(r)

    Source: Dr. GRPO, arXiv 2503.20783: the division gives too easy and too hard prompts more
    weight. The other half of Dr. GRPO is the aggregation `seq-mean-token-sum-norm`. Arguments and
    errors as for `grpo`.
    """
    return grpo(rewards, group_ids, normalize_by_std=False)


def rloo(rewards: Tensor, group_ids: Tensor) -> Advantages:
    """Leave-one-out baseline, which is unbiased: it does not contain the sample it is applied to.

        A_i = r_i - (1 / (K - 1)) sum_{j != i} r_j = K / (K - 1) * (r_i - mean_g(r))

    Source: RLOO, arXiv 2402.14740. Arguments and errors as for `grpo`.
    """
    groups = _Groups.of(rewards, group_ids)
    factor_G = groups.counts_G / (groups.counts_G - 1).clamp(min=1)
    return groups.result(groups.centred() * factor_G[groups.index_B])


def reinforce_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_by_std: bool = False,
    epsilon: float = 1e-6,
) -> Advantages:
    """REINFORCE with the mean reward of the batch as its baseline.

        A_i = r_i - mean_batch(r)
        A_i = (r_i - mean_batch(r)) / (std_batch(r) + epsilon)     with normalize_by_std

    Source: Williams 1992, doi 10.1007/BF00992696; the normalised form is the global normalisation
    of REINFORCE++, arXiv 2501.03262. It depends on every sample: call it on the global batch.
    `group_ids` serve the two counts only. A batch of equal rewards has advantage exactly 0.
    Arguments and errors as for `grpo`.
    """
    groups = _Groups.of(rewards, group_ids)
    batch = _Groups.of(rewards, torch.zeros_like(group_ids))
    centred_B = batch.centred()
    if normalize_by_std:
        _require_positive(epsilon)
        variance = batch.sum(centred_B.square()) / max(centred_B.numel() - 1, 1)
        centred_B = centred_B / (variance.sqrt()[batch.index_B] + epsilon)
    return groups.result(centred_B)


def get_estimator(name: str) -> Callable[[Tensor, Tensor], Advantages]:
    """The estimator of that name, to be called with `(rewards, group_ids)`.

    Raises:
        ValueError: no such estimator.
    """
    match name:
        case "grpo":
            return grpo
        case "dr_grpo":
            return dr_grpo
        case "rloo":
            return rloo
        case "reinforce_baseline":
            return reinforce_baseline
    raise ValueError(
        f"advantage estimator is {name!r}, expected one of: {', '.join(ESTIMATOR_NAMES)}."
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Groups:
    """Rewards by group. B samples, G groups; float64 on the CPU."""

    device: torch.device
    rewards_B: Tensor
    index_B: Tensor
    order_B: Tensor
    counts_G: Tensor
    has_spread_G: Tensor

    @staticmethod
    def of(rewards: Tensor, group_ids: Tensor) -> "_Groups":
        if rewards.dim() != 1 or group_ids.shape != rewards.shape:
            raise ValueError(
                f"rewards have shape {list(rewards.shape)} and group_ids {list(group_ids.shape)}, "
                "expected [B] and [B]; pass one scalar reward and one id per response."
            )
        if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
            raise ValueError(
                f"group_ids are {group_ids.dtype}, expected int64; number the prompts of the batch."
            )
        not_finite = (~torch.isfinite(rewards)).nonzero()
        if not_finite.numel():
            sample = int(not_finite[0])
            raise ValueError(
                f"the reward of sample {sample} is {rewards[sample].item()}, expected a finite "
                "number; make the reward function return one, or drop the sample before this."
            )
        rewards_B = rewards.detach().cpu().double()
        _, index_B, counts_G = torch.unique(
            group_ids.cpu(), return_inverse=True, return_counts=True
        )
        by_value_B = torch.argsort(rewards_B, stable=True)
        order_B = by_value_B[torch.argsort(index_B[by_value_B], stable=True)]
        empty_G = torch.zeros(counts_G.shape, dtype=torch.float64)
        return _Groups(
            device=rewards.device,
            rewards_B=rewards_B,
            index_B=index_B,
            order_B=order_B,
            counts_G=counts_G,
            has_spread_G=empty_G.scatter_reduce(0, index_B, rewards_B, "amax", include_self=False)
            > empty_G.scatter_reduce(0, index_B, rewards_B, "amin", include_self=False),
        )

    def sum(self, values_B: Tensor) -> Tensor:
        """Sum [B] into [G], in ascending order of the rewards."""
        zeros_G = values_B.new_zeros(self.counts_G.shape)
        return zeros_G.index_add(0, self.index_B[self.order_B], values_B[self.order_B])

    def centred(self) -> Tensor:
        """Rewards minus their group's mean, [B]; exactly 0 where all rewards of a group agree."""
        # The mean of equal numbers is not always that number: 0.1 + 0.1 + 0.1 is not 3 * 0.1.
        mean_G = self.sum(self.rewards_B) / self.counts_G
        centred_B = self.rewards_B - mean_G[self.index_B]
        return centred_B.masked_fill(~self.has_spread_G[self.index_B], 0.0)

    def result(self, values_B: Tensor) -> Advantages:
        single_G = self.counts_G == 1
        return Advantages(
            values=values_B.float().to(self.device),
            num_zero_spread_groups=int((~self.has_spread_G & ~single_G).sum()),
            num_singleton_groups=int(single_G.sum()),
        )


def _require_positive(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, expected a positive number; 1e-6 is usual.")
