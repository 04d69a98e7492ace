"""Whole runs on a tiny random model: it learns, repeats itself, and resumes bit for bit."""

import json

import pytest
import torch

from checkpoints_tools.hf import HFReader
from megatron_rl.metrics.gate import read_findings
from support.tiny_run import metrics_of, train, write_recipe

REQUIRED_KEYS = """
critic/rewards/mean response_length/mean response_length/clip_ratio actor/entropy actor/pg_loss
actor/grad_norm actor/lr actor/pg_clipfrac timing_s/gen timing_s/reward timing_s/update_actor
timing_s/sync timing_s/step perf/rollout_tokens_per_s perf/update_tokens_per_s
training/rollout_probs_diff_mean training/rollout_probs_diff_max rollout_corr/kl
rollout_corr/k3_kl rollout_corr/logp_diff_abs_mean actor/pg_clipfrac_pos actor/pg_clipfrac_neg
rollout/zero_spread_groups
rollout/singleton_groups rollout/reward_failures rollout/skipped_samples_share
""".split()


def weights_equal(first, second):
    a, b = HFReader(first), HFReader(second)
    assert set(a) == set(b)
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir("llama", tie_word_embeddings=True)
    return write_recipe(tmp_path_factory.mktemp("runs"), model)


@pytest.fixture(scope="module")
def unbroken(recipe):
    return train(recipe, "name=unbroken", "trainer.save_interval_steps=2")


def test_a_run_writes_what_it_promises(unbroken):
    for name in ("config.yaml", "env.json", "metrics.jsonl", "hf/config.json", "third_party.log"):
        assert (unbroken / name).is_file(), name
    records = [json.loads(x) for x in (unbroken / "metrics.jsonl").read_text().splitlines()]
    steps = {r["step"]: r["metrics"] for r in records if "critic/rewards/mean" in r["metrics"]}
    assert sorted(steps) == [1, 2, 3, 4]
    for metrics in steps.values():
        assert not [key for key in REQUIRED_KEYS if key not in metrics]
    evaluations = [r for r in records if "val-core/letters/reward/mean" in r["metrics"]]
    assert [r["step"] for r in evaluations] == [0, 4]
    assert all("val-core/letters/reward/mean@2" in r["metrics"] for r in evaluations)
    latest = unbroken / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "4\n"
    assert (unbroken / "rollouts" / "step_000004.jsonl").is_file()
    assert (unbroken / "rollouts" / "eval_000000.jsonl").is_file()
    environment = json.loads((unbroken / "env.json").read_text())
    exact = environment["flow_exactness"].startswith("exactly on-policy")
    (finding,) = read_findings(unbroken)
    assert finding.step == 1 and finding.is_within
    assert not exact or finding.mean == finding.bound == 0


def test_a_repeated_run_equals_itself(recipe, unbroken):
    # The gate's look before the first update changes no bit of what follows.
    again = train(
        recipe, "name=again", "trainer.save_final_checkpoint=false", "precision.gate=stop"
    )
    assert metrics_of(again) == metrics_of(unbroken)
    assert weights_equal(again / "hf", unbroken / "hf")


def test_a_resumed_run_equals_an_unbroken_one(recipe, unbroken):
    """The first part saves twice in the background, the second at its end."""
    saving = ("trainer.save_interval_steps=1", "trainer.async_save=true")
    first_part = ("trainer.total_steps=2", "trainer.export_hf=false", *saving)
    broken = train(recipe, "name=broken", *first_part)
    checkpoints = broken / "checkpoints"
    assert sorted(p.name for p in checkpoints.glob("global*")) == ["global_step_1", "global_step_2"]
    before = (broken / "metrics.jsonl").read_text()
    resumed = train(recipe, "name=broken")
    assert resumed == broken
    assert (broken / "metrics.jsonl").read_text().startswith(before)
    first, second = metrics_of(broken), metrics_of(unbroken)
    # The first part ended with an evaluation at step 2, which the unbroken run did not make.
    first = {k: v for k, v in first.items() if not (k[0] == 2 and k[1].startswith("val-core"))}
    assert first == second
    assert weights_equal(broken / "hf", unbroken / "hf")
    assert [finding.step for finding in read_findings(broken)] == [1, 3]


def test_a_random_model_learns(recipe):
    run = train(
        recipe,
        "name=learns",
        "trainer.total_steps=20",
        "trainer.save_final_checkpoint=false",
        "rollout.n=16",
        "precision.flow=fp32",
    )
    metrics = metrics_of(run)
    rewards = [metrics[step, "critic/rewards/mean"] for step in range(1, 21)]
    assert sum(rewards[-3:]) / 3 > 5 * (sum(rewards[:3]) / 3 + 0.01)
    mismatch = [metrics[step, "rollout_corr/logp_diff_abs_mean"] for step in range(1, 21)]
    assert max(mismatch) < 1e-5


def test_mini_batches_epochs_and_a_kl_term(recipe):
    run = train(
        recipe,
        "name=off_policy",
        "trainer.total_steps=2",
        "trainer.save_final_checkpoint=false",
        "trainer.export_hf=false",
        "algorithm.mini_batch_size_prompts=2",
        "algorithm.num_epochs=2",
        "algorithm.kl.coefficient=0.1",
        "algorithm.entropy_coefficient=0.01",
        "algorithm.loss_aggregation=seq-mean-token-mean",
        "evaluation.at_start=false",
    )
    metrics = metrics_of(run)
    # The reference stays where the policy was: every step but the first of step 1 is away from it.
    assert metrics[1, "actor/kl_loss"] > 0 and metrics[2, "actor/kl_loss"] > 0
    assert metrics[2, "actor/ppo_kl"] != 0
    assert metrics[2, "rollout/skipped_samples_share"] == 0
