"""One Megatron parameter and the Hugging Face tensors that it holds.

An entry is names, shapes and a layout; it holds no weights and knows no process group. Shapes are
checked on every conversion, so that a wrong checkpoint fails at the first tensor, by name. For
tensors that share the row structure but not the shape (FP8 block scales), use `entry.layout`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.models.layout import Kind, Layout, Vocab, same_bits

# Largest tensor-parallel size that an error message suggests.
_MAX_TP_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterEntry:
    """One Megatron parameter <-> one or more Hugging Face tensors."""

    megatron_name: str
    """Name in megatron-core's GPTModel with the local layer spec, with global layer numbers."""
    hf_names: tuple[str, ...]
    """Names in the Hugging Face checkpoint, in the order in which the layout joins them."""
    hf_shapes: tuple[tuple[int, ...], ...]
    """Shapes of `hf_names`."""
    layer: int | None
    """Decoder layer, counted from 0 over the whole model; None outside the layers."""
    layout: Layout
    """How the tensors lie in the parameter and how it is split over tensor-parallel ranks."""
    tied_hf_name: str | None = None
    """A second name under which a checkpoint may repeat the (only) Hugging Face tensor."""

    @property
    def kind(self) -> Kind:
        """Name of the layout."""
        return self.layout.kind

    @property
    def tp_axis(self) -> int | None:
        """Axis that tensor parallelism splits, None when every rank holds the whole."""
        return self.layout.tp_axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter, without vocabulary padding."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's piece, with vocabulary padding.

        Raises:
            ValueError: The parameter cannot be split `tp_size` ways.
        """
        self._check_tp(tp_size)
        shape = list(self.shape)
        if isinstance(self.layout, Vocab):
            shape[0] = self.layout.padded_size(tp_size)
        if self.tp_axis is not None:
            shape[self.tp_axis] //= tp_size
        return tuple(shape)

    def to_megatron(self, hf_tensors: Mapping[str, Tensor]) -> Tensor:
        """Build the full parameter.

        Args:
            hf_tensors: At least the tensors of `hf_names`; may be a whole checkpoint, read lazily.

        Returns:
            Tensor of `shape` and of the input's dtype; the input itself when there is one part.

        Raises:
            ValueError: A tensor is missing, has another shape or dtype than expected, or a tied
                checkpoint repeats the tensor with other values.
        """
        missing = [name for name in self.hf_names if name not in hf_tensors]
        if missing:
            raise ValueError(f"{self.megatron_name} needs {', '.join(missing)}, which is missing.")
        parts = [hf_tensors[name] for name in self.hf_names]
        for name, part, shape in zip(self.hf_names, parts, self.hf_shapes, strict=True):
            if tuple(part.shape) != shape:
                raise ValueError(
                    f"{name} has shape {list(part.shape)}, but the model config asks for "
                    f"{list(shape)}: the weights and config.json are not of one model."
                )
            if part.dtype != parts[0].dtype:
                raise ValueError(
                    f"{name} is {part.dtype} but {self.hf_names[0]} is {parts[0].dtype}: tensors "
                    "that Megatron fuses must have one dtype."
                )
        if self.tied_hf_name is not None and self.tied_hf_name in hf_tensors:
            if not same_bits(parts[0], hf_tensors[self.tied_hf_name]):
                raise ValueError(
                    f"tie_word_embeddings is true, but {self.tied_hf_name} differs from "
                    f"{self.hf_names[0]}: set tie_word_embeddings to false in config.json, or "
                    f"remove {self.tied_hf_name} from the checkpoint."
                )
        return self.layout.join(parts)

    def to_hf(self, full: Tensor) -> dict[str, Tensor]:
        """Take the full parameter apart; the inverse of `to_megatron`.

        Args:
            full: Tensor of `shape`; padded vocabulary rows are cut.

        Returns:
            One contiguous tensor for each of `hf_names`. They may share memory with `full`.

        Raises:
            ValueError: `full` has another shape.
        """
        if isinstance(self.layout, Vocab):
            full = full[: self.layout.vocab_size]
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"{self.megatron_name} has shape {list(full.shape)}, expected {list(self.shape)}."
            )
        parts = self.layout.split(full.contiguous())
        return dict(zip(self.hf_names, parts, strict=True))

    def shard(self, full: Tensor, *, tp_rank: int, tp_size: int) -> Tensor:
        """Cut out the piece of one tensor-parallel rank.

        Args:
            full: Tensor of `shape`.
            tp_rank: Rank in the tensor-parallel group.
            tp_size: Size of the group.

        Returns:
            Tensor of `shard_shape(tp_size)`; a view of `full` where possible.

        Raises:
            ValueError: The parameter cannot be split `tp_size` ways, or `full` has another shape.
        """
        assert 0 <= tp_rank < tp_size
        self._check_tp(tp_size)
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"{self.megatron_name} has shape {list(full.shape)}, expected {list(self.shape)}."
            )
        return self.layout.shard(full, tp_rank, tp_size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Put the pieces of all tensor-parallel ranks together; the inverse of `shard`.

        Args:
            shards: One piece a rank, in rank order. Replicated parameters also take one alone.

        Returns:
            Tensor of `shape`.

        Raises:
            ValueError: The pieces do not add up to `shape`, or replicas differ.
        """
        full = self.layout.unshard(shards)
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"{len(shards)} pieces of {self.megatron_name}, the first of shape "
                f"{list(shards[0].shape)}, give {list(full.shape)}; expected {list(self.shape)}."
            )
        return full

    def tp_problem(self, tp_size: int) -> str | None:
        """Why the parameter cannot be split `tp_size` ways, or None if it can."""
        return self.layout.tp_problem(self.shape, tp_size)

    def _check_tp(self, tp_size: int) -> None:
        problem = self.tp_problem(tp_size)
        if problem:
            works = [n for n in range(1, _MAX_TP_SIZE + 1) if not self.tp_problem(n)]
            raise ValueError(
                f"{self.megatron_name} cannot be split over tensor parallel size {tp_size}: "
                f"{problem}. Sizes that work for it: {', '.join(map(str, works))}."
            )
