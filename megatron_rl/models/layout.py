"""How Hugging Face tensors lie inside one Megatron parameter, and how that parameter is split.

Megatron fuses and splits rows. With G query groups, Q query heads per group and head width D:

- `linear_qkv` interleaves per group: its rows are `[q_0 .. q_{Q-1} | k | v]` of group 0, then of
  group 1, and so on, each head D rows. A tensor-parallel rank holds a contiguous 1/TP of them; with
  more ranks than groups a rank's piece may be a part of a group, which megatron-core gathers.
- `linear_fc1` is `[gate ; up]`, and a rank holds `[gate_r ; up_r]`: NOT a contiguous piece.
- the embedding and the output head are padded with zero rows to a multiple of
  `make_vocab_size_divisible_by * TP`, then split by rows.
- `linear_proj` and `linear_fc2` are split by columns; norms are whole on every rank.

Each layout is four pure functions: `join` and `split` between Hugging Face tensors and the full
parameter, `shard` and `unshard` between the full parameter and the ranks' pieces. All move whole
rows or columns and never look at values, so they hold for any dtype (FP8 codes included) and for
block scales whose rows are pieces of heads. Nothing is copied where a view does.

The full parameter is never padded: padding depends on TP, so it is added in `shard` and cut in
`unshard`. Which sizes work is said by `tp_problem`; `shard` and `unshard` assume it was asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["replicated", "column", "row", "fused_qkv", "fused_gate_up", "vocab"]


class Layout(Protocol):
    """The interface of all layouts. Tensors are `[rows, ...]` of any dtype."""

    @property
    def kind(self) -> Kind:
        """Name of the layout."""
        ...

    @property
    def tp_axis(self) -> int | None:
        """Axis that tensor parallelism splits, None when every rank holds the whole."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Hugging Face tensors, in the entry's order, to the full Megatron parameter."""
        ...

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """Inverse of `join`; every part is contiguous if `full` is."""
        ...

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """The piece of rank `tp_rank`; a view where possible."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`, from the pieces of all ranks in order."""
        ...

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """Why a full parameter of `shape` cannot be split `tp_size` ways, or None if it can."""
        ...


class _Single:
    """Shared by layouts of one Hugging Face tensor."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full,)


@dataclass(frozen=True, slots=True)
class Replicated(_Single):
    """Whole on every rank: norms."""

    kind: ClassVar[Kind] = "replicated"
    tp_axis: ClassVar[int | None] = None

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """See `Layout.shard`."""
        return full

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The common value; ranks whose copies differ have trained apart.

        Raises:
            ValueError: The copies are not bit-equal.
        """
        for rank, shard in enumerate(shards):
            if not same_bits(shards[0], shard):
                raise ValueError(
                    f"A replicated parameter differs between tensor-parallel ranks 0 and {rank}: "
                    "its gradient was not reduced over the group."
                )
        return shards[0]

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """See `Layout.tp_problem`."""
        return None


@dataclass(frozen=True, slots=True)
class Sliced(_Single):
    """Cut in equal pieces along one axis: 0 is `column` parallel, 1 is `row` parallel."""

    tp_axis: int

    @property
    def kind(self) -> Kind:
        """See `Layout.kind`."""
        return ("column", "row")[self.tp_axis]

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """See `Layout.shard`."""
        return full.chunk(tp_size, self.tp_axis)[tp_rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """See `Layout.unshard`."""
        return _cat(shards, self.tp_axis)

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """See `Layout.tp_problem`."""
        size = shape[self.tp_axis]
        return f"axis {self.tp_axis} has size {size}" if size % tp_size else None


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """`linear_qkv`: q, k, v interleaved per query group."""

    num_query_groups: int
    q_per_group: int
    kind: ClassVar[Kind] = "fused_qkv"
    tp_axis: ClassVar[int | None] = 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Layout.join`. Parts are q, k, v; their rows are heads, or blocks of heads."""
        groups = [part.reshape(self.num_query_groups, -1, *part.shape[1:]) for part in parts]
        q, k, v = (group.shape[1] for group in groups)
        assert q == k * self.q_per_group and k == v, "rows are not whole pieces of heads"
        return torch.cat(groups, dim=1).flatten(0, 1)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """See `Layout.split`."""
        heads = full.reshape(self.num_query_groups, self.q_per_group + 2, -1, *full.shape[1:])
        q, k, v = torch.split(heads, [self.q_per_group, 1, 1], dim=1)
        return tuple(part.flatten(0, 2).contiguous() for part in (q, k, v))

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """See `Layout.shard`."""
        return full.chunk(tp_size)[tp_rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """See `Layout.unshard`."""
        return _cat(shards, 0)

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """See `Layout.tp_problem`; the conditions are megatron-core's own."""
        groups, heads = self.num_query_groups, self.num_query_groups * self.q_per_group
        if heads % tp_size:
            return f"there are {heads} query heads"
        if groups % tp_size and tp_size % groups:
            return f"there are {groups} query groups"
        return f"there are {shape[0]} fused rows" if shape[0] % tp_size else None


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """`linear_fc1`: gate above up, each split over the ranks by itself."""

    kind: ClassVar[Kind] = "fused_gate_up"
    tp_axis: ClassVar[int | None] = 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Layout.join`."""
        gate, up = parts
        return torch.cat([gate, up])

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """See `Layout.split`."""
        return full.chunk(2)

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """See `Layout.shard`."""
        if tp_size == 1:
            return full
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """See `Layout.unshard`."""
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """See `Layout.tp_problem`."""
        width = shape[0] // 2
        return f"the feed-forward width is {width}" if width % tp_size else None


@dataclass(frozen=True, slots=True)
class Vocab(_Single):
    """The embedding and the output head: rows are tokens, padded per TP size."""

    vocab_size: int
    make_vocab_size_divisible_by: int
    kind: ClassVar[Kind] = "vocab"
    tp_axis: ClassVar[int | None] = 0

    def padded_size(self, tp_size: int) -> int:
        """Rows that Megatron allocates over all ranks."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """See `Layout.shard`; rows past the vocabulary are zero."""
        rows = self.padded_size(tp_size) // tp_size
        real = full[tp_rank * rows : (tp_rank + 1) * rows]
        missing = rows - len(real)
        return torch.cat([real, full.new_zeros(missing, *full.shape[1:])]) if missing else real

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """See `Layout.unshard`; cuts padding rows of any number."""
        return _cat(shards, 0)[: self.vocab_size]

    def tp_problem(self, shape: Sequence[int], tp_size: int) -> str | None:
        """See `Layout.tp_problem`."""
        return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (so NaN equals itself)."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.detach().contiguous().flatten().view(torch.uint8),
        b.detach().contiguous().flatten().view(torch.uint8),
    )


def _cat(shards: Sequence[Tensor], axis: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), axis)
