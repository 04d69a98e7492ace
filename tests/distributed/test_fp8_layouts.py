"""FP8 training at every layout: the same codes and scales, and they are the ones rollout holds."""

import json
import os
from pathlib import Path

import pytest
import torch

from support.launch import run_distributed

SCRIPT = Path(__file__).with_name("fp8_layout.py")
TESTS = str(Path(__file__).parents[1])
TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"
BLOCK = {"element": "e4m3", "block_rows": 128, "block_columns": 128, "source_dtype": "float32"}
# FP8 products between FP32 operators: what a layout changes is the order of sums, at 1e-7, and not
# BF16's rounding of them.
FP8_IN_FP32 = {
    "base": "fp32",
    "linear_weight": BLOCK,
    "linear_input": BLOCK | {"block_rows": 1},
    "output_gradient": BLOCK | {"block_rows": 1},
}


def train(tmp_path, model, nproc, flow, rollout_tp=0, **options):
    output = tmp_path / "result.pt"
    env = {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
    arguments = [str(model), str(output), json.dumps(options), json.dumps(flow), str(rollout_tp)]
    run_distributed(SCRIPT, nproc, arguments, timeout_s=240, env=env)
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return tiny_model_dir(
        "qwen3", num_layers=2, hidden_size=256, head_dim=128, ffn_hidden_size=512, vocab_size=261
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, model):
    return train(tmp_path_factory.mktemp("one"), model, 1, FP8_IN_FP32)


@pytest.mark.distributed
@pytest.mark.parametrize("options", [{TP: 2, SP: True}, {PP: 2}], ids=["tp2-sp", "pp2"])
def test_a_layout_multiplies_by_the_codes_of_one_process(tmp_path, model, one_process, options):
    ours = train(tmp_path, model, 2, FP8_IN_FP32, **options)
    assert ours["trained"] == 8
    exact = PP in options
    for name, expected in one_process["served"][0].items():
        assert torch.equal(ours["served"][0][name], expected), name
    for step in range(3):
        # A sum in another order may cross a rounding boundary of E4M3 somewhere.
        tolerance = 0.0 if exact and step == 0 else 0.02
        difference = (ours["logprobs"][step] - one_process["logprobs"][step]).abs().max()
        assert difference <= tolerance, (step, difference)
        assert ours["loss"][step] == pytest.approx(one_process["loss"][step], rel=1e-3, abs=1e-5)
        codes = torch.cat(
            [
                t.flatten() == one_process["served"][step][n].flatten()
                for n, t in ours["served"][step].items()
                if "proj" in n
            ]
        )
        assert codes.float().mean() > 0.99


@pytest.mark.distributed
def test_rollout_at_tp_2_holds_the_served_bytes(tmp_path, model):
    """After one and after two syncs, with blocks of zeros, outliers and subnormals."""
    ours = train(tmp_path, model, 2, "fp8", rollout_tp=2, **{TP: 2})
    first, second = ours["served"][:2]
    assert any(not torch.equal(first[name], second[name]) for name in first if "proj" in name)
