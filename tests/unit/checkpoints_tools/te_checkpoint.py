"""Run by test_te_checkpoints on each rank: a checkpoint of real Transformer Engine tensors.

Arguments: model directory, folder to write into, tensor-parallel size. The policy's model is built
of TE's layers with FP8 parameters, on the emulated CUDA path. Each rank writes its file as
Megatron-LM does, all write a `torch_dist` directory by megatron-core, and rank 0 writes what the
policy serves. Then the model of the same size with one scale a tensor: TE's own `Float8Tensor`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from support import te_optimizer_stand_in, te_stand_in

te_stand_in.install()
te_optimizer_stand_in.use_torch_adam()

import transformer_engine_torch as tex  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (  # noqa: E402
    Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor  # noqa: E402

from checkpoints_tools.hf import HFReader  # noqa: E402
from megatron_rl.config import PolicyConfig  # noqa: E402
from megatron_rl.models import model_spec  # noqa: E402
from megatron_rl.policy.parallel import initialize, shutdown  # noqa: E402
from megatron_rl.policy.policy import Policy  # noqa: E402
from megatron_rl.precision import resolve_flow  # noqa: E402


def save_rank(folder: Path, state: dict, rank: int, tp: int) -> None:
    directory = folder / "iter_0000001" / f"mp_rank_{rank:02d}"
    directory.mkdir(parents=True)
    args = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": state}
    torch.save(content, directory / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def one_scale(tensor: Float8BlockwiseQTensor, scale_inv: float) -> Float8Tensor:
    """The same weight as TE's current scaling would hold it, with a scale of our choosing."""
    values = tensor.dequantize().float() / scale_inv
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Tensor(
        shape=codes.shape,
        dtype=torch.bfloat16,
        data=codes,
        fp8_scale_inv=torch.tensor([scale_inv]),
        fp8_dtype=tex.DType.kFloat8E4M3,
        device="cpu",
    )


def main(path: str, target: str, size: str) -> None:
    tp, folder = int(size), Path(target)
    config = PolicyConfig(megatron={"fp8_param": True}, tensor_model_parallel_size=tp)
    layout = initialize(config, seed=0)
    rank = torch.distributed.get_rank() if tp > 1 else 0
    reader = HFReader(Path(path))
    flow = replace(resolve_flow("fp8"), shared_operators=())
    with te_stand_in.emulated_cuda():
        policy = Policy(model_spec(reader.config), flow, config, layout)
        policy.load(reader, list(reader))
        state = policy.model.state_dict_for_save_checkpoint()
        quantised = [n for n, t in state.items() if isinstance(t, Float8BlockwiseQTensor)]
        assert len(quantised) == 4 * policy.megatron_config.num_layers, quantised
        save_rank(folder / "ranks", state, rank, tp)
        for name, scales in (("same", (0.001, 0.001)), ("differ", (0.001, 0.002))):
            scaled = {
                n: one_scale(t, scales[rank]) if n in quantised else t for n, t in state.items()
            }
            save_rank(folder / name, scaled, rank, tp)
        served = {name: tensor.clone() for name, tensor in policy.served_tensors()}
        if rank == 0:
            save_file(served, folder / "served.safetensors")
            (folder / "torch_dist").mkdir()
        if tp > 1:
            torch.distributed.barrier()
        dist_checkpointing.save(
            {"model": policy.model.sharded_state_dict()}, str(folder / "torch_dist")
        )
    shutdown()


if __name__ == "__main__":  # megatron-core's writers are processes that import this file
    main(*sys.argv[1:])
