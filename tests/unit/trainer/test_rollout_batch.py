"""Rollout batch, objective weights and which samples are computed; all without a model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import AlgorithmConfig, validate
from megatron_rl.data.types import PromptRow, TokenizedPrompt
from megatron_rl.rewards.interface import RewardResult
from megatron_rl.rollout import Completion
from megatron_rl.trainer.batch import make_batch
from megatron_rl.trainer.objective import MiniBatchObjective, mini_batch_weights
from megatron_rl.trainer.step_metrics import batch_metrics
from megatron_rl.trainer.update import _contributing_rows, _mini_batches, _skipped_probe


def prompt(index):
    row = PromptRow(index=index, data_source="s", prompt="p", ground_truth="1")
    return TokenizedPrompt(row=row, token_ids=(1, 2, 3 + index), text="p")


def completion(prompt_index, sample_index, length, finish="stop"):
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=tuple(range(10, 10 + length)),
        logprobs=tuple(-0.5 for _ in range(length)),
        finish_reason=finish,
    )


def batch_of(scores, lengths=None, n=2, config=None, finish="stop"):
    lengths = lengths or [3] * len(scores)
    completions = [completion(i // n, i % n, lengths[i], finish) for i in range(len(scores))]
    rewards = [RewardResult(score=s, accuracy=float(s > 0)) for s in scores]
    prompts = [prompt(i) for i in range(len(scores) // n)]
    return make_batch(prompts, completions, rewards, config or AlgorithmConfig())


def run_config(**changes):
    source = {"name": "a", "kind": "file", "path": "p"}
    tree = {"model": {"path": "m"}, "data": {"train": [source], "train_batch_size": 4}}
    return validate(tree | changes)


def test_masks_groups_and_advantages():
    batch = batch_of([1.0, 0.0, 1.0, 1.0], lengths=[2, 4, 1, 3])
    assert batch.shape == (4, 4) and batch.lengths.tolist() == [2, 4, 1, 3]
    assert batch.rollout_logprobs.sum() == -0.5 * 10
    advantages = batch.advantages.values
    assert advantages[0] > 0 > advantages[1] and advantages[2:].tolist() == [0.0, 0.0]
    groups = batch.groups(torch.tensor([False, True, True, True]))
    assert [g.prompt_ids for g in groups] == [(1, 2, 3), (1, 2, 4)]
    assert [[r.row for r in g.responses] for g in groups] == [[1], [2, 3]]


def test_empty_responses_and_lost_rewards_are_refused():
    with pytest.raises(ValueError, match="response 1 is empty"):
        batch_of([1.0, 0.0], lengths=[2, 0])
    with pytest.raises(ValueError, match="2 completions but 1 rewards"):
        make_batch(
            [prompt(0)],
            [completion(0, 0, 1), completion(0, 1, 1)],
            [RewardResult(score=1.0)],
            AlgorithmConfig(),
        )


def test_truncated_responses_leave_the_loss_only_when_asked():
    plain = batch_of([1.0, 0.0], finish="length")
    assert torch.equal(plain.loss_mask, plain.response_mask)
    masked = batch_of([1.0, 0.0], finish="length", config=AlgorithmConfig(mask_truncated=True))
    assert not masked.loss_mask.any() and masked.response_mask.all()
    assert not _contributing_rows(masked, run_config()).any()
    weights = mini_batch_weights(
        masked.loss_mask, torch.ones(2, dtype=torch.bool), AlgorithmConfig(), 8
    )
    assert not weights.any()


def test_only_samples_with_a_loss_are_computed_and_one_skipped_group_is_measured():
    batch = batch_of([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    contributing = _contributing_rows(batch, run_config())
    assert contributing.tolist() == [True, True, False, False, False, False]
    assert _skipped_probe(batch, contributing).tolist() == [False, False, True, True, False, False]
    everything = _contributing_rows(batch, run_config(algorithm={"kl": {"coefficient": 0.1}}))
    assert everything.all() and not _skipped_probe(batch, everything).any()


def test_skipped_samples_count_in_the_denominator():
    batch = batch_of([1.0, 0.0, 1.0, 1.0], lengths=[2, 2, 4, 4])
    rows = torch.ones(4, dtype=torch.bool)
    weights = mini_batch_weights(batch.loss_mask, rows, AlgorithmConfig(), 8)
    assert torch.allclose(weights[batch.loss_mask], torch.tensor(1 / 12))


def test_mini_batches_hold_whole_prompts_every_epoch():
    batch = batch_of([1.0, 0.0] * 4)
    config = run_config(algorithm={"mini_batch_size_prompts": 2, "num_epochs": 3})
    plan = _mini_batches(batch, config)
    assert len(plan) == 6 == config.optimizer_steps_per_rollout
    for epoch in range(3):
        part = plan[2 * epoch : 2 * epoch + 2]
        assert torch.stack(part).sum(0).tolist() == [1] * 8
        assert part[0].tolist() == [True] * 4 + [False] * 4
    assert len(_mini_batches(batch, run_config())) == 1


@given(st.integers(0, 1000), st.integers(1, 5), st.booleans())
def test_the_loss_does_not_depend_on_the_cut(seed, parts, with_reference):
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of([1.0, 0.0, 0.5, 0.2, 1.0, 0.0], lengths=[2, 4, 1, 3, 5, 2])

    def noise(scale):
        return torch.randn(batch.shape, generator=generator) * scale

    config = AlgorithmConfig(
        loss_aggregation="seq-mean-token-mean",
        entropy_coefficient=0.1,
        kl={"coefficient": 0.2 if with_reference else 0.0},
    )
    objective = MiniBatchObjective(
        config=config,
        advantages=batch.advantages.values,
        weights=mini_batch_weights(batch.loss_mask, torch.ones(6, dtype=torch.bool), config, 8),
        old_logprobs=batch.rollout_logprobs + noise(0.3),
        ref_logprobs=batch.rollout_logprobs + noise(0.3) if with_reference else None,
    )
    logprobs = (batch.rollout_logprobs + noise(0.1)).requires_grad_()
    entropy = noise(1.0).abs().requires_grad_()
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    whole = objective(logprobs[rows, columns], entropy[rows, columns], rows, columns)
    expected = torch.autograd.grad(whole, (logprobs, entropy))
    order = torch.randperm(len(rows), generator=generator)
    total, gradients = 0.0, [torch.zeros(batch.shape), torch.zeros(batch.shape)]
    for piece in order.chunk(parts):
        r, c = rows[piece], columns[piece]
        share = objective(logprobs[r, c], entropy[r, c], r, c)
        total += share.item()
        for sum_, g in zip(gradients, torch.autograd.grad(share, (logprobs, entropy)), strict=True):
            sum_ += g
    assert total == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_batch_metrics():
    metrics = batch_metrics(batch_of([1.0, 0.0, 1.0, 1.0], lengths=[2, 4, 1, 3], finish="length"))
    assert metrics["critic/rewards/mean"] == 0.75 and metrics["train/accuracy"] == 0.75
    assert metrics["response_length/max"] == 4 and metrics["response_length/clip_ratio"] == 1
    assert metrics["rollout/zero_spread_groups"] == 1 and metrics["prompt_length/mean"] == 3
