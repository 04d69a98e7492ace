"""Background saves: what is written is what was there, and only complete ones count."""

import functools
import shutil
import time

import pytest
import torch

from megatron_rl.config import OptimizerConfig
from support.groups import random_groups, shape_of


def train(policy, seeds):
    for seed in seeds:
        groups = random_groups(seed)
        policy.update(
            groups, shape_of(groups), lambda lp, e, r, c: -(lp * (r + 1)).mean(), temperature=1.0
        )


def weights(policy):
    return [t.clone() for _, t in policy.named_tensors()]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def checkpoint():
    from megatron_rl.policy import checkpoint

    return checkpoint


@pytest.fixture
def saver(tiny_policy):
    from megatron_rl.policy.checkpoint_async import BackgroundSaver

    return BackgroundSaver()


@pytest.fixture
def make_policy(tiny_policy):
    options = {"optimizer": OptimizerConfig(lr=1e-2, lr_warmup_steps=3)}
    return lambda: tiny_policy("llama", "bf16", {"num_layers": 1}, **options)


@pytest.fixture
def writing(monkeypatch):
    """Replaces what the writing process does for each tensor."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    real = filesystem_async._write_item

    def replace(action):
        @functools.wraps(real)  # Megatron looks at its signature
        def item(*args, **options):
            action()
            return real(*args, **options)

        monkeypatch.setattr(filesystem_async, "_write_item", item)

    return replace


def fail():
    raise OSError(28, "No space left on device")


def test_later_steps_do_not_change_what_is_written(
    make_policy, saver, checkpoint, writing, tmp_path
):
    policy, state = make_policy(), {"loader": {"epoch": 1}}
    train(policy, [1, 2])
    at_save = weights(policy)
    writing(lambda: time.sleep(0.1))
    saver.start(tmp_path, 2, policy, state, keep=2)
    state["loader"]["epoch"] = 5
    train(policy, [3, 4])
    expected = weights(policy)
    assert checkpoint.complete_steps(tmp_path) == [] and not equal(at_save, expected)
    saver.finish()
    assert checkpoint.complete_steps(tmp_path) == [2]
    restored = make_policy()
    saved = checkpoint.checkpoint_path(tmp_path, 2)
    assert checkpoint.load_checkpoint(saved, restored) == {"loader": {"epoch": 1}}
    assert equal(weights(restored), at_save)
    train(restored, [3, 4])
    assert equal(weights(restored), expected) and restored.current_lr == policy.current_lr
    saver.finish()  # nothing is in flight any more


def test_one_save_is_in_flight_and_a_finished_one_is_found_without_waiting(
    make_policy, saver, checkpoint, tmp_path
):
    policy = make_policy()
    train(policy, [1])
    saver.poll()
    for step in (1, 2):
        saver.start(tmp_path, step, policy, {"step": step}, keep=2)
        assert checkpoint.complete_steps(tmp_path) == list(range(1, step))
    deadline = time.monotonic() + 60
    while checkpoint.complete_steps(tmp_path) != [1, 2]:
        assert time.monotonic() < deadline
        saver.poll()
        time.sleep(0.02)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert {p.name for p in tmp_path.glob("global*")} == {"global_step_1", "global_step_2"}


def test_a_save_that_fails_or_dies_leaves_the_earlier_one_the_newest(
    make_policy, saver, checkpoint, writing, tmp_path
):
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_rl.policy.checkpoint_async import BackgroundSaver

    policy, newest = make_policy(), checkpoint.checkpoint_files.newest_step
    train(policy, [1])
    checkpoint.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    writing(fail)
    saver.start(tmp_path, 2, policy, {}, keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="step 2 .*No space left.*untouched"):
        saver.finish()
    assert newest(tmp_path) == 1 and not checkpoint.staging_path(tmp_path, 2).exists()

    writing(lambda: time.sleep(0.3))
    saver.start(tmp_path, 2, policy, {}, keep=1)
    saver._calls.async_calls[0].async_caller.process.kill()
    with pytest.raises(checkpoint.CheckpointError, match="step 2 could not be written"):
        saver.finish()
    assert newest(tmp_path) == 1
    writing(lambda: None)
    checkpoint.save_checkpoint(tmp_path, 3, policy, {"after": "a failure"}, keep=2)
    after = checkpoint.load_checkpoint(checkpoint.checkpoint_path(tmp_path, 3), policy)
    assert after == {"after": "a failure"}
    shutil.rmtree(checkpoint.checkpoint_path(tmp_path, 3))
    writing(lambda: time.sleep(0.3))

    # As when the whole run is killed: nobody completes the save, and the next run repeats it.
    saver.start(tmp_path, 2, policy, {}, keep=1)
    assert checkpoint.staging_path(tmp_path, 2).is_dir() and newest(tmp_path) == 1
    saver._calls.async_calls[0].async_caller.process.join()
    assert newest(tmp_path) == 1
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoint.load_checkpoint(checkpoint.staging_path(tmp_path, 2), policy)
    writing(lambda: None)
    filesystem_async._results_queue = None  # a new process has a new one
    again = BackgroundSaver()
    again.start(tmp_path, 2, policy, {"again": True}, keep=1)
    again.finish()
    assert newest(tmp_path) == 2 and checkpoint.complete_steps(tmp_path) == [2]
    saved = checkpoint.checkpoint_path(tmp_path, 2)
    assert checkpoint.load_checkpoint(saved, policy) == {"again": True}
