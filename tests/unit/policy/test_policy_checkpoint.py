"""Checkpoints: a restored policy continues bit for bit; incomplete ones are never used."""

import pytest
import torch

from megatron_rl.config import OptimizerConfig
from support.groups import random_groups, shape_of

OPTIONS = {"optimizer": OptimizerConfig(lr=1e-2, lr_warmup_steps=3)}


def train(policy, seeds):
    for seed in seeds:
        groups = random_groups(seed)
        policy.update(
            groups, shape_of(groups), lambda lp, e, r, c: -(lp * (r + 1)).mean(), temperature=1.0
        )


def state(policy):
    from megatron_rl.policy.optimizer import torch_optimizers

    tensors = [t.clone() for _, t in policy.named_tensors()]
    for inner in torch_optimizers(policy.optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                values = inner.state[parameter]
                tensors += [
                    parameter.detach().clone(),
                    *(values[k].clone() for k in sorted(values)),
                ]
    return tensors


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def checkpoint_module():
    from megatron_rl.policy import checkpoint

    return checkpoint


@pytest.mark.parametrize("flow", ["bf16", "fp32"])
def test_a_restored_policy_continues_bit_for_bit(tiny_policy, tmp_path, checkpoint_module, flow):
    model = {"tie_word_embeddings": True}
    policy = tiny_policy("llama", flow, model, **OPTIONS)
    train(policy, [1, 2])
    saved = checkpoint_module.save_checkpoint(tmp_path, 2, policy, {"loader": 7}, keep=2)
    at_save = state(policy)
    train(policy, [3, 4])
    expected = state(policy)

    restored = tiny_policy("llama", flow, model, **OPTIONS)
    train(restored, [9])  # somewhere else entirely
    for _ in range(2):  # loading twice is loading once
        assert checkpoint_module.load_checkpoint(saved, restored) == {"loader": 7}
        assert equal(state(restored), at_save)
    train(restored, [3, 4])
    assert equal(state(restored), expected)
    assert restored.current_lr == policy.current_lr

    # Into an optimizer that never stepped.
    fresh = tiny_policy("llama", flow, model, **OPTIONS)
    checkpoint_module.load_checkpoint(saved, fresh)
    train(fresh, [3, 4])
    assert equal(state(fresh), expected)


def test_random_states_are_restored(tiny_policy, tmp_path, checkpoint_module):
    policy = tiny_policy()
    train(policy, [1])
    torch.manual_seed(5)
    saved = checkpoint_module.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    expected = torch.rand(3)
    torch.manual_seed(6)
    checkpoint_module.load_checkpoint(saved, policy)
    assert torch.equal(torch.rand(3), expected)


def test_only_complete_checkpoints_count_and_old_ones_go(tiny_policy, tmp_path, checkpoint_module):
    policy = tiny_policy()
    train(policy, [1])
    for step in (1, 2, 3):
        checkpoint_module.save_checkpoint(tmp_path, step, policy, {"step": step}, keep=2)
    assert checkpoint_module.complete_steps(tmp_path) == [2, 3]
    assert not (tmp_path / "global_step_1").exists()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    (tmp_path / "global_step_3" / "manifest.json").unlink()
    assert checkpoint_module.complete_steps(tmp_path) == [2]
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoint_module.load_checkpoint(tmp_path / "global_step_3", policy)
    data = max((tmp_path / "global_step_2").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match=data.name):
        checkpoint_module.load_checkpoint(tmp_path / "global_step_2", policy)


def test_another_model_or_flow_is_refused(tiny_policy, tmp_path, checkpoint_module):
    policy = tiny_policy()
    train(policy, [1])
    saved = checkpoint_module.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    with pytest.raises(ValueError, match="precision flow 'fp32'.*'bf16'"):
        checkpoint_module.load_checkpoint(saved, tiny_policy(flow="bf16"))
    with pytest.raises(ValueError, match="2x128"):
        checkpoint_module.load_checkpoint(saved, tiny_policy(model={"num_layers": 3}))


def test_a_failed_save_leaves_no_checkpoint(tiny_policy, tmp_path, checkpoint_module, monkeypatch):
    policy = tiny_policy()
    train(policy, [1])
    checkpoint_module.save_checkpoint(tmp_path, 1, policy, {}, keep=2)

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module.dist_checkpointing, "save", no_space)
    with pytest.raises(OSError, match="step 2 .*No space left on device; earlier checkpoints are"):
        checkpoint_module.save_checkpoint(tmp_path, 2, policy, {}, keep=2)
    assert checkpoint_module.complete_steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.glob("global*")] == ["global_step_1"]
