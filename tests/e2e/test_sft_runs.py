"""Whole fine-tuning runs on a tiny random model: it learns, resumes bit for bit, refuses."""

import json
import os

import pytest
import torch
import yaml

from checkpoints_tools.hf import HFReader
from support.tiny_run import megatron_rl, metrics_of, refusal, run_command

REQUIRED_KEYS = """
sft/loss sft/perplexity actor/grad_norm actor/lr timing_s/update_actor timing_s/step
perf/update_tokens_per_s perf/total_num_tokens perf/time_per_step perf/rss_gib
""".split()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    """Letters and the one that follows; without held-out prompts, unless a test adds them."""
    folder = tmp_path_factory.mktemp("sft")
    letters = "abcdefghijklmnop"
    rows = [
        {"prompt": f"{a}:", "ground_truth": b}
        for a, b in zip(letters, letters[1:] + "q", strict=True)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The same letters, asked in another way: what was learned must carry over.
    rows = [row | {"prompt": f" {row['prompt']}"} for row in rows]
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "model": {"path": str(tiny_model_dir("llama"))},
        "data": {
            "train": [{"name": "letters", "kind": "file", "path": str(folder / "train.jsonl")}],
            "batch_size_sequences": 6,
            "max_sequence_length_tokens": 16,
        },
        "policy": {"optimizer": {"lr": 0.002}},
        "trainer": {"total_steps": 4},
        "logging": {"report": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def sft(recipe, *overrides, **kwargs):
    return run_command("sft", recipe, *overrides, **kwargs)


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory):
    # A vllm that cannot be imported stands in front of the real one: nobody may miss it.
    folder = tmp_path_factory.mktemp("no_vllm")
    (folder / "vllm.py").write_text("raise AssertionError('vllm was imported')\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path}
    return sft(recipe, "name=unbroken", "trainer.save_interval_steps=2", env=environment)


def test_a_run_writes_what_it_promises_and_starts_no_engine(unbroken):
    for name in ("config.yaml", "env.json", "metrics.jsonl", "hf/config.json", "third_party.log"):
        assert (unbroken / name).is_file(), name
    lines = [json.loads(x) for x in (unbroken / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert not [key for key in REQUIRED_KEYS if key not in line["metrics"]]
    steps = [path.name for path in sorted((unbroken / "checkpoints").glob("global_step_*"))]
    assert steps == ["global_step_2", "global_step_4"]


def test_a_resumed_run_equals_an_unbroken_one(recipe, unbroken):
    broken = sft(recipe, "name=broken", "trainer.total_steps=2", "trainer.export_hf=false")
    assert sft(recipe, "name=broken") == broken
    assert metrics_of(broken) == metrics_of(unbroken)
    first, second = HFReader(broken / "hf"), HFReader(unbroken / "hf")
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_random_model_learns(recipe):
    val = {"name": "letters", "kind": "file", "path": str(recipe.with_name("val.jsonl"))}
    run = sft(
        recipe,
        "name=learns",
        "trainer.total_steps=60",
        "trainer.save_final_checkpoint=false",
        f"data.val={json.dumps([val])}",
        "evaluation.max_response_length_tokens=4",
        "evaluation.kv_cache_gib=0.125",
    )
    metrics = metrics_of(run)
    assert metrics[1, "sft/loss"] > 4 and metrics[60, "sft/loss"] < 0.1
    assert metrics[0, "val-core/letters/acc/mean"] == 0
    assert metrics[60, "val-core/letters/acc/mean"] >= 0.5


def refused(recipe, *overrides):
    return refusal("sft", recipe, *overrides)


def test_bad_input_ends_with_one_sentence(recipe):
    assert "did you mean 'data.response_template'" in refused(recipe, "data.response_templat=x")
    assert "did you mean 'bf16'" in refused(recipe, "precision.flow=bf61")
    assert "offers answer, ground_truth" in refused(recipe, "data.response_template='{truth}'")
    assert "1024 positions" in refused(recipe, "data.max_sequence_length_tokens=4096")


def test_a_dry_run_prints_the_configuration(recipe):
    result = megatron_rl("sft", "--config", str(recipe), "trainer.total_steps=9", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["trainer"]["total_steps"] == 9


def test_divergence_ends_the_run_and_saves_nothing(recipe):
    result = megatron_rl(
        "sft",
        "--config",
        str(recipe),
        "name=diverges",
        "policy.optimizer.lr=1e38",
        "policy.optimizer.clip_grad=0",
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "policy.optimizer.lr" in result.stderr and "Traceback" not in result.stderr
    run = recipe.parent / "runs" / "diverges"
    assert not list(run.glob("checkpoints/*")) and not (run / "hf").exists()
