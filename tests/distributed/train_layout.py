"""Run by test_training_layouts: a few updates at one parallel layout; rank 0 saves what they did.

Arguments: model directory, output file, JSON of PolicyConfig options, JSON of the flow, and
optionally a checkpoint root and the first step: step 0 saves there after two steps, another resumes
from it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoints_tools.hf import HFReader
from megatron_rl.config import OptimizerConfig, PolicyConfig
from megatron_rl.models import model_spec
from megatron_rl.policy.parallel import initialize, shutdown
from megatron_rl.precision import resolve_flow
from support.groups import random_groups, shape_of

SIZES = ((5, (3, 1, 6)), (9, (4, 4)), (2, (2, 2)), (7, (5,)), (3, (8, 2, 1)))


def main(
    model: str, output: str, options: str, flow: str, root: str = "", first: str = "0"
) -> None:
    torch.set_num_threads(1)
    chosen = json.loads(options)
    clip_grad = chosen.pop("clip_grad", 1.0)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=clip_grad)
    config = PolicyConfig(optimizer=optimizer, micro_batch_tokens=24, **chosen)
    layout = initialize(config, seed=0)
    from megatron_rl.policy.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
    from megatron_rl.policy.policy import Policy

    reader = HFReader(Path(model))
    policy = Policy(model_spec(reader.config), resolve_flow(json.loads(flow)), config, layout)
    policy.make_trainable(10, policy.load(reader, list(reader)))
    initial = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    steps = []
    if int(first):
        state = load_checkpoint(checkpoint_path(Path(root), int(first)), policy)
        assert state == {"step": int(first)}
    for step in range(int(first), 3):
        if root and step == 2 and not int(first):
            save_checkpoint(Path(root), step, policy, {"step": step}, keep=1)
        groups = random_groups(step, sizes=SIZES)
        shape = shape_of(groups)
        weights = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)

        def objective(logprobs, entropy, rows, columns, weights=weights):
            w = weights[rows, columns]
            return (w * (logprobs + 0.3 * entropy)).sum() / weights.numel()

        result = policy.update(groups, shape, objective, temperature=0.8)
        scored = policy.score(groups, shape, temperature=0.8)
        steps.append(
            {
                "loss": result.values.loss,
                "grad_norm": result.grad_norm,
                "logprobs": result.values.logprobs,
                "entropy": result.values.entropy,
                "skipped": result.skipped,
                "loss_scale": result.loss_scale,
                "after": scored.logprobs,
            }
        )
    final = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    # A collective result is the same on every rank.
    digest = [None] * layout.world_size
    dist.all_gather_object(
        digest, [s["loss"] for s in steps] + [float(t.sum()) for t in final.values()]
    )
    assert all(d == digest[0] for d in digest), "ranks disagree"
    if layout.rank == 0:
        torch.save({"initial": initial, "steps": steps, "final": final}, output)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
