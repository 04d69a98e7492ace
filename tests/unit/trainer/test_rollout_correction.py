"""Train/rollout correction in the update: the loss weights are the rule's, on either path."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import AlgorithmConfig, ConfigError, validate
from megatron_rl.policy.execution import TokenValues
from megatron_rl.policy.policy import UpdateResult
from megatron_rl.precision import resolve_flow
from megatron_rl.rewards.interface import RewardResult
from megatron_rl.rollout import Completion
from megatron_rl.trainer.batch import make_batch
from megatron_rl.trainer.objective import MiniBatchObjective, mini_batch_weights
from megatron_rl.trainer.timing import Timings
from megatron_rl.trainer.update import update_policy

LENGTHS = [3, 5, 2, 4]
SCORES = [1.0, 0.0, 0.0, 1.0]


def make(rule=None, *, mini_batch=None, num_prompts=2):
    """(config, batch, log-probs of the trainer), with ratios on both sides of every bound."""
    algorithm = {"rollout_correction": rule or {}, "mini_batch_size_prompts": mini_batch}
    source = {"name": "a", "kind": "file", "path": "p"}
    config = validate(
        {
            "model": {"path": "m"},
            "data": {"train": [source], "train_batch_size": num_prompts},
            "rollout": {"n": 2},
            "algorithm": algorithm,
        }
    )
    generator = torch.Generator().manual_seed(0)
    completions = [
        Completion(
            prompt_index=i // 2,
            sample_index=i % 2,
            token_ids=tuple(range(10, 10 + n)),
            logprobs=tuple((-3 * torch.rand(n, generator=generator)).tolist()),
            finish_reason="stop",
        )
        for i, n in enumerate(LENGTHS)
    ]
    prompts = [SimpleNamespace(token_ids=(1, 2)) for _ in range(num_prompts)]
    rewards = [RewardResult(score=s) for s in SCORES]
    batch = make_batch(prompts, completions, rewards, config.algorithm)
    logprobs = batch.rollout_logprobs + 0.6 * torch.randn(batch.shape, generator=generator)
    return config, batch, logprobs.masked_fill(~batch.response_mask, 0.0)


class FakePolicy:
    """Its log-probs are given; an update differentiates the objective a few tokens at a time.

    With several updates a batch the policy has moved a little since it was scored.
    """

    def __init__(self, logprobs, moved=0.0):
        self.flow = resolve_flow("bf16")
        self.logprobs = logprobs
        self.moved = moved
        self.gradients = []
        self.num_scored = 0

    def score(self, groups, shape, *, temperature):
        self.num_scored += 1
        return self._values(groups, shape)

    def update(self, groups, shape, objective, *, temperature):
        values = self._values(groups, shape)
        leaf = (values.logprobs + self.moved).requires_grad_()
        rows, columns = self._mask(groups, shape).nonzero(as_tuple=True)
        losses = [
            objective(leaf[r, c], torch.zeros(len(r)), r, c)
            for r, c in zip(rows.split(3), columns.split(3), strict=True)
        ]
        loss = torch.stack(losses).sum()
        self.gradients.append(torch.autograd.grad(loss, leaf)[0])
        values = TokenValues(
            logprobs=values.logprobs, entropy=values.entropy, loss=loss.item(), num_tokens=1
        )
        return UpdateResult(values=values, grad_norm=1.0, lr=1.0)

    def _mask(self, groups, shape):
        mask = torch.zeros(shape, dtype=torch.bool)
        for response in (r for g in groups for r in g.responses):
            mask[response.row, : len(response.token_ids)] = True
        return mask

    def _values(self, groups, shape):
        known = torch.where(self._mask(groups, shape), self.logprobs, 0.0)
        return TokenValues(logprobs=known, entropy=torch.zeros(shape), loss=0.0, num_tokens=1)


def run(config, batch, logprobs):
    moved = 0.05 if config.algorithm.mini_batch_size_prompts else 0.0
    policy = FakePolicy(logprobs, moved)
    metrics = update_policy(policy, None, batch, config, Timings())
    return sum(policy.gradients), metrics, policy


def expected_factors(name, batch, logprobs):
    """Literal importance weights, sequence by sequence."""
    factors = torch.zeros(batch.shape)
    for b, n in enumerate(LENGTHS):
        d = (logprobs - batch.rollout_logprobs)[b, :n].tolist()
        product, mean = math.exp(sum(d)), math.exp(sum(d) / n)
        for t in range(n):
            rho = math.exp(d[t])
            factors[b, t] = {
                "token_tis": min(rho, 1.5),
                "sequence_tis": min(product, 1.5),
                "sequence_mis": product if product <= 1.5 else 0.0,
                "geometric_rejection": float(0.9 <= mean <= 1.1),
                "icepop": rho if 0.7 <= rho <= 1.5 else 0.0,
            }[name]
    return factors


RULES = {
    "token_tis": {"cap": 1.5},
    "sequence_tis": {"cap": 1.5},
    "sequence_mis": {"cap": 1.5},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
    "icepop": {"low": 0.7, "high": 1.5},
}


@pytest.mark.parametrize("mini_batch", [None, 1], ids=["on-policy", "two-mini-batches"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_scales_each_token_of_the_gradient(name, mini_batch):
    plain, off, _ = run(*make(mini_batch=mini_batch))
    config, batch, logprobs = make({"rule": name, **RULES[name]}, mini_batch=mini_batch)
    gradient, metrics, policy = run(config, batch, logprobs)
    factors = expected_factors(name, batch, logprobs)
    inside = factors[batch.response_mask]
    assert inside.max() - inside.min() > 0.2, "the batch must tell the rule from none"
    torch.testing.assert_close(gradient, plain * factors, rtol=1e-5, atol=1e-7)
    kept = inside[inside > 0]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(kept.mean().item(), rel=1e-5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        (inside == 0).float().mean().item()
    )
    # A batch of one optimizer step needs its log-probs beforehand for a sequence's ratio only.
    per_token = name in ("token_tis", "icepop")
    assert policy.num_scored == (0 if mini_batch is None and per_token else 1)
    assert not [key for key in off if "rollout_is" in key or "rollout_rs" in key]
    if mini_batch is None:
        # On-policy the surrogate is -A, so the loss is the corrected mean of that.
        advantages = batch.advantages.values[:, None]
        expected = -(factors * advantages).sum().item() / sum(LENGTHS)
        assert metrics["actor/loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_agreement_changes_nothing():
    config, batch, _ = make({"rule": "sequence_tis"})
    gradient, metrics, _ = run(config, batch, batch.rollout_logprobs)
    plain, _, _ = run(make()[0], batch, batch.rollout_logprobs)
    assert torch.equal(gradient, plain)
    assert metrics["rollout_corr/rollout_is_min"] == metrics["rollout_corr/rollout_is_max"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "token_tsi"}, "token_tis"),
        ({"rule": "token_tis", "cap": 0.5}, "greater than or equal to 1"),
        ({"rule": "icepop", "cap": 2}, "`cap` is set, but rule 'icepop' reads low and high"),
        ({"rule": "token_tis", "low": 0.5}, "`low` is set, but rule 'token_tis' reads cap"),
        ({"cap": 2}, "rule 'none' reads no bound"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(options)


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["none", "token_tis"])
def test_what_has_no_weight_reaches_neither_loss_nor_gradient(planted, rule):
    _, batch, logprobs = make()
    config = AlgorithmConfig(
        entropy_coefficient=0.1,
        kl={"coefficient": 0.2},
        rollout_correction={"rule": rule},
    )
    mask = batch.response_mask.clone()
    mask[1] = False
    mask[0, 1] = False
    weights = mini_batch_weights(mask, torch.ones(4, dtype=torch.bool), config, 8)
    rows, columns = batch.response_mask.nonzero(as_tuple=True)

    def gradients(value, old):
        def plant(tensor):
            return tensor.detach().masked_fill(~mask, value).requires_grad_()

        current, entropy = plant(logprobs), plant(logprobs.abs())
        objective = MiniBatchObjective(
            config=config,
            advantages=batch.advantages.values,
            weights=weights,
            old_logprobs=plant(logprobs - 0.1) if old else None,
            ref_logprobs=plant(logprobs + 0.3),
            rollout_logprobs=plant(batch.rollout_logprobs).detach() if rule != "none" else None,
        )
        loss = objective(current[rows, columns], entropy[rows, columns], rows, columns)
        return loss, *torch.autograd.grad(loss, (current, entropy))

    for old in (True, False):
        for ours, clean in zip(gradients(planted, old), gradients(0.0, old), strict=True):
            assert torch.isfinite(clean).all() and clean.abs().sum() > 0
            assert torch.equal(ours, clean)
