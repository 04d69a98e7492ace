"""A run on its perfectible prompts: it trains on no others, and its continuation on the same."""

import json

import pytest

from megatron_rl.trainer.perfectible import FILE_NAME
from support.tiny_run import metrics_of, train, write_recipe

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right is a response whose first character has an even code: about half of all."""
    return float(ord((solution_str + "a")[0]) % 2 == 0)
'''


@pytest.mark.slow
def test_a_run_and_its_continuation_train_on_the_set(tmp_path, tiny_model_dir):
    recipe = write_recipe(
        tmp_path,
        tiny_model_dir("llama", tie_word_embeddings=True),
        **{
            "data.perfectible": {"min_accuracy": 0.5, "max_accuracy": 0.75, "num_samples": 4},
            "data.val": [],
            "trainer.export_hf": False,
            "logging.rollout_samples": 16,
        },
    )
    (tmp_path / "reward.py").write_text(REWARD)
    run = train(recipe, "trainer.total_steps=2")
    written = (run / FILE_NAME).read_text()
    chosen = json.loads(written)
    assert 4 <= len(chosen["kept"]) < 12 == len(chosen["accuracies"])
    assert all(0.5 <= chosen["accuracies"][i] <= 0.75 for i in chosen["kept"])
    # Only what is read again, not chosen again, can leave a prompt out.
    (run / FILE_NAME).write_text(written.replace("{", '{"note": "read", ', 1))
    train(recipe, "trainer.total_steps=4")
    assert json.loads((run / FILE_NAME).read_text())["note"] == "read"
    assert max(step for step, _ in metrics_of(run)) == 4
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    kept = {rows[i]["prompt"] for i in chosen["kept"]}
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    seen = [{json.loads(x)["prompt"] for x in f.read_text().splitlines()} for f in files]
    assert len(seen) == 4 and set.union(*seen) == kept
