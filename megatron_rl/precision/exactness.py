"""Where a run may promise that training reproduces the sampled log-probs bit for bit.

The promise is made only for what was tested: a CPU of one instruction set, one rank a layer on both
sides, every operator between the products shared, equal formats, and power-of-two scales (whose
dequantised operands are exact in BF16). Everywhere else the difference is measured, as always, and
the run says why nothing is promised.

This module imports no torch; the processor comes in as a plain string.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.precision.flow import SHAREABLE_OPERATORS, SHORT, PrecisionFlow
from megatron_rl.precision.formats import BlockFormat

PlatformName = Literal["cpu", "cuda"]
TESTED_ISA = "avx512_bf16"
"""The instruction set whose kernels were compared, without AMX."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What a run says of its log-probs."""

    shared: bool
    """Whether the operators that the flow names are shared with the rollout engine at all."""
    claimed: bool
    """Whether every sampled log-prob is promised to be reproduced."""
    reason: str
    """Why it is not claimed, one clause; empty where it is."""

    def statement(self) -> str:
        """The line of the run's header."""
        if self.claimed:
            return "exactly on-policy: log-probs are reproduced bit for bit"
        return f"not claimed: {self.reason}"


def exactness(
    flow: PrecisionFlow,
    *,
    platform: PlatformName,
    train_tp: int,
    rollout_tp: int,
    sequence_parallel: bool,
    cpu_isa: str | None,
) -> Exactness:
    """What a flow may promise on a platform and layout; pipeline and data parallelism do not count.

    Args:
        flow: The flow.
        platform: Where training and rollout compute.
        train_tp: Tensor-parallel size of training.
        rollout_tp: Tensor-parallel size of rollout.
        sequence_parallel: Whether training splits norms over tensor-parallel ranks.
        cpu_isa: Widest instruction set of the processor, as
            :func:`megatron_rl.platforms.cpu_isa` names it; None where it is not known.
    """
    shared = platform == "cpu" and bool(flow.shared_operators)
    reason = _obstacle(flow, platform, train_tp, rollout_tp, sequence_parallel, cpu_isa)
    return Exactness(shared=shared, claimed=reason is None, reason=reason or "")


def _obstacle(
    flow: PrecisionFlow,
    platform: PlatformName,
    train_tp: int,
    rollout_tp: int,
    sequence_parallel: bool,
    cpu_isa: str | None,
) -> str | None:
    """The first condition that does not hold, or None."""
    if platform != "cpu":
        return "on CUDA training and rollout use kernels of their own"
    if flow.formats_differ:
        return "rollout computes its linear layers in other formats than training"
    if flow.compute_dtype == "float32":
        return "in fp32 the two engines order their sums differently"
    if flow.lm_head != flow.compute_dtype:
        return (
            f"the output layer computes in {SHORT[flow.lm_head]}, whose sums the two engines order "
            "differently"
        )
    missing = [name for name in SHAREABLE_OPERATORS if name not in flow.shared_operators]
    if missing:
        return (
            f"training and rollout share no {', '.join(missing)} (precision.exact=false, or the "
            "flow's shared_operators)"
        )
    for fmt in (flow.linear_weight, flow.linear_input):
        if isinstance(fmt, str) or (isinstance(fmt, BlockFormat) and fmt.scale_rounding == "pow2"):
            continue
        return f"a product of {fmt.short_str()} operands is exact in neither engine"
    if rollout_tp > 1:
        return f"rollout sums over {rollout_tp} tensor-parallel ranks"
    if train_tp > 1:
        split = "sums and splits norms" if sequence_parallel else "sums"
        return f"training {split} over {train_tp} tensor-parallel ranks"
    if cpu_isa != TESTED_ISA:
        return (
            f"the kernels of this processor ({cpu_isa or 'unknown'}) were not compared; those of "
            f"{TESTED_ISA} without AMX were"
        )
    return None
