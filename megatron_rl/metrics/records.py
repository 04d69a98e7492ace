"""Metric records, reduced once.

A value that is averaged over micro-batches, then over ranks, is only right when every average
carries its weight. So the parts of a step emit records, and one accumulator reduces them at the
end; accumulators of several ranks merge into what a single one would have seen. Deliberately does
no communication (callers gather accumulators, which pickle) and knows no particular key.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One observation of a metric.

    Raises:
        ValueError: The reduction is unknown, the weight is negative or not finite, or a weight is
            given to a reduction that ignores it.
    """

    key: str
    """Name, such as ``actor/entropy``."""
    value: float
    """The observation; may be NaN or infinite, which the reduced value then shows."""
    reduction: Reduction
    """How observations of this key become one number."""
    weight: float = field(default=1.0, kw_only=True)
    """``mean`` only: what the value is an average over (tokens, samples)."""
    unit: str = field(default="", kw_only=True)
    """Unit for people, such as ``s`` or ``tokens``."""

    def __post_init__(self) -> None:
        """Refuses records that no reduction could treat correctly."""
        if self.reduction not in get_args(Reduction):
            raise ValueError(
                f"metric {self.key!r} has reduction={self.reduction!r}; "
                f"use one of {', '.join(get_args(Reduction))}"
            )
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"metric {self.key!r} has weight={self.weight}; use a finite number, 0 or more"
            )
        if self.weight != 1.0 and self.reduction != "mean":
            raise ValueError(
                f"metric {self.key!r} has weight={self.weight}, which reduction={self.reduction!r} "
                "ignores; drop the weight or use reduction='mean'"
            )


@dataclass(slots=True)
class _Partial:
    """The partial result of one key. Sums are exact, so no order of additions can change them."""

    reduction: Reduction
    unit: str
    finite_sum: Fraction = Fraction(0)
    """Exact sum of ``weight * value`` over finite values."""
    weight_sum: Fraction = Fraction(0)
    special: float = 0.0
    """Sum of the NaN and infinite values seen; 0 when there were none."""
    extreme: float | None = None
    """``max``, ``min``: the extreme so far (NaN wins). ``last``: the latest value."""

    def add(self, value: float, weight: float) -> None:
        if self.reduction in ("mean", "sum"):
            self._add_sums(*_split(value, weight), Fraction(weight))
        else:
            self._add_extreme(value)

    def merge(self, other: "_Partial") -> None:
        self._add_sums(other.finite_sum, other.special, other.weight_sum)
        if other.extreme is not None:
            self._add_extreme(other.extreme)

    def _add_sums(self, finite: Fraction, special: float, weight: Fraction) -> None:
        self.finite_sum += finite
        self.special += special
        self.weight_sum += weight

    def _add_extreme(self, value: float) -> None:
        current = self.extreme
        if current is None or self.reduction == "last":
            self.extreme = value
        elif math.isnan(current) or math.isnan(value):
            self.extreme = math.nan
        else:
            self.extreme = max(current, value) if self.reduction == "max" else min(current, value)

    def result(self) -> float:
        if self.extreme is not None:
            return self.extreme
        if self.special != 0.0:  # also true of NaN
            return self.special
        if self.reduction == "sum":
            return _to_float(self.finite_sum)
        return _to_float(self.finite_sum / self.weight_sum) if self.weight_sum else math.nan


class MetricAccumulator:
    """Reduces records as they come; accumulators of several ranks or micro-batches merge.

    The result does not depend on the order of records nor on how they were spread over
    accumulators, to the last bit. The one exception is ``last``, which means the record added (or
    merged) last.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._partials: dict[str, _Partial] = {}

    def add(self, metric: Metric) -> None:
        """Adds one record.

        Raises:
            ValueError: The key was seen with another reduction or unit.
        """
        self._partial(metric.key, metric.reduction, metric.unit).add(
            float(metric.value), float(metric.weight)
        )

    def merge(self, other: "MetricAccumulator") -> None:
        """Adds everything that ``other`` has seen; ``other`` is left as it is.

        Raises:
            ValueError: The two hold one key with different reductions or units.
        """
        for key, partial in other._partials.items():
            self._partial(key, partial.reduction, partial.unit).merge(partial)

    def result(self) -> dict[str, float]:
        """The reduced value of every key, keys sorted. A mean over weight 0 is NaN."""
        return {key: self._partials[key].result() for key in sorted(self._partials)}

    def _partial(self, key: str, reduction: Reduction, unit: str) -> _Partial:
        partial = self._partials.setdefault(key, _Partial(reduction, unit))
        if (partial.reduction, partial.unit) != (reduction, unit):
            raise ValueError(
                f"metric {key!r} is recorded as {partial.reduction} (unit {partial.unit!r}) and "
                f"as {reduction} (unit {unit!r}); give one of the two another key"
            )
        return partial


def reduce_metrics(records: Iterable[Metric]) -> dict[str, float]:
    """Reduces records to one number a key (see :class:`MetricAccumulator`).

    Raises:
        ValueError: A key comes with two reductions or two units.
    """
    accumulator = MetricAccumulator()
    for record in records:
        accumulator.add(record)
    return accumulator.result()


def _split(value: float, weight: float) -> tuple[Fraction, float]:
    """The exact finite part and the non-finite part of ``weight * value``."""
    if math.isfinite(value):
        return Fraction(value) * Fraction(weight), 0.0
    return Fraction(0), value if weight else 0.0


def _to_float(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
