"""The formats a quantised operand may have, as values: what a flow names and a checkpoint records.

A format says everything that decides the bytes of a quantised tensor: the element, the block that
shares a scale, how the scale is stored and rounded, the floor under the block's maximum, and
whether elements are multiplied by the scale or divided by its inverse. Two engines whose operands
have equal formats hold equal bytes; where one field differs, so do bytes.

This module imports no torch: formats are compared and printed where there is none.
"""

from dataclasses import dataclass
from typing import Literal

Element = Literal["e4m3", "e5m2"]
SourceDType = Literal["float32", "bfloat16", "float16"]
ScaleMode = Literal["pow2", "fp32"]

E4M3_MAX = 448.0
"""Largest finite ``float8_e4m3fn``; there is no infinity, 0x7F is NaN."""
E5M2_MAX = 57344.0
"""Largest finite ``float8_e5m2``."""
FP8_MAX: dict[Element, float] = {"e4m3": E4M3_MAX, "e5m2": E5M2_MAX}

BLOCK = 128
"""Elements that share a scale along the contracted axis of block-scaled FP8."""
MX_BLOCK = 32
"""Elements that share a scale in the OCP microscaling formats."""
MAX_POW2_SCALE_INV = 2.0**-33
"""The smallest power-of-two scale that vLLM's activation quantisers give a group."""
VLLM_POW2_AMAX_EPSILON = E4M3_MAX * MAX_POW2_SCALE_INV
"""The amax floor that makes this rule and vLLM's agree in every scale: exact in FP32."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """FP8 with one FP32 scale a block of ``block_rows x block_columns`` elements."""

    element: Element = "e4m3"
    """The eight-bit float."""
    block_rows: int = BLOCK
    """Rows that share a scale: 1 for activations, 128 for weights."""
    block_columns: int = BLOCK
    """Columns (the contracted axis of the forward product) that share a scale."""
    scale_rounding: ScaleMode = "pow2"
    """``pow2``: the scale is rounded down to a power of two; ``fp32``: it is not rounded."""
    scale_dtype: Literal["float32", "e8m0"] = "float32"
    """How the scale is stored; ``e8m0`` holds powers of two only."""
    amax_epsilon: float = 0.0
    """Floor under a block's largest magnitude."""
    formula: Literal["multiply", "divide"] = "multiply"
    """``multiply``: x * (fp8_max / amax), as in TE; ``divide``: x / (amax / fp8_max)."""
    source_dtype: SourceDType = "bfloat16"
    """The dtype that is quantised."""

    def __post_init__(self) -> None:
        """Refuses formats that nothing can hold."""
        if self.block_rows < 1 or self.block_columns < 1:
            raise ValueError(
                f"a block of {self.block_rows}x{self.block_columns} elements holds nothing; both "
                "sides must be at least 1"
            )
        if self.scale_dtype == "e8m0" and self.scale_rounding != "pow2":
            raise ValueError(
                "scale_dtype='e8m0' stores powers of two, but scale_rounding is "
                f"{self.scale_rounding!r}; set scale_rounding='pow2' or scale_dtype='float32'"
            )
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(
                f"amax_epsilon={self.amax_epsilon} is no floor; it must be finite and not negative"
            )

    @property
    def block_shape(self) -> tuple[int, int]:
        """``(block_rows, block_columns)``."""
        return (self.block_rows, self.block_columns)

    def short_str(self) -> str:
        """Such as ``e4m3 1x128 pow2``; what differs from the default is appended."""
        words = [self.element, f"{self.block_rows}x{self.block_columns}", self.scale_rounding]
        words += ["e8m0 scale"] if self.scale_dtype == "e8m0" else []
        words += [f"amax>={self.amax_epsilon:.3g}"] if self.amax_epsilon else []
        words += ["divided"] if self.formula == "divide" else []
        words += [f"from {self.source_dtype}"] if self.source_dtype != "bfloat16" else []
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """FP8 with one FP32 scale for the whole tensor, from that tensor's own maximum."""

    element: Element = "e4m3"
    """The eight-bit float."""
    scale_rounding: ScaleMode = "fp32"
    """``fp32``: the scale is not rounded; ``pow2``: rounded down to a power of two."""
    amax_epsilon: float = 0.0
    """Floor under the largest magnitude."""
    source_dtype: SourceDType = "bfloat16"
    """The dtype that is quantised."""

    def short_str(self) -> str:
        """Such as ``e4m3 tensor fp32``."""
        words = [self.element, "tensor", self.scale_rounding]
        words += [f"amax>={self.amax_epsilon:.3g}"] if self.amax_epsilon else []
        words += [f"from {self.source_dtype}"] if self.source_dtype != "bfloat16" else []
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class MXFormat:
    """MXFP8: one power-of-two scale, stored in eight bits (E8M0), for 32 elements of a row."""

    element: Element = "e4m3"
    """The eight-bit float."""
    block_columns: int = MX_BLOCK
    """Elements that share a scale."""
    source_dtype: SourceDType = "bfloat16"
    """The dtype that is quantised."""

    def short_str(self) -> str:
        """Such as ``mx-e4m3 1x32 e8m0``."""
        words = [f"mx-{self.element}", f"1x{self.block_columns}", "e8m0"]
        words += [f"from {self.source_dtype}"] if self.source_dtype != "bfloat16" else []
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class LinearFormats:
    """Formats of the operands of one block-scaled linear layer in training."""

    weight: BlockFormat
    input: BlockFormat
    output_gradient: BlockFormat


OperandFormat = BlockFormat | TensorFormat | MXFormat
