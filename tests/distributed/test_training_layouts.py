"""Every parallel layout trains as one process does: losses, gradients, log-probs and weights."""

import json
import os
from pathlib import Path

import pytest
import torch

from support.launch import run_distributed

SCRIPT = Path(__file__).with_name("train_layout.py")
TESTS = str(Path(__file__).parents[1])
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 50_000}
TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"


def train(tmp_path, model, nproc, flow="fp32", checkpoint=(), **options):
    output = tmp_path / "result.pt"
    env = {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
    arguments = [
        str(model),
        str(output),
        json.dumps(options),
        json.dumps(flow),
        *map(str, checkpoint),
    ]
    run_distributed(SCRIPT, nproc, arguments, timeout_s=240, env=env)
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    # Tied, with an odd vocabulary: the last pipeline stage and the last TP rank are special.
    return tiny_model_dir("qwen3", num_layers=4, tie_word_embeddings=True, vocab_size=263)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, model):
    return train(tmp_path_factory.mktemp("one"), model, 1)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        pytest.param(2, {TP: 2}, marks=pytest.mark.slow),
        (2, {TP: 2, SP: True}),
        (2, {PP: 2}),
        (2, {}),
        (2, OVERLAP),
        pytest.param(4, {TP: 2, **OVERLAP}, marks=pytest.mark.slow),
        pytest.param(4, {PP: 2, **OVERLAP}, marks=pytest.mark.slow),
        pytest.param(4, {TP: 2, PP: 2, SP: True}, marks=pytest.mark.slow),
    ],
    ids=[
        "tp2",
        "tp2-sp",
        "pp2",
        "dp2",
        "dp2-overlap",
        "tp2-dp2-overlap",
        "pp2-dp2-overlap",
        "tp2-pp2-sp",
    ],
)
def test_a_layout_trains_like_one_process(tmp_path, model, one_process, nproc, options):
    ours = train(tmp_path, model, nproc, **options)
    for name, tensor in one_process["initial"].items():
        assert torch.equal(ours["initial"][name], tensor), name
    for step, expected in zip(ours["steps"], one_process["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for key in ("logprobs", "entropy", "after"):
            torch.testing.assert_close(step[key], expected[key], rtol=0, atol=2e-5)
    for which, weights in (
        (ours["final"], one_process["final"]),
        (ours["streamed"][0], one_process["streamed"][0]),
    ):
        for name, tensor in weights.items():
            moved = (tensor - one_process["initial"][name]).norm()
            assert (which[name] - tensor).norm() <= 1e-3 * moved, name


@pytest.mark.slow
@pytest.mark.distributed
def test_overlap_changes_no_bit_and_a_save_has_the_gathered_weights(tmp_path, tiny_model_dir):
    """In BF16, where master weights are apart, so that stale parameters would show.

    The untied head's weight is read outside any module's forward pass, where DDP's hooks are.
    Buckets decide which rank sums which part of the gradient norm, so clipping is off.
    """
    options = {"flow": "bf16", "clip_grad": 0.0}
    model = tiny_model_dir("qwen2", num_layers=2, vocab_size=261)
    root = tmp_path / "saved"
    plain = train(tmp_path, model, 2, **options)
    overlapped = train(tmp_path, model, 2, checkpoint=(root, 0), **options, **OVERLAP)
    resumed = train(tmp_path, model, 2, checkpoint=(root, 2), **options)
    assert any(not torch.equal(t, plain["initial"][n]) for n, t in plain["streamed"][0].items())
    for name, tensor in plain["final"].items():
        assert torch.equal(overlapped["final"][name], tensor), name
        assert torch.equal(resumed["final"][name], tensor), name
        assert torch.equal(resumed["streamed"][0][name], plain["streamed"][0][name]), name
    for step, expected in zip(overlapped["steps"], plain["steps"], strict=True):
        assert step["loss"] == expected["loss"]
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert torch.equal(step["after"], expected["after"])


@pytest.mark.distributed
def test_a_pipeline_has_the_bits_of_one_process(tmp_path, tiny_model_dir):
    """It splits no sum but the gradient norm's, so clipping is off.

    (A tied head splits one too: its two gradients meet in an all-reduce.)
    """
    model = tiny_model_dir("qwen2", num_layers=2, vocab_size=261)
    one = train(tmp_path, model, 1, clip_grad=0.0)
    two = train(tmp_path, model, 2, clip_grad=0.0, **{PP: 2})
    for name, tensor in one["final"].items():
        assert torch.equal(two["final"][name], tensor), name
    for step, expected in zip(two["steps"], one["steps"], strict=True):
        assert torch.equal(step["logprobs"], expected["logprobs"])
        assert step["loss"] == expected["loss"]


@pytest.mark.distributed
def test_bf16_with_an_untied_head(tmp_path, tiny_model_dir):
    model = tiny_model_dir("llama", num_layers=2, vocab_size=261)
    one = train(tmp_path, model, 1, flow="bf16")
    two = train(tmp_path, model, 2, flow="bf16", **{TP: 2})
    for step, expected in zip(two["steps"], one["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=5e-3)
        torch.testing.assert_close(step["logprobs"], expected["logprobs"], rtol=0, atol=0.15)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("saved_at", "resumed_at"),
    [
        ((2, {TP: 2}), (2, {PP: 2})),
        pytest.param((2, {}), (1, {}), marks=pytest.mark.slow),
    ],
    ids=["tp2-to-pp2", "dp2-to-one"],
)
def test_a_checkpoint_continues_at_another_layout(
    tmp_path, model, one_process, saved_at, resumed_at
):
    root = tmp_path / "checkpoints"
    train(tmp_path, model, saved_at[0], checkpoint=(root, 0), **saved_at[1])
    ours = train(tmp_path, model, resumed_at[0], checkpoint=(root, 2), **resumed_at[1])
    (step,), expected = ours["steps"], one_process["steps"][2]
    assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    torch.testing.assert_close(step["after"], expected["after"], rtol=0, atol=2e-5)
    for name, tensor in one_process["final"].items():
        moved = (tensor - one_process["initial"][name]).norm()
        assert (ours["final"][name] - tensor).norm() <= 1e-3 * moved, name


@pytest.mark.slow
@pytest.mark.distributed
def test_fp16_overflows_and_reshards_like_one_process(tmp_path, model):
    """The first step overflows; the scale and its trackers go through a checkpoint."""
    scale = {"initial": 2.0**40, "backoff": 2.0**-30, "growth_interval_steps": 2}
    flow = {"base": "fp16", "loss_scale": scale}
    one = train(tmp_path, model, 1, flow=flow)
    root = tmp_path / "checkpoints"
    saved = train(tmp_path, model, 2, flow=flow, checkpoint=(root, 0), **{TP: 2})
    resumed = train(tmp_path, model, 2, flow=flow, checkpoint=(root, 2), **{PP: 2})
    for steps in (one["steps"], saved["steps"], saved["steps"][:2] + resumed["steps"]):
        assert [step["skipped"] for step in steps] == [True, False, False]
        assert [step["loss_scale"] for step in steps] == [1024, 1024, 2048]
        for step, expected in zip(steps, one["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-2, abs=1e-3)
            torch.testing.assert_close(step["after"], expected["after"], rtol=0, atol=2e-2)
        for step, expected in zip(steps[1:], one["steps"][1:], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
