"""Whole runs of the command line on a tiny model, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of the response's characters that are the wanted one."""
    return solution_str.count(ground_truth) / max(len(solution_str), 1)
'''


def write_recipe(folder: Path, model: Path, **changes) -> Path:
    """A recipe in which a random model learns to write a letter; `changes` are dotted keys."""
    rows = [{"prompt": f"{letter}:", "ground_truth": "e"} for letter in "abcdfghijklmnopq"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[12:]))
    (folder / "reward.py").write_text(REWARD)
    tree = {
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "model": {"path": str(model)},
        "data": {
            "train_batch_size": 4,
            "max_prompt_length_tokens": 16,
            "train": [{"name": "letters", "kind": "file", "path": str(folder / "train.jsonl")}],
            "val": [{"name": "letters", "kind": "file", "path": str(folder / "val.jsonl")}],
        },
        "reward": {"function": f"{folder / 'reward.py'}:compute_score"},
        "rollout": {"n": 4, "max_response_length_tokens": 8, "kv_cache_gib": 0.125},
        "policy": {"optimizer": {"lr": 0.003}},
        "trainer": {"total_steps": 4},
        "evaluation": {"num_samples": 2},
        "logging": {"report": False},
    }
    for key, value in changes.items():
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def megatron_rl(*arguments: str, timeout_s: float = 300, **kwargs) -> subprocess.CompletedProcess:
    """Runs the command line and returns what it did."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl.launch.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        **kwargs,
    )


def train(recipe: Path, *overrides: str, **kwargs) -> Path:
    """Trains and returns the run directory; fails with the output when the run does."""
    return run_command("train", recipe, *overrides, **kwargs)


def run_command(command: str, recipe: Path, *overrides: str, **kwargs) -> Path:
    """Runs a training command and returns the run directory, as :func:`train` does."""
    result = megatron_rl(command, "--config", str(recipe), *overrides, **kwargs)
    tree = yaml.safe_load(recipe.read_text())
    name = next((o.removeprefix("name=") for o in overrides if o.startswith("name=")), tree["name"])
    run_dir = Path(tree["output_dir"]) / name
    log = run_dir / "third_party.log"
    noise = log.read_text()[-3000:] if log.exists() else ""
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{noise}"
    return run_dir


def refusal(command: str, recipe: Path, *overrides: str) -> str:
    """The one sentence with which a command refuses its input."""
    result = megatron_rl(command, "--config", str(recipe), *overrides)
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-rl: error: "), result.stderr
    return lines[0]


def metrics_of(run_dir: Path) -> dict[tuple[int, str], float]:
    """Every metric that is not a time, a rate or memory, by (step, key)."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record["metrics"].items():
            if not key.startswith(("timing_s/", "perf/")):
                found[record["step"], key] = value
    return found
