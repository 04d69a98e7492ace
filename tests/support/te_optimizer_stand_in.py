"""The rest of `te_stand_in`: what Megatron's optimizer asks of TE's compiled module.

Master weights become codes here: the largest magnitude of each block over all ranks, the scale, the
cast. Adam itself is torch's, as on a CPU without TE.
"""

from typing import Any

import torch

from megatron_rl.precision.scaling import block_amax, scale_from_amax

FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def use_torch_adam() -> None:
    """Makes Megatron take torch's Adam for good, although TE is there with its own."""
    import megatron.core.optimizer

    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True


def multi_tensor_l2norm(
    chunk: int, overflow: Any, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Norm of all elements, whatever the order of the tensors: hence FP64 inside."""
    assert not per_tensor
    squares = [tensor.double().pow(2).sum() for tensor in lists[0]]
    return torch.stack(squares).sum().sqrt().float().reshape(1), None


def multi_tensor_scale(
    chunk: int, overflow: Any, lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Each second tensor becomes the first times a number."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    overflow: Any,
    lists: list[list[torch.Tensor]],
    fp8_max: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Scales and their inverses from the largest magnitudes, padding included."""
    element = torch.float8_e4m3fn if fp8_max == 448.0 else torch.float8_e5m2
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(
            scale_from_amax(
                amax,
                scale_mode="pow2" if force_pow_2_scales else "fp32",
                dtype=element,
                source_dtype=torch.float32,
                amax_epsilon=amax_epsilon,
            )
        )
        scale_inv.copy_(scale.reciprocal())


def fp8_block_scaling_compute_partial_amax(
    master: torch.Tensor, amax: torch.Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """Largest magnitude of each block, over the slice of the matrix that `master` is."""
    matrix = _placed(master, rows, columns, start)
    found = block_amax(matrix, (block, block))
    amax[:, : found.shape[1]] = found


def fp8_block_scaling_partial_cast(
    master: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    rows: int,
    columns: int,
    start: int,
    block: int,
    dtype: Any,
) -> None:
    """The codes of a slice of the matrix, given the scales of its blocks."""
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    scaled = _placed(master, rows, columns, start) * spread
    values = scaled.reshape(-1)[start : start + master.numel()].clamp(-448.0, 448.0)
    codes.copy_(values.to(FP8[dtype.name]).view(torch.uint8))


def _placed(part: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    """A flat slice in its place in an otherwise empty matrix, float32."""
    matrix = torch.zeros(rows * columns)
    matrix[start : start + part.numel()] = part.float()
    return matrix.view(rows, columns)


def fp8_transpose(codes: torch.Tensor, dtype: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of a matrix of codes."""
    transposed = codes.reshape(-1, codes.shape[-1]).t().contiguous()
    return transposed if out is None else out.copy_(transposed.view(out.shape))


FUNCTIONS = (
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_compute_scale_and_scale_inv,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    fp8_transpose,
)
