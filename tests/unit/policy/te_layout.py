"""Run by test_transformer_engine on two ranks: the emulated CUDA path against the CPU path at TP 2.

Arguments: model directory, `true` for sequence parallelism. Every rank fails unless codes, scales,
log-probs and codes after an optimizer step agree, with parameters in BF16 and in FP8.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from support import te_optimizer_stand_in, te_stand_in

te_stand_in.install()
te_optimizer_stand_in.use_torch_adam()

from checkpoints_tools.hf import HFReader  # noqa: E402
from megatron_rl.config import PolicyConfig  # noqa: E402
from megatron_rl.models import model_spec  # noqa: E402
from megatron_rl.policy.packing import PromptGroup, Response  # noqa: E402
from megatron_rl.policy.parallel import initialize, shutdown  # noqa: E402
from megatron_rl.policy.policy import Policy  # noqa: E402
from megatron_rl.precision import resolve_flow  # noqa: E402

# 256 tokens, so that no micro-batch is padded: 128 a rank under sequence parallelism.
GROUPS = [
    PromptGroup(
        prompt_ids=range(3, 35),
        responses=[Response(row=row, token_ids=range(40 + row, 97 + row)) for row in range(4)],
    )
]
SHAPE = (4, 57)


def likelihood(logprobs, entropy, rows, columns):
    return -logprobs.sum() / 228


def results(path, layout, options, **megatron):
    """Served bytes, log-probs, and the served bytes after a step."""
    reader = HFReader(path)
    config = PolicyConfig(megatron=megatron, optimizer={"lr": 1e-3, "clip_grad": 0.0}, **options)
    flow = replace(resolve_flow("fp8"), shared_operators=())
    policy = Policy(model_spec(reader.config), flow, config, layout)
    policy.make_trainable(10, policy.load(reader, list(reader)))
    before = {name: tensor.clone() for name, tensor in policy.served_tensors()}
    logprobs = policy.update(GROUPS, SHAPE, likelihood, temperature=1.0).values.logprobs
    after = {f"{name} after": tensor.clone() for name, tensor in policy.served_tensors()}
    return before | after | {"log-probs": logprobs}


def main(path: str, sequence_parallel: str) -> None:
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel == "true"}
    layout = initialize(PolicyConfig(**options), seed=0)
    expected = results(Path(path), layout, options)
    for fp8_param in (False, True):
        with te_stand_in.emulated_cuda():
            ours = results(Path(path), layout, options, fp8_param=fp8_param)
        differing = [
            name
            for name, tensor in expected.items()
            if not torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8))
        ]
        assert not differing, (fp8_param, differing)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
