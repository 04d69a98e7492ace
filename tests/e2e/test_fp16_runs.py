"""Runs in FP16: exact against the rollout, and an overflow costs steps, not the run."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools.hf import HFReader
from support.tiny_run import megatron_rl, metrics_of, train, write_recipe

FLOW = "precision.flow={{base: fp16, loss_scale: {{{}}}}}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("fp16")
    model = shutil.copytree(tiny_model_dir("llama", tie_word_embeddings=True), folder / "model")
    changes = {
        "rollout.n": 16,
        "trainer.save_final_checkpoint": False,
        "evaluation.at_start": False,
    }
    return write_recipe(folder, model, **changes)


@pytest.mark.slow
def test_a_run_recovers_from_a_scale_that_is_far_too_large(recipe):
    run = train(
        recipe,
        "name=recovers",
        "trainer.total_steps=6",
        "algorithm.kl.coefficient=0.1",
        FLOW.format("initial: 1099511627776.0, backoff: 0.000244140625, growth_interval_steps: 2"),
    )
    metrics = metrics_of(run)
    steps = range(1, 7)
    skipped = [metrics[step, "actor/skipped_steps"] for step in steps]
    scales = [metrics[step, "actor/loss_scale"] for step in steps]
    assert skipped == [1, 1, 0, 0, 0, 0]
    assert scales == [2.0**28, 2.0**16, 2.0**16, 2.0**17, 2.0**17, 2.0**18]
    for step in steps:
        assert ((step, "actor/grad_norm") in metrics) == (not skipped[step - 1])
        # Rollout shares the operators: its log-probs are the policy's, after a skipped step too.
        assert metrics[step, "rollout_corr/exact_share"] == 1
        assert metrics[step, "rollout_corr/logp_diff_abs_max"] == 0
        # The reference is where the policy was until a step was taken.
        assert (metrics[step, "actor/kl_loss"] == 0) == (step <= 3)
    assert HFReader(run / "hf").config["dtype"] == "float16"
    # What is exported is the FP16 policy, finite and moved.
    before = HFReader(recipe.with_name("model"))
    after = HFReader(run / "hf")
    assert all(
        after[name].dtype == torch.float16 and after[name].isfinite().all() for name in after
    )
    assert any(not torch.equal(after[name], before[name].half()) for name in after)


@pytest.mark.slow
def test_a_model_beyond_the_range_of_fp16_ends_the_run_in_one_sentence(recipe):
    """The final norm multiplies by 60000, so every forward pass overflows, in rollout as well."""
    model = Path(shutil.copytree(recipe.with_name("model"), recipe.with_name("wide")))
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(60000.0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    flow = FLOW.format("initial: 2, max_steps_at_floor: 2")
    arguments = ["--config", str(recipe), "name=wide", f"model.path={model}", flow]
    result = megatron_rl("train", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    # Scale 2 at the first step; the floor at the second and third.
    assert "step 1: overflow, 1 optimizer step skipped; loss scale 1" in result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert "step 3: the forward pass exceeded the range of FP16" in line
    assert "precision.flow=bf16" in line
    metrics = metrics_of(recipe.parent / "runs" / "wide")
    assert [metrics[step, "actor/skipped_steps"] for step in (1, 2)] == [1, 1]
    assert not [
        key
        for key in metrics
        if key[1].startswith(("actor/loss", "rollout_corr/")) and key[1] != "actor/loss_scale"
    ]
    assert (3, "actor/skipped_steps") not in metrics
