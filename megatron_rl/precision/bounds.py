"""The mean difference of log-probs that each kind of flow is expected to stay within.

Where weights are identical, the difference is what the arithmetic of two engines makes of one
policy. A figure far above these is a fault (stale weights, another model, a wrong temperature), not
rounding. Loose on purpose: they separate a fault from rounding on models of any size, and are not
a measure of quality. ``precision.gate_bound`` overrides them.
"""

from megatron_rl.precision.flow import DType, PrecisionFlow

EXACT = 0.0
"""Where exactness is claimed, any difference is a fault."""
PLAIN: dict[DType, float] = {
    # Eight significant bits; two engines on one BF16 model of 30 layers differ by a few hundredths.
    # NeMo-RL calls mean exp|d| below 1.05 healthy, which is the same magnitude.
    "bfloat16": 0.1,
    # Eleven significant bits, so an eighth of BF16's rounding (arXiv 2510.26788), with a margin.
    "float16": 0.02,
    # Only the order of sums differs: below 1e-5 as measured on a CPU, times ten.
    "float32": 1e-4,
}
"""Flows that quantise nothing, by compute dtype."""
QUANTISED = 0.15
"""Both sides multiply equal block-FP8 operands: BF16's differences, and codes that they flip."""
MISMATCHED = 0.3
"""Rollout multiplies in other formats than training: the quantisation error itself (three bits of
mantissa in E4M3) is part of the difference. The order of mismatch is FP8 in rollout only, then FP8
in both, then BF16 (NeMo-RL's guide on low precision)."""


def flow_bound(flow: PrecisionFlow, *, exact: bool) -> float:
    """Largest accepted mean |log-prob difference| of a flow at identical weights, in nats.

    Args:
        flow: The flow.
        exact: Whether the run claims that log-probs are reproduced bit for bit.
    """
    if exact:
        return EXACT
    if flow.formats_differ:
        return MISMATCHED
    if flow.trains_quantised:
        return QUANTISED
    return PLAIN[flow.compute_dtype]
