"""The mismatch gate and what an update measures; a stand-in policy counts its updates."""

import math
from functools import partial

import pytest
import torch

from megatron_rl.config import AlgorithmConfig, validate
from megatron_rl.data.types import PromptRow, TokenizedPrompt
from megatron_rl.metrics.gate import append_finding, read_findings
from megatron_rl.metrics.mismatch import mismatch_metrics, signed_means
from megatron_rl.precision import resolve_flow
from megatron_rl.rewards.interface import RewardResult
from megatron_rl.rollout import Completion
from megatron_rl.trainer.batch import make_batch
from megatron_rl.trainer.errors import MismatchError
from megatron_rl.trainer.gate import WORST_TOKENS, MismatchGate
from megatron_rl.trainer.timing import Timings
from megatron_rl.trainer.update import Measured, update_policy

LENGTHS = (2, 4, 1, 3, 5, 2)


def batch_of(scores, n=2):
    """Responses of `n` a prompt whose tokens and log-probs differ everywhere."""
    completions = [
        Completion(
            prompt_index=row // n,
            sample_index=row % n,
            token_ids=tuple(100 * row + i for i in range(LENGTHS[row])),
            logprobs=tuple(-0.5 - 0.125 * (row + i) for i in range(LENGTHS[row])),
            finish_reason="stop",
        )
        for row in range(len(scores))
    ]
    rewards = [RewardResult(score=score) for score in scores]
    row = PromptRow(index=0, data_source="s", prompt="p", ground_truth="1")
    prompts = [TokenizedPrompt(row=row, token_ids=(1, 2), text="p")] * (len(scores) // n)
    return make_batch(prompts, completions, rewards, AlgorithmConfig())


def config(**algorithm):
    source = {"name": "a", "kind": "file", "path": "p"}
    data = {"train": [source], "train_batch_size": 3}
    return validate({"model": {"path": "m"}, "data": data, "algorithm": algorithm})


class StandIn:
    """A policy whose log-probs are the rollout's plus `shift`, where it was asked to compute."""

    def __init__(self, batch, shift):
        self.batch, self.shift, self.updates, self.scored = batch, shift, 0, []
        self.flow = resolve_flow("bf16")

    def _values(self, groups, shape):
        from megatron_rl.policy.execution import TokenValues

        rows = torch.zeros(shape[0], dtype=torch.bool)
        for group in groups:
            rows[[response.row for response in group.responses]] = True
        logprobs = (self.batch.rollout_logprobs + self.shift) * rows[:, None]
        return TokenValues(logprobs=logprobs, entropy=logprobs * 0, loss=0.0, num_tokens=1), rows

    def score(self, groups, shape, *, temperature):
        values, rows = self._values(groups, shape)
        self.scored.append(rows.tolist())
        return values

    def update(self, groups, shape, objective, *, temperature):
        from megatron_rl.policy.policy import UpdateResult

        self.updates += 1
        return UpdateResult(values=self._values(groups, shape)[0], grad_norm=1.0, lr=0.1)


def gate_of(record, mode="warn", bound=0.1, exact=False):
    return MismatchGate(
        mode=mode, bound=bound, exact=exact, token_text=lambda i: f"<{i}>", record=record
    )


def run_steps(gate, shifts, algorithm=None, scores=(1.0, 0.0, 1.0, 1.0, 0.0, 1.0)):
    """Updates once a shift; returns the stand-ins and the metrics."""
    batch, results = batch_of(list(scores)), []
    for step, shift in enumerate(shifts, start=1):
        policy = StandIn(batch, shift)
        metrics = update_policy(
            policy,
            None,
            batch,
            config(**(algorithm or {})),
            Timings(),
            inspect=partial(gate.inspect, step, batch),
            inspect_first=gate.looks_first,
        )
        results.append((policy, metrics))
    return results


def test_a_first_step_within_the_bound_is_recorded_and_later_ones_are_not():
    found = []
    run_steps(gate_of(found.append), [0.05, 5.0, 5.0])
    assert [(f.step, f.is_first, f.is_within) for f in found] == [(1, True, True)]
    assert found[0].mean == pytest.approx(0.05, abs=1e-6) and found[0].worst == ()
    assert "agree" in found[0].message() and "WARNING" not in found[0].message()


def test_over_the_bound_warns_once_and_names_the_worst_tokens():
    found = []
    shift = torch.zeros(6, 5)
    # Rows 0, 1 (prompt 0), 4, 5 (prompt 2) are computed; the probe adds prompt 1.
    for weight, place in enumerate([(4, 3), (1, 2), (0, 0), (5, 1), (2, 0), (3, 1)], start=1):
        shift[place] = -1.0 / weight
    (policy, _), _ = run_steps(gate_of(found.append), [shift, shift])
    assert policy.updates == 1 and len(found) == 1
    worst = found[0].worst
    assert [(t.prompt_index, t.sample_index, t.position) for t in worst] == [
        (2, 0, 3),
        (0, 1, 2),
        (0, 0, 0),
        (2, 1, 1),
        (1, 0, 0),
    ]
    assert len(worst) == WORST_TOKENS
    assert worst[0].token_id == 403 and worst[0].text == "<403>" and worst[0].step == 1
    assert worst[0].train_logprob - worst[0].rollout_logprob == pytest.approx(-1.0)
    message = found[0].message()
    assert message.startswith("WARNING: step 1: log-probs of identical weights differ")
    assert message.count("\n") == WORST_TOKENS and "token 403 '<403>'" in message
    tokens = sum(LENGTHS)
    assert found[0].mean == pytest.approx(sum(1 / w for w in range(1, 7)) / tokens, rel=1e-5)


@pytest.mark.parametrize("algorithm", [{}, {"mini_batch_size_prompts": 1}])
def test_stop_ends_the_run_before_anything_is_trained(algorithm):
    found, batch = [], batch_of([1.0, 0.0])
    gate, policy = gate_of(found.append, mode="stop"), StandIn(batch, 0.5)
    assert gate.looks_first
    with pytest.raises(MismatchError, match="over the bound of 0.100; nothing was trained"):
        update_policy(
            policy,
            None,
            batch,
            config(**algorithm),
            Timings(),
            inspect=partial(gate.inspect, 1, batch),
            inspect_first=True,
        )
    assert policy.updates == 0 and len(found) == 1 and not found[0].is_within


def test_stop_lets_a_good_run_pass_and_looks_first_only_once():
    found = []
    gate = gate_of(found.append, mode="stop", bound=0.0)
    (first, before), (second, after) = run_steps(gate, [0.0, 0.0])
    assert len(first.scored) == 2 and len(second.scored) == 1  # the rest is the probe
    assert first.updates == second.updates == 1
    assert before | {"perf/update_num_tokens": 0} == after | {"perf/update_num_tokens": 0}
    assert len(found) == 1


def test_off_says_nothing():
    found = []
    run_steps(gate_of(found.append, mode="off", exact=True, bound=0.0), [1.0, 1.0])
    assert found == []


def test_a_run_that_claims_exactness_warns_of_the_first_later_difference():
    found = []
    tiny = torch.zeros(6, 5)
    tiny[1, 0] = 2.0**-20
    run_steps(gate_of(found.append, bound=0.0, exact=True), [0.0, 0.0, tiny, 1.0])
    assert [(f.step, f.is_first, f.is_within) for f in found] == [
        (1, True, True),
        (3, False, False),
    ]
    assert len(found[1].worst) == 1 and "claims exactness" in found[1].sentence()
    # Later than the first step even `stop` only warns: weights are the run's own by then.
    found.clear()
    results = run_steps(gate_of(found.append, mode="stop", bound=0.0, exact=True), [0.0, 1.0])
    assert [policy.updates for policy, _ in results] == [1, 1] and len(found) == 2


def test_a_difference_that_is_no_number_is_within_no_bound():
    batch, found = batch_of([1.0, 0.0]), []
    logprobs = batch.rollout_logprobs.clone()
    logprobs[1, 3] = math.nan
    gate = gate_of(found.append, bound=1e9)
    gate.inspect(1, batch, Measured(logprobs=logprobs, mask=batch.response_mask))
    assert not found[0].is_within and found[0].worst[0].position == 3


def test_a_step_in_which_nothing_was_measured_is_not_the_first():
    batch, found = batch_of([1.0, 0.0]), []
    gate = gate_of(found.append, mode="stop", bound=0.0)
    nothing = torch.zeros_like(batch.response_mask)
    gate.inspect(1, batch, Measured(logprobs=batch.rollout_logprobs, mask=nothing))
    assert found == [] and gate.looks_first
    gate.inspect(2, batch, Measured(logprobs=batch.rollout_logprobs, mask=batch.response_mask))
    assert [(f.step, f.is_first, f.is_within) for f in found] == [(2, True, True)]


def test_findings_are_read_as_they_were_written(tmp_path):
    batch, found = batch_of([1.0, 0.0]), []
    measured = Measured(logprobs=batch.rollout_logprobs + 0.5, mask=batch.response_mask)
    gate_of(found.append).inspect(3, batch, measured)
    gate_of(found.append, bound=math.inf).inspect(4, batch, measured)
    assert read_findings(tmp_path) == []
    for finding in found:
        append_finding(tmp_path, finding)
    with open(tmp_path / "gate.jsonl", "a") as file:
        file.write('{"step": 5}\n{"cut')
    assert read_findings(tmp_path) == found


def test_mismatch_is_measured_on_a_probe_of_skipped_samples_too():
    """Groups of equal rewards have no loss; the first of them is scored all the same."""
    seen = []
    gate = gate_of(seen.append)
    shift = torch.zeros(6, 5)
    shift[2, 0] = 0.25  # prompt 1, which is skipped
    ((policy, metrics),) = run_steps(gate, [shift])
    assert policy.scored == [[False, False, True, True, False, False]]
    assert metrics["rollout_corr/logp_diff_abs_max"] == pytest.approx(0.25)
    assert metrics["rollout_corr/logp_diff_abs_mean"] == pytest.approx(0.25 / sum(LENGTHS))
    assert metrics["rollout/skipped_samples_share"] == pytest.approx(2 / 6)
    assert seen[0].mean == pytest.approx(0.25 / sum(LENGTHS))


@pytest.mark.parametrize("algorithm", [{}, {"mini_batch_size_prompts": 1}, {"num_epochs": 2}])
@pytest.mark.parametrize("mode", ["warn", "stop"])
def test_a_step_without_any_signal_is_measured_as_well(algorithm, mode):
    ((_, metrics),) = run_steps(
        gate_of(lambda _: None, mode), [0.0625], algorithm, scores=[1.0] * 6
    )
    assert metrics["rollout_corr/logp_diff_abs_mean"] == pytest.approx(0.0625)
    assert metrics["rollout/skipped_samples_share"] == 1.0
    assert "rollout_corr/logp_diff_mean_pos" not in metrics


def test_skew_by_the_sign_of_the_advantage():
    batch = batch_of([1.0, 0.0, 1.0, 1.0])
    logprobs = batch.rollout_logprobs.clone()
    logprobs[0] += 0.5
    logprobs[1] -= 0.25
    logprobs[2] += 8.0  # no advantage: in neither mean
    means = signed_means(
        logprobs, batch.rollout_logprobs, batch.response_mask, batch.advantages.values
    )
    assert means == {
        "rollout_corr/logp_diff_mean_pos": pytest.approx(0.5),
        "rollout_corr/logp_diff_mean_neg": pytest.approx(-0.25),
    }
    equal = signed_means(
        batch.rollout_logprobs,
        batch.rollout_logprobs,
        batch.response_mask,
        batch.advantages.values,
    )
    assert set(equal.values()) == {0.0}
    # With one sequence a sign, the two means add up to the plain one.
    mask = batch.response_mask & (batch.advantages.values != 0)[:, None]
    kl = mismatch_metrics(logprobs, batch.rollout_logprobs, mask)["rollout_corr/kl"]
    assert -kl * 6 == pytest.approx(2 * 0.5 + 4 * -0.25, abs=1e-6)


def test_clipping_is_counted_by_the_sign_of_the_advantage():
    """Rows 0 and 1 have advantages of both signs; the update finds every ratio at exp(0.5)."""
    batch = batch_of([1.0, 0.0])

    class Moved(StandIn):
        def update(self, groups, shape, objective, *, temperature):
            self.shift = 0.5
            return super().update(groups, shape, objective, temperature=temperature)

    metrics = update_policy(Moved(batch, 0.0), None, batch, config(num_epochs=2), Timings())
    # Only a positive advantage is clipped above: two of six tokens.
    assert metrics["actor/pg_clipfrac_pos"] == 1.0 and metrics["actor/pg_clipfrac_neg"] == 0.0
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    on_policy = update_policy(StandIn(batch, 0.5), None, batch, config(), Timings())
    for sign in ("pos", "neg"):
        assert on_policy[f"actor/pg_clipfrac_{sign}"] == 0.0
