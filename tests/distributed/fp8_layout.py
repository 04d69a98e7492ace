"""Run by test_fp8_layouts: FP8 updates at one layout, and the bytes that rollout then holds.

Arguments: model directory, output file, JSON of PolicyConfig options, flow (JSON), rollout TP (0:
no rollout engine).
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
import torch.distributed as dist

from checkpoints_tools.hf import HFReader
from megatron_rl.config import OptimizerConfig, PolicyConfig, RolloutConfig
from megatron_rl.models import model_spec
from megatron_rl.policy.parallel import initialize, shutdown
from megatron_rl.precision import resolve_flow
from support.groups import random_groups, shape_of

SIZES = ((5, (3, 1, 6)), (9, (4, 4)), (2, (2, 2)))


def with_hard_blocks(reader):
    """The checkpoint with blocks that quantisers get wrong: zero, outlier, subnormal, tiny."""
    tensors = {name: reader[name].clone() for name in reader}
    layer = "model.layers.0."
    tensors[layer + "mlp.gate_proj.weight"][:128, :128] = 0.0
    tensors[layer + "mlp.up_proj.weight"][130, 200] = 3.0e4
    tensors[layer + "mlp.down_proj.weight"][:128, :128] *= 2.0**-100
    # One large element makes the others of its block subnormal in E4M3.
    tensors[layer + "self_attn.k_proj.weight"][:128, 128:256] *= 2.0**-8
    tensors[layer + "self_attn.k_proj.weight"][3, 130] = 1.0
    return tensors


def served_bytes(policy):
    return {name: tensor.clone() for name, tensor in policy.served_tensors()}


def rollout_bytes(engine, size):
    """Codes and scales that the engine's workers hold, by fused layer, a list over ranks."""

    def read(worker):
        found = {}
        for name, layer in worker.model_runner.get_model().named_modules():
            if hasattr(layer, "weight_scale_inv"):
                found[name] = (
                    list(layer.output_partition_sizes),
                    layer.weight.data.view(torch.uint8).clone(),
                    layer.weight_scale_inv.data.clone(),
                )
        return found

    ours = engine._llm.collective_rpc(read)[0]
    gathered = [None] * size
    dist.all_gather_object(gathered, ours)
    return {name: [rank[name] for rank in gathered] for name in ours}


def check_rollout(held, served, spec):
    """Every part of every fused layer, put together over the ranks, is what was served."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    assert len(held) == 4 * spec.num_layers, sorted(held)
    for name, ranks in held.items():
        parent, _, own = name.rpartition(".")
        names = parts.get(own, (own,))
        row_parallel = own in ("o_proj", "down_proj")
        for index, part in enumerate(names):
            codes, scales = [], []
            for rows, all_codes, all_scales in ranks:
                codes.append(all_codes.split(rows)[index])
                scales.append(all_scales.split([-(-r // 128) for r in rows])[index])
            axis = 1 if row_parallel else 0
            weight = f"{parent}.{part}.weight"
            expected = served[weight].view(torch.uint8)
            assert torch.equal(torch.cat(codes, axis), expected), weight
            assert torch.equal(torch.cat(scales, axis), served[weight + "_scale_inv"]), weight


def main(model: str, output: str, options: str, flow: str, rollout_tp: str) -> None:
    torch.set_num_threads(1)
    config = PolicyConfig(
        optimizer=OptimizerConfig(lr=1e-3), micro_batch_tokens=24, **json.loads(options)
    )
    layout = initialize(config, seed=0)
    from megatron_rl.policy.policy import Policy

    reader = HFReader(Path(model))
    policy = Policy(model_spec(reader.config), resolve_flow(json.loads(flow)), config, layout)
    policy.make_trainable(10, policy.load(with_hard_blocks(reader), list(reader)))
    engine = None
    if int(rollout_tp):
        from megatron_rl.rollout.vllm_engine import VLLMEngine

        engine = VLLMEngine(
            Path(model),
            policy.flow,
            RolloutConfig(kv_cache_gib=0.125, tensor_parallel_size=int(rollout_tp)),
            plan=policy.plan,
            max_model_len=64,
            parameter_names=policy.parameters.hf_shapes,
            eos_token_ids=policy.spec.eos_token_ids,
        )
    results = {"served": [], "logprobs": [], "loss": [], "trained": len(policy.plan.quantised)}
    for step in range(3):
        served = served_bytes(policy)
        results["served"].append({k: v.view(torch.uint8) for k, v in served.items()})
        if engine is not None and step < 2:
            engine.update_weights(policy.served_tensors(), step)
            check_rollout(rollout_bytes(engine, layout.world_size), served, policy.spec)
        groups = random_groups(step, sizes=SIZES)
        shape = shape_of(groups)
        weights = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)

        def objective(logprobs, entropy, rows, columns, weights=weights):
            return (weights[rows, columns] * logprobs).sum() / weights.numel()

        result = policy.update(groups, shape, objective, temperature=1.0)
        results["logprobs"].append(result.values.logprobs)
        results["loss"].append(result.values.loss)
    if layout.rank == 0:
        torch.save(results, output)
    if engine is not None:
        engine.close()
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
