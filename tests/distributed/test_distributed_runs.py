"""Whole runs under torchrun: the same rewards and losses as one process, at any layout."""

import json
import subprocess
import sys

import pytest

from support.tiny_run import megatron_rl, metrics_of, train, write_recipe

LAYOUTS = {
    "tp2-rollout-tp1": ["policy.tensor_model_parallel_size=2"],
    "dp2-rollout-tp2": ["rollout.tensor_parallel_size=2"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir("qwen3", tie_word_embeddings=True)
    changes = {"precision.flow": "fp32", "trainer.save_final_checkpoint": False}
    return write_recipe(tmp_path_factory.mktemp("distributed"), model, **changes)


@pytest.fixture(scope="module")
def one_process(recipe):
    return metrics_of(train(recipe, "name=one"))


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_rl.launch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_runs_like_one_process(recipe, one_process, name):
    result = torchrun("train", "--config", recipe, f"name={name}", *LAYOUTS[name])
    run_dir = recipe.parent / "runs" / name
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    ours = metrics_of(run_dir)
    assert set(ours) == set(one_process)
    for step in range(1, 5):
        for key in ("critic/rewards/mean", "response_length/mean", "train/accuracy"):
            if (step, key) in one_process:
                assert ours[step, key] == pytest.approx(one_process[step, key], abs=1e-6), key
        for key in ("actor/grad_norm", "actor/entropy", "actor/loss"):
            expected = one_process[step, key]
            assert ours[step, key] == pytest.approx(expected, rel=1e-3, abs=1e-5), (step, key)
        assert ours[step, "rollout_corr/logp_diff_abs_mean"] < 1e-5
    assert (run_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.distributed
@pytest.mark.slow
def test_eval_on_two_ranks_repeats_the_evaluation_of_a_run(recipe, one_process, tmp_path):
    export = recipe.parent / "runs" / "one" / "hf"
    output = tmp_path / "result.json"
    result = torchrun(
        *("eval", "--config", recipe, "--output", output, f"model.path={export}"),
        "policy.tensor_model_parallel_size=2",
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    # One rank prints.
    assert result.stdout.count("written to") == 1 == result.stdout.count("4 prompts, fp32")
    metrics = json.loads(output.read_text())["metrics"]
    expected = {k: v for (step, k), v in one_process.items() if step == 4 and "val-core" in k}
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
