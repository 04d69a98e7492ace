"""The precision flow and what the engines derive from it."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from megatron_rl.launch.cli import main
from megatron_rl.precision import (
    LinearPlan,
    flow_names,
    megatron_precision,
    resolve_flow,
    torch_dtype,
    vllm_precision,
)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_both_engines_compute_in_the_flows_dtype(name, dtype):
    flow = resolve_flow(name)
    megatron, vllm = (
        megatron_precision(flow),
        vllm_precision(flow, LinearPlan(quantised=(), exempt=())),
    )
    assert megatron["params_dtype"] == torch_dtype(flow.compute_dtype) == dtype
    assert getattr(torch, vllm["dtype"]) == dtype and vllm["kv_cache_dtype"] == "auto"
    assert megatron["bf16"] == (dtype == torch.bfloat16) and not megatron["fp16"]
    # The sampled distribution is the trained one.
    assert vllm["logprobs_mode"] == "processed_logprobs"
    for role in ("logits", "master_weight", "gradient_reduction"):
        assert getattr(flow, role) == "float32"


def test_a_flow_names_every_role_and_cannot_be_changed():
    flow = resolve_flow("bf16")
    text = flow.describe()
    assert all(field.name in text for field in fields(flow))
    assert flow.short_str().startswith("bf16 (compute bf16")
    with pytest.raises(FrozenInstanceError):
        flow.logits = "bfloat16"


def test_an_unknown_flow_is_refused_with_the_nearest(capsys):
    assert flow_names() == ["bf16", "fp16", "fp32", "fp8", "fp8_rollout", "mxfp8"]
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        resolve_flow("bf61")
    assert main(["precision", "show", "fp23"]) == 2
    assert "did you mean 'fp32'" in capsys.readouterr().err
    assert main(["precision", "show", "fp32"]) == 0
    assert "master_weight" in capsys.readouterr().out
