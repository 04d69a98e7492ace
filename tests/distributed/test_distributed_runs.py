"""Whole runs under torchrun: one process's rollouts, losses, gradients and weights, at any layout.

Adam divides a gradient by its own size, so with its usual epsilon of 1e-8 the rounding of a
gradient near zero becomes a step of full size, and weights differ by 1e-4 after a few steps however
exact the gradients are. With an epsilon of 1e-4 what is compared is the layouts' arithmetic.
"""

import json
import subprocess
import sys

import pytest
import torch

from checkpoints_tools.hf import HFReader
from support.tiny_run import megatron_rl, metrics_of, train, write_recipe

STEPS = range(1, 5)
TP, PP = "policy.tensor_model_parallel_size", "policy.pipeline_model_parallel_size"
LAYOUTS = {
    "tp2-rollout-tp1": (2, [f"{TP}=2"]),
    "dp2-rollout-tp2": (2, ["rollout.tensor_parallel_size=2"]),
    "dp2": (2, []),
    "pp2": (2, [f"{PP}=2"]),
    "tp2-sp": (2, [f"{TP}=2", "policy.sequence_parallel=true"]),
    "tp2-pp2": (4, [f"{TP}=2", f"{PP}=2"]),
}
COMPARED = ("prompt", "response", "response_length_tokens", "score", "advantage")
FAST = ("tp2-rollout-tp1", "dp2-rollout-tp2")


@pytest.fixture(scope="module")
def start(tiny_model_dir):
    # Biases and a head of its own: both are cut and gathered.
    return tiny_model_dir("qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, start):
    changes = {
        "precision.flow": "fp32",
        "trainer.save_final_checkpoint": False,
        "logging.rollout_samples": 16,
        "policy.optimizer": {"lr": 0.003, "epsilon": 1e-4},
    }
    return write_recipe(tmp_path_factory.mktemp("distributed"), start, **changes)


@pytest.fixture(scope="module")
def one_process(recipe):
    return train(recipe, "name=one")


def torchrun(*arguments, nproc=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", "-m", "megatron_rl.launch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def train_on(nproc, recipe, name, *options):
    result = torchrun("train", "--config", recipe, f"name={name}", *options, nproc=nproc)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return recipe.parent / "runs" / name


def responses(run_dir):
    """Every rollout's step, text, length, score and advantage, in order."""
    found = []
    for step in STEPS:
        for line in (run_dir / "rollouts" / f"step_{step:06}.jsonl").read_text().splitlines():
            row = json.loads(line)
            found.append((step, *(row[key] for key in COMPARED)))
    assert len(found) == 4 * 16
    return found


def distance_of_weights(run_dir, other, start):
    """Largest relative distance of a tensor; checks that every one of them was trained."""
    ours, theirs, initial = (HFReader(path) for path in (run_dir / "hf", other / "hf", start))
    assert set(ours) == set(theirs) == set(initial)
    assert not any(torch.equal(theirs[name], initial[name]) for name in initial)
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in ours)


def check_equal_runs(run_dir, expected, *, rel=1e-5):
    ours, theirs = metrics_of(run_dir), metrics_of(expected)
    assert set(ours) == set(theirs)
    assert responses(run_dir) == responses(expected)
    for step in STEPS:
        for key in ("critic/rewards/mean", "response_length/mean", "train/accuracy"):
            assert ours.get((step, key)) == theirs.get((step, key)), key
        for key in ("actor/grad_norm", "actor/entropy", "actor/loss"):
            assert ours[step, key] == pytest.approx(theirs[step, key], rel=rel), (step, key)
        assert ours[step, "rollout_corr/logp_diff_abs_mean"] < 1e-6
    assert any(theirs[step, "actor/grad_norm"] > 0.01 for step in STEPS)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in LAYOUTS]
)
def test_a_layout_runs_like_one_process(recipe, one_process, start, name):
    nproc, options = LAYOUTS[name]
    run_dir = train_on(nproc, recipe, name, *options)
    check_equal_runs(run_dir, one_process)
    assert distance_of_weights(run_dir, one_process, start) < 1e-5


@pytest.mark.distributed
def test_a_pipeline_run_has_the_bits_of_one_process(recipe, start):
    """Pipelining splits no sum but the gradient norm's, which clipping divides by; so it is off."""
    unclipped = "policy.optimizer.clip_grad=0"
    one = train(recipe, "name=one-unclipped", unclipped)
    two = train_on(2, recipe, "pp2-unclipped", unclipped, f"{PP}=2")
    check_equal_runs(two, one)
    ours, theirs = metrics_of(two), metrics_of(one)
    assert [ours[s, "actor/loss"] for s in STEPS] == [theirs[s, "actor/loss"] for s in STEPS]
    assert distance_of_weights(two, one, start) == 0


@pytest.mark.distributed
@pytest.mark.slow
def test_a_tp2_run_resumed_at_pp2_continues_the_unbroken_run(recipe, one_process, start):
    # The first half ends with an evaluation at step 2, which the unbroken run did not make.
    first_half = ("trainer.total_steps=2", "trainer.export_hf=false")
    first = train_on(
        2, recipe, "resharded", f"{TP}=2", "trainer.save_final_checkpoint=true", *first_half
    )
    (checkpoint,) = (first / "checkpoints").glob("global_step_*")
    assert checkpoint.name == "global_step_2"
    before = (first / "metrics.jsonl").read_text()
    second = train_on(2, recipe, "resharded", f"{PP}=2")
    assert (second / "metrics.jsonl").read_text().startswith(before)
    ours, theirs = metrics_of(second), metrics_of(one_process)
    assert {k for k in ours if k[0] != 2} == {k for k in theirs if k[0] != 2}
    assert responses(second) == responses(one_process)
    for step in STEPS:
        for key in ("actor/grad_norm", "actor/entropy", "actor/loss", "actor/lr"):
            assert ours[step, key] == pytest.approx(theirs[step, key], rel=1e-5), (step, key)
    assert distance_of_weights(second, one_process, start) < 1e-5


@pytest.mark.distributed
@pytest.mark.slow
def test_eval_on_two_ranks_repeats_the_evaluation_of_a_run(recipe, one_process, tmp_path):
    export = one_process / "hf"
    output = tmp_path / "result.json"
    result = torchrun(
        *("eval", "--config", recipe, "--output", output, f"model.path={export}"),
        "policy.tensor_model_parallel_size=2",
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    # One rank prints.
    assert result.stdout.count("written to") == 1 == result.stdout.count("4 prompts, fp32")
    metrics = json.loads(output.read_text())["metrics"]
    expected = {
        k: v for (step, k), v in metrics_of(one_process).items() if step == 4 and "val-core" in k
    }
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert any(value > 0 for value in metrics.values())


@pytest.mark.distributed
@pytest.mark.slow
def test_generate_on_two_ranks_samples_what_one_process_samples(recipe, tmp_path):
    run = train(recipe, "name=saved", "trainer.total_steps=1", "trainer.save_final_checkpoint=true")
    arguments = ["generate", "--config", recipe]
    arguments += ["--checkpoint", run / "checkpoints" / "global_step_1", "--num-samples", 2]
    prompts = ["--prompt", "a:", "b:", "c + "]
    one = megatron_rl(*arguments, *prompts)
    assert one.returncode == 0, one.stderr
    sizes = ["policy.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2"]
    two = torchrun(*arguments, *sizes, *prompts)
    assert two.returncode == 0, two.stderr[-6000:]
    rows, expected = (
        [json.loads(line) for line in text.splitlines()] for text in (two.stdout, one.stdout)
    )
    assert len(rows) == len(expected) == 6
    for row, other in zip(rows, expected, strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
        assert row == other


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2], ids=["two-engines", "rollout-tp2"])
def test_late_sampling_ends_every_rank_with_one_sentence(recipe, tp_size):
    options = [f"rollout.tensor_parallel_size={tp_size}", "rollout.timeout_s=0.001"]
    options += ["rollout.max_response_length_tokens=40", "rollout.ignore_eos=true"]
    options += ["evaluation.at_start=false", f"name=late{tp_size}"]
    result = torchrun("train", "--config", recipe, *options)
    assert result.returncode != 0
    lines = [x for x in result.stderr.splitlines() if x.startswith("megatron-rl: the run failed")]
    assert 1 <= len(lines) <= 2, result.stdout[-3000:] + result.stderr[-6000:]
    # The launcher may end the second rank before it prints; what is printed is the same.
    assert len(set(lines)) == 1
    assert "step 1: sampling did not end within 0.001 s: 0 of 16 responses" in lines[0]
    assert "rollout.timeout_s" in lines[0]
    assert "megatron_rl/" not in result.stderr, "a traceback of ours"
