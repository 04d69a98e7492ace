"""FP16 and its loss scale: gradients do not depend on it, and an overflow costs one step."""

import math

import pytest
import torch

from megatron_rl.config import OptimizerConfig
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.precision import resolve_flow
from support.groups import random_groups, shape_of

OPTIONS = {"optimizer": OptimizerConfig(lr=1e-3, lr_warmup_steps=8, clip_grad=0.01)}
GROUPS = random_groups(sizes=((5, (3, 4)), (4, (2,))))
SHAPE = shape_of(GROUPS)


def scaled(**fields):
    return {"base": "fp16", "loss_scale": fields}


def loss(logprobs, entropy, rows, columns):
    # A batch of a few hundred tokens, as far as the size of each one's gradient goes.
    return ((logprobs * (rows + 1)).mean() + 0.1 * entropy.mean()) / 30


def update(policy, objective=loss):
    return policy.update(GROUPS, SHAPE, objective, temperature=0.8)


def not_a_number(logprobs, entropy, rows, columns):
    return logprobs.sum() * float("nan")


def too_large(logprobs, entropy, rows, columns):
    return logprobs.sum() * 1e30


def state(policy):
    """Weights, master weights and moments."""
    from megatron_rl.policy.optimizer import torch_optimizers

    tensors = [tensor.clone() for _, tensor in policy.named_tensors()]
    for inner in torch_optimizers(policy.optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                tensors.append(parameter.detach().clone())
                tensors += [inner.state[parameter][k].clone() for k in inner.state[parameter]]
    return tensors


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def scaler_of(policy):
    (part,) = policy.optimizer.chained_optimizers
    return part.grad_scaler


def test_the_gradient_norm_is_that_of_fp32_at_any_scale(tiny_policy):
    """Unscaled exactly once, before the norm and before clipping, which is active."""
    exact = update(tiny_policy("qwen3", "fp32", **OPTIONS))
    assert exact.grad_norm > 2 * OPTIONS["optimizer"].clip_grad
    ends = []
    for scale in (1.0, 1024.0, 32768.0):
        policy = tiny_policy("qwen3", scaled(initial=scale), **OPTIONS)
        results = [update(policy) for _ in range(2)]
        assert not any(result.skipped for result in results)
        assert results[0].grad_norm == pytest.approx(exact.grad_norm, rel=5e-3)
        assert results[0].values.loss == pytest.approx(exact.values.loss, rel=1e-3)
        assert results[0].loss_scale == scale
        ends.append((results[0].grad_norm, torch.cat([t.flatten() for t in state(policy)])))
    # Scales are powers of two: where nothing underflows, not even the rounding depends on them.
    assert ends[1][0] == pytest.approx(ends[2][0], rel=1e-4)
    # Adam gives a tiny gradient that underflowed at one scale a whole step of another sign.
    difference = (ends[1][1] - ends[2][1]).norm() / ends[2][1].norm()
    assert difference < 1e-3


def test_everything_is_fp16_but_master_weights_and_gradients(tiny_policy):
    policy = tiny_policy("qwen3", "fp16")
    assert all(tensor.dtype == torch.float16 for _, tensor in policy.named_tensors())
    assert all(p.main_grad.dtype == torch.float32 for p in policy.model.parameters())
    masters = [p for group in policy.optimizer.param_groups for p in group["params"]]
    assert masters and all(p.dtype == torch.float32 for p in masters)


def test_a_weight_beyond_the_range_of_fp16_is_refused(tiny_policy):
    from megatron_rl.policy.weights import load_hf_weights

    policy = tiny_policy(flow="fp16")
    tensors = {name: tensor.float() for name, tensor in policy.named_tensors()}
    tensors["model.norm.weight"][3] = 7e4
    with pytest.raises(ValueError, match="model.norm.weight exceeds 65504.*precision.flow=bf16"):
        load_hf_weights(policy.model, policy.parameters, tensors, list(tensors), policy.layout)


def test_megatrons_scaler_is_the_flows(tiny_policy):
    flow = scaled(
        initial=512,
        growth_interval_steps=7,
        hysteresis=3,
        backoff=0.25,
        floor=4,
        max_steps_at_floor=2,
    )
    scaler = scaler_of(tiny_policy(flow=flow))
    assert (scaler.scale.item(), scaler.min_scale.item()) == (512, 4)
    assert scaler.backoff_factor.item() == 0.25 and scaler.growth_factor.item() == 2
    assert (scaler.growth_interval, scaler.hysteresis) == (7, 3)
    for name in ("bf16", "fp32"):
        policy = tiny_policy(flow=name)
        assert policy.loss_scale is None
        assert getattr(policy.optimizer.chained_optimizers[0], "grad_scaler", None) is None


@pytest.mark.parametrize("objective", [too_large, not_a_number])
def test_an_overflow_skips_optimizer_and_schedule_and_lowers_the_scale(tiny_policy, objective):
    policy = tiny_policy(flow=scaled(initial=4096, backoff=0.25), **OPTIONS)
    first = update(policy)
    assert not first.skipped and first.grad_norm > 0 and first.loss_scale == 4096
    before, lr = state(policy), policy.current_lr
    skipped = update(policy, objective)
    assert skipped.skipped and math.isnan(skipped.grad_norm)
    assert skipped.loss_scale == 1024 and policy.current_lr == lr
    assert equal(state(policy), before)
    # As if it had not happened, but for the scale.
    after = update(policy)
    assert not after.skipped and after.lr == lr and policy.current_lr > lr
    assert not equal(state(policy), before)


def test_a_scale_far_too_large_comes_down(tiny_policy):
    policy = tiny_policy(flow=scaled(initial=2.0**40, backoff=2.0**-6), **OPTIONS)
    results = [update(policy)]
    while results[-1].skipped:
        results.append(update(policy))
        assert len(results) < 8
    assert len(results) > 2 and results[-1].grad_norm > 0
    assert results[-1].lr == results[0].lr  # the schedule has waited


def test_the_run_ends_after_the_last_overflow_allowed_at_the_floor(tiny_policy):
    policy = tiny_policy(flow=scaled(initial=2, floor=1, max_steps_at_floor=2), **OPTIONS)
    before = state(policy)
    assert update(policy, too_large).loss_scale == 1  # reaches the floor; does not count
    assert update(policy, too_large).skipped
    assert equal(state(policy)[: len(before)], before[: len(before)])
    assert not update(policy).skipped  # and the count begins anew
    assert update(policy, too_large).skipped
    with pytest.raises(NonFiniteError, match="gradients exceeded .* last of 2 .* floor of 1 "):
        update(policy, too_large)
    with pytest.raises(NonFiniteError, match="the forward pass exceeded .* last of 3 overflows"):
        update(policy, not_a_number)


def test_a_checkpoint_in_the_middle_of_a_growth_interval(tiny_policy, tmp_path):
    from megatron_rl.policy.checkpoint import load_checkpoint, save_checkpoint

    flow = scaled(initial=4, floor=2, growth_interval_steps=3, hysteresis=2, max_steps_at_floor=3)

    def trackers(policy):
        return scaler_of(policy).state_dict() | policy.loss_scale.state_dict()

    unbroken = tiny_policy(flow=flow, **OPTIONS)
    # Scale 4, and one overflow of the two let pass; 2 after the second; then two at the floor.
    for objective in (too_large, too_large, too_large, too_large, loss, loss):
        update(unbroken, objective)
    saved = save_checkpoint(tmp_path, 6, unbroken, {}, keep=2)
    at_floor = tiny_policy(flow=flow, **OPTIONS)
    load_checkpoint(saved, at_floor)
    assert trackers(at_floor) == trackers(unbroken) and trackers(unbroken)["growth_tracker"] == 2

    for objective in (loss, too_large, too_large):
        update(unbroken, objective)
        update(at_floor, objective)
        assert trackers(at_floor) == trackers(unbroken)
    assert trackers(unbroken)["hysteresis_tracker"] == 0
    assert equal(state(at_floor), state(unbroken))

    for _ in range(2):
        update(unbroken, too_large)
    assert trackers(unbroken)["overflows_at_floor"] == 2
    load_checkpoint(save_checkpoint(tmp_path, 11, unbroken, {}, keep=1), at_floor)
    with pytest.raises(NonFiniteError, match="the last of 3 overflows in a row"):
        update(at_floor, too_large)


def test_a_skipped_step_of_fine_tuning_has_metrics_without_a_norm(tiny_policy):
    from megatron_rl.data.examples import Example
    from megatron_rl.data.types import PromptRow
    from megatron_rl.trainer.sft import learn

    row = PromptRow(index=0, data_source="s", prompt="p", ground_truth="7")
    batch = [Example(row=row, token_ids=(5, 6, 7), text="", response_ids=(8, 9))]
    policy = tiny_policy(flow=scaled(initial=2.0**30, backoff=2.0**-20))
    first, second = learn(policy, batch), learn(policy, batch)
    assert first["actor/skipped_steps"] == 1 and first["actor/loss_scale"] == 1024
    assert "actor/grad_norm" not in first and first["sft/loss"] > 0
    assert second["actor/skipped_steps"] == 0 and second["actor/grad_norm"] > 0
    assert second["sft/loss"] == first["sft/loss"]  # the weights have not moved


def test_reports_of_several_optimizer_steps_are_combined():
    from megatron_rl.trainer.step_metrics import combine_reports

    skipped = {"actor/lr": 1.0, "actor/loss_scale": 8.0, "actor/skipped_steps": 1.0}
    taken = {"actor/lr": 1.0, "actor/grad_norm": 3.0, "actor/loss_scale": 8.0} | {
        "actor/skipped_steps": 0.0,
        "actor/loss": 2.0,
    }
    lower = skipped | {"actor/loss_scale": 4.0, "actor/loss": 4.0}
    assert combine_reports([skipped, taken, lower]) == {
        "actor/lr": 1.0,
        "actor/grad_norm": 3.0,
        "actor/loss": 3.0,
        "actor/loss_scale": 4.0,
        "actor/skipped_steps": 2.0,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial": 0.5}, "initial=0.5 must be between the floor 1 and 2\\^127"),
        ({"initial": "1e3"}, "initial='1e3' must be a number"),
        ({"backoff": 1}, "backoff=1 must be above 0 and below 1"),
        ({"growth_interval_steps": 0.5}, "growth_interval_steps=0.5 must be an integer"),
        ({"hysteresis": 0}, "hysteresis=0 must be 1 or more"),
        ({"floor": 0}, "floor=0 must be above 0"),
        ({"max_steps": 3}, "must be a mapping of initial,.* max_steps_at_floor"),
    ],
    ids=str,
)
def test_a_wrong_loss_scale_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        resolve_flow(scaled(**fields))


def test_fp16_and_only_fp16_has_a_loss_scale():
    with pytest.raises(ValueError, match="float16 without a loss scale"):
        resolve_flow({"base": "fp16", "loss_scale": None})
    with pytest.raises(ValueError, match="only float16 needs one"):
        resolve_flow({"base": "bf16", "loss_scale": {}})
