"""Two models, tensor by tensor, as bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from checkpoints_tools.source import TensorSource
from megatron_rl.models.layout import same_bits

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two models."""

    num_equal: int
    """Tensors that are bit for bit the same."""
    findings: tuple[str, ...]
    """One sentence a tensor that differs, or that one side lacks."""

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors, with the same bits."""
        return not self.findings

    def text(self) -> str:
        """The result for people."""
        if self.is_equal:
            return f"equal: {self.num_equal} tensors, bit for bit"
        shown = list(self.findings[:_SHOWN])
        if len(self.findings) > _SHOWN:
            shown.append(f"... and {len(self.findings) - _SHOWN} more")
        total = self.num_equal + len(self.findings)
        return "\n".join([*shown, f"different: {len(self.findings)} of {total} tensors"])


def compare(a: TensorSource, b: TensorSource, names: Iterable[str] | None = None) -> Comparison:
    """Compares two models; one tensor of each is in memory at a time.

    Args:
        a: One model.
        b: The other.
        names: Tensors to compare; those of both when None.
    """
    wanted = list(dict.fromkeys([*a, *b])) if names is None else list(names)
    findings: list[str] = []
    for name in wanted:
        finding = _difference(name, a, b)
        if finding:
            findings.append(finding)
    return Comparison(num_equal=len(wanted) - len(findings), findings=tuple(findings))


def _difference(name: str, a: TensorSource, b: TensorSource) -> str | None:
    for source in (a, b):
        if name not in source:
            return f"{name}: {source.path} does not have it"
    given, other = ((list(s.shape(name)), s.dtype(name)) for s in (a, b))
    if given != other:
        return f"{name}: {given[0]} {given[1]} and {other[0]} {other[1]}"
    left, right = a[name], b[name]
    if same_bits(left, right):
        return None
    left, right = left.double().flatten(), right.double().flatten()
    count = int(((left != right) & ~(left.isnan() & right.isnan())).sum())
    if not count:
        return f"{name}: equal as numbers, but other bits (a sign of zero, or a NaN)"
    distance = torch.nan_to_num(left - right, nan=torch.inf).norm() / left.norm().clamp_min(1e-300)
    return (
        f"{name}: {count} of {left.numel()} values differ, by "
        f"{(left - right).abs().max():.3g} at most; relative distance {distance:.3g}"
    )
