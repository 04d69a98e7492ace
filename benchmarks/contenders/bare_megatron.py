"""Megatron alone: cross-entropy, backward and optimizer step over the product's last token stream.

The same ``GPTModel`` (the product's layers, weights and attention), ``DistributedDataParallel`` and
distributed Adam. What is left out is all that reinforcement learning adds: the stream is packed
before the clock starts, the loss is ``torch.nn.functional.cross_entropy`` on all logits at once,
with no chunks, recomputation or entropy, no schedule function runs, and nothing is collected or
reported.
"""

import time
from typing import Any

from benchmarks._common import Turns
from megatron_rl.launch.environment import export_environment, run_environment
from megatron_rl.precision import resolve_flow


def main() -> None:
    turns = Turns()
    job = turns.wait()
    export_environment(run_environment(resolve_flow("bf16")))

    import torch
    import torch.nn.functional as F

    from benchmarks.contenders._recipe import load_recipe
    from megatron_rl.policy import parallel
    from megatron_rl.policy.attention import PackedGroupParams
    from megatron_rl.policy.packing import PackedGroups, pack_groups
    from megatron_rl.trainer.components import build_policy, load_inputs

    config, model_path = load_recipe(job)
    inputs = load_inputs(config, model_path)
    layout = parallel.initialize(config.policy, config.seed)
    policy = build_policy(config.policy, inputs, layout, config.trainer.total_steps)
    model = policy.model

    def loss(packed: PackedGroups) -> torch.Tensor:
        hidden = model.embedding(packed.input_ids, packed.position_ids)
        angles = packed.position_ids[0].float()[:, None] * model.inverse_frequencies
        hidden = model.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), dim=-1)[:, None, None, :],
            packed_seq_params=PackedGroupParams(spans=packed.spans),
        )
        weight, shard = model.head()
        logits = F.linear(hidden.squeeze(1)[packed.predict_index], weight[: shard.num_valid])
        return F.cross_entropy(logits.float(), packed.target_ids)

    policy.wrapped.train()
    turns.answer({})
    while True:
        packed = pack_groups(_groups(turns.wait()))
        start = time.perf_counter()
        policy.ddp.zero_grad_buffer()
        policy.optimizer.zero_grad()
        loss(packed).backward()
        policy.ddp.finish_grad_sync()
        policy.optimizer.step()
        seconds = time.perf_counter() - start
        turns.answer({"stages": {"update_actor": seconds}, "update_tokens": packed.num_tokens})


def _groups(record: dict[str, Any]) -> list[Any]:
    """The product's last step as prompt groups."""
    from megatron_rl.policy.packing import PromptGroup, Response

    n = len(record["responses"]) // len(record["prompts"])
    return [
        PromptGroup(
            prompt_ids=prompt,
            responses=tuple(
                Response(row=row, token_ids=record["responses"][row])
                for row in range(i * n, (i + 1) * n)
            ),
        )
        for i, prompt in enumerate(record["prompts"])
    ]


if __name__ == "__main__":
    main()
