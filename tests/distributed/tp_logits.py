"""Run by test_loading_at_tp2: models loaded at TP 2 and what they compute, on 2 ranks.

Arguments: model directories. One line a rank and model is printed, see the end of `check`.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from checkpoints_tools.hf import HFReader
from megatron_rl.config import PolicyConfig
from megatron_rl.models import model_spec
from megatron_rl.policy.parallel import initialize, shutdown
from megatron_rl.precision import resolve_flow


class Watched(HFReader):
    """Counts the tensors that are read; one of them may be damaged."""

    def __init__(self, path, fault=None):
        super().__init__(path)
        self.reads = Counter()
        self.fault = fault

    def __getitem__(self, name):
        self.reads[name] += 1
        if name.endswith("layers.1.mlp.up_proj.weight"):
            if self.fault == "unreadable":
                raise OSError("stale file handle")
            if self.fault == "nan":
                return super().__getitem__(name) * float("nan")
        return super().__getitem__(name)


def build(path, fault=None, flow="fp32"):
    from megatron_rl.policy.policy import FrozenPolicy

    config = PolicyConfig(tensor_model_parallel_size=2)
    layout = initialize(config, seed=0, timeout_s=60)
    reader = Watched(path, fault)
    policy = FrozenPolicy(model_spec(reader.config), resolve_flow(flow), config, layout)
    return policy, reader


def check(path):
    from megatron_rl.policy.packing import PromptGroup, Response, pack_groups

    policy, reader = build(path)
    policy.load(reader, list(reader))
    rank = policy.layout.rank
    expected = Counter(dict.fromkeys(reader, 1)) if rank == 0 else Counter()
    assert reader.reads == expected, (rank, reader.reads)
    exported = dict(policy.named_tensors())
    plain = HFReader(path)
    assert set(exported) == set(policy.parameters.hf_shapes)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in exported.items())

    ids = torch.randint(3, 250, (1, 33), generator=torch.Generator().manual_seed(1))
    # One response of one token: the whole stream is one plain sequence.
    group = PromptGroup(prompt_ids=ids[0].tolist(), responses=(Response(row=0, token_ids=[7]),))
    packed = pack_groups([group])
    with torch.no_grad():
        part = policy.wrapped(
            packed.input_ids, packed.position_ids, packed=packed, return_logits=True
        )
    parts = [None, None]
    dist.all_gather_object(parts, part)
    ours = torch.cat(parts, dim=-1)
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = reference(ids).logits[0]
    assert 0 < part.shape[1] < ours.shape[1] and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    print(f"rank {rank}: {policy.spec.architecture} agrees", flush=True)


def check_fault(path, fault, kind, words):
    policy, reader = build(path, fault)
    try:
        policy.load(reader, list(reader))
    except kind as error:
        assert words in str(error), error
        print(f"rank {policy.layout.rank}: {fault} refused", flush=True)


def check_two_machines(path):
    """As if each rank were alone on its machine: both read."""
    policy, reader = build(path)
    os.environ["GROUP_RANK"] = str(policy.layout.rank)
    policy.load(reader, list(reader))
    assert reader.reads == Counter(dict.fromkeys(reader, 1))
    print(f"rank {policy.layout.rank}: read on its own", flush=True)


def main(*paths):
    torch.set_num_threads(1)
    for path in paths:
        check(Path(path))
    check_fault(Path(paths[0]), "unreadable", OSError, "stale file handle")
    check_fault(Path(paths[0]), "nan", ValueError, "layers.1.mlp.up_proj.weight holds NaN or Inf")
    check_two_machines(Path(paths[0]))
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
