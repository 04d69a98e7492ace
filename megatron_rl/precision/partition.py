"""Which linear layers a flow quantises in 128 x 128 blocks, and which it leaves alone.

vLLM quantises the q, k and v projections (and gate and up) each from its own first row, 128 rows
at a time, on each tensor-parallel rank. Megatron fuses them into one matrix, q, k and v interleaved
per query group. The two grids of blocks coincide exactly when

- the input dimension is a multiple of 128 (activations are quantised 128 at a time along it),
- for the fused qkv, the head dimension is,
- for the fused gate and up, the feed-forward width per rank is.

A layer that fails this at TP 1 is *exempt*: it stays in the compute dtype in training, in rollout
and in checkpoints alike. So do routers, and all experts of a layer as soon as one is exempt, since
vLLM holds them in one tensor. A layer that is quantised but cannot be cut at the chosen TP is a
*violation*, which names sizes that work. One list, made here, serves every side.

This module imports no torch; shapes come in as plain numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

BLOCK = 128
_LARGEST_TP = 64


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One (fused) linear layer of a model."""

    name: str
    """Megatron's module name, with the global layer number."""
    hf_modules: tuple[str, ...]
    """Hugging Face's module names of the parts, in order."""
    part_rows: tuple[int, ...]
    """Output rows of each part."""
    columns: int
    """Input dimension."""
    row_unit: int
    """Rows that are never taken apart when parts are fused or split: the head dimension for qkv,
    a whole part for gate and up, all rows for a single part."""
    tp_axis: int | None
    """0: rows are split over tensor-parallel ranks (column parallel); 1: columns are; None: whole
    on every rank."""
    layer: int
    """Decoder layer, from 0."""
    never_because: str | None = None
    """Why the layer is never quantised, whatever its shape; None where it may be."""
    together: str | None = None
    """Layers that have one such name are quantised all or none: the experts of a layer."""

    def block_problem(self, tp_size: int = 1) -> str | None:
        """Why Megatron's and vLLM's blocks differ at a TP size, or None where they coincide."""
        columns, fused = self.columns, len(self.part_rows) > 1
        if self.tp_axis == 1:
            if columns % tp_size or columns // tp_size % BLOCK:
                return _indivisible("input dimension", columns, tp_size)
        elif columns % BLOCK:
            return _indivisible("input dimension", columns, 1)
        if not fused:
            return None
        per_head = self.row_unit != self.part_rows[0]
        if per_head and self.row_unit % BLOCK:
            return _indivisible("head dimension", self.row_unit, 1)
        if not per_head and (self.row_unit % tp_size or self.row_unit // tp_size % BLOCK):
            return _indivisible("feed-forward width", self.row_unit, tp_size)
        return None


def _indivisible(what: str, size: int, tp_size: int) -> str:
    share = f" / TP {tp_size}" if tp_size > 1 else ""
    return f"{what} {size}{share} is no multiple of {BLOCK}"


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """A linear layer that stays in the compute dtype, and why."""

    shape: LinearShape
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """Every linear layer of a model, quantised or exempt."""

    quantised: tuple[LinearShape, ...]
    exempt: tuple[Exemption, ...]

    def is_quantised(self, name: str) -> bool:
        """Whether a layer is quantised, by its Megatron name or a Hugging Face module name."""
        return name in self._quantised_names

    @cached_property
    def _quantised_names(self) -> frozenset[str]:
        shapes = self.quantised
        return frozenset(name for shape in shapes for name in (shape.name, *shape.hf_modules))

    @property
    def exempt_hf_modules(self) -> tuple[str, ...]:
        """Hugging Face names of the exempt layers, as a checkpoint's configuration lists them."""
        return tuple(module for e in self.exempt for module in e.shape.hf_modules)

    def summary(self) -> str:
        """One line for headers: how many layers are quantised, which are not, and why."""
        total = len(self.quantised) + len(self.exempt)
        text = f"{len(self.quantised)} of {total} linear layers"
        reasons: dict[str, set[str]] = {}
        for exemption in self.exempt:
            kind = exemption.shape.name.rpartition(".")[2]
            reasons.setdefault(exemption.reason, set()).add(kind)
        listing = "; ".join(
            f"{', '.join(sorted(kinds))}: {reason}" for reason, kinds in reasons.items()
        )
        return f"{text} ({listing})" if listing else text


def plan_linears(
    shapes: Iterable[LinearShape],
    *,
    num_layers: int,
    exempt_first_layers: int = 0,
    exempt_last_layers: int = 0,
    exempt_modules: Iterable[str] = (),
) -> LinearPlan:
    """Sorts a model's linear layers into quantised and exempt.

    Args:
        shapes: All linear layers of the decoder.
        num_layers: Decoder layers of the model.
        exempt_first_layers: Leading layers that stay in the compute dtype.
        exempt_last_layers: Trailing layers that do.
        exempt_modules: Patterns (``*`` matches anything) over Hugging Face module names; a fused
            layer is exempt when any part of it matches.

    Raises:
        ValueError: A pattern matches no layer.
    """
    shapes, patterns = tuple(shapes), tuple(exempt_modules)
    for pattern in patterns:
        if not any(_matches(shape, pattern) for shape in shapes):
            raise ValueError(
                f"precision.exempt_modules: {pattern!r} matches no linear layer of this model; "
                f"names are such as {shapes[0].hf_modules[0]!r}, and * matches anything"
            )

    def reason_of(shape: LinearShape) -> str | None:
        if shape.never_because is not None:
            return shape.never_because
        if shape.layer < exempt_first_layers:
            return f"one of the first {exempt_first_layers} layers"
        if shape.layer >= num_layers - exempt_last_layers:
            return f"one of the last {exempt_last_layers} layers"
        if named := [pattern for pattern in patterns if _matches(shape, pattern)]:
            return f"named by {named[0]!r}"
        return shape.block_problem()

    reasons = {shape.name: reason_of(shape) for shape in shapes}
    of_groups = {s.together: reasons[s.name] for s in shapes if s.together and reasons[s.name]}
    quantised, exempt = [], []
    for shape in shapes:
        reason = reasons[shape.name] or (shape.together and of_groups.get(shape.together))
        if reason is None:
            quantised.append(shape)
        else:
            exempt.append(Exemption(shape=shape, reason=reason))
    return LinearPlan(quantised=tuple(quantised), exempt=tuple(exempt))


def partition_violations(plan: LinearPlan, *, train_tp: int, rollout_tp: int) -> list[str]:
    """Quantised layers that cannot be cut in whole blocks at the chosen TP sizes.

    Returns:
        One sentence a kind of layer and side, with the layer, its shape and TP sizes that work.
    """
    found: dict[tuple[str, str, str], str] = {}
    for side, tp in (("training", train_tp), ("rollout", rollout_tp)):
        for shape in plan.quantised:
            problem = shape.block_problem(tp)
            if problem is None:
                continue
            works = [n for n in range(1, _LARGEST_TP + 1) if _all_cut(plan, n)]
            key = (side, problem, shape.name.rpartition(".")[2])
            found.setdefault(
                key,
                f"{shape.name} [{sum(shape.part_rows)} x {shape.columns}] cannot be cut in blocks "
                f"of {BLOCK} x {BLOCK} at {side} TP {tp}: {problem}; TP sizes that work for this "
                f"model: {', '.join(map(str, works))}",
            )
    return list(found.values())


def _all_cut(plan: LinearPlan, tp_size: int) -> bool:
    return not any(shape.block_problem(tp_size) for shape in plan.quantised)


def _matches(shape: LinearShape, pattern: str) -> bool:
    return any(fnmatchcase(module, pattern) for module in shape.hf_modules)
