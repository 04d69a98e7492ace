"""Run by test_training_layouts: a few updates at one parallel layout; rank 0 saves what they did.

Arguments: model directory, output file, JSON of PolicyConfig options, JSON of the flow, and
optionally a checkpoint root and the first step: step 0 saves there after two steps, another resumes
from it.
"""

import functools
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
    bucket_size = chosen.pop("bucket_size", None)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=clip_grad)
    config = PolicyConfig(optimizer=optimizer, micro_batch_tokens=24, **chosen)
    layout = initialize(config, seed=0)
    from megatron_rl.policy import policy as policy_module
    from megatron_rl.policy.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
    from megatron_rl.policy.policy import Policy

    # Megatron's own bucket is larger than the model, which would leave nothing to overlap.
    policy_module.DistributedDataParallelConfig = functools.partial(
        policy_module.DistributedDataParallelConfig, bucket_size=bucket_size
    )
    reader = HFReader(Path(model))
    policy = Policy(model_spec(reader.config), resolve_flow(json.loads(flow)), config, layout)
    policy.make_trainable(10, policy.load(reader, list(reader)))
    initial = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    steps, streamed = [], []
    if int(first):
        state = load_checkpoint(checkpoint_path(Path(root), int(first)), policy)
        assert state == {"step": int(first)}
        streamed.append({name: tensor.clone() for name, tensor in policy.named_tensors()})
    for step in range(int(first), 3):
        groups = random_groups(step, sizes=SIZES)
        shape = shape_of(groups)
        weights = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)

        def objective(logprobs, entropy, rows, columns, weights=weights):
            w = weights[rows, columns]
            return (w * (logprobs + 0.3 * entropy)).sum() / weights.numel()

        result = policy.update(groups, shape, objective, temperature=0.8)
        # Nothing has read the updated weights yet: a save and an export must not see stale ones.
        if root and step == 1:
            save_checkpoint(Path(root), step + 1, policy, {"step": step + 1}, keep=1)
        elif step == 1:
            streamed.append({name: tensor.clone() for name, tensor in policy.named_tensors()})
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
        digest,
        [s["loss"] for s in steps]
        + [float(t.sum()) for tensors in (final, *streamed) for t in tensors.values()],
    )
    assert all(d == digest[0] for d in digest), "ranks disagree"
    if layout.rank == 0:
        result = {"initial": initial, "steps": steps, "streamed": streamed, "final": final}
        torch.save(result, output)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
