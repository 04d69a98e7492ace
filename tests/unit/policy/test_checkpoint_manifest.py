"""What makes a checkpoint complete, which are kept, and what a load leaves behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from support.groups import random_groups, shape_of
from support.tiny_engine import build_policy


def step(policy, seed=0):
    groups = random_groups(seed)
    policy.update(groups, shape_of(groups), lambda lp, e, r, c: -lp.mean(), temperature=1.0)


@pytest.fixture(scope="module")
def checkpoint():
    from megatron_rl.config import PolicyConfig
    from megatron_rl.policy.parallel import initialize

    initialize(PolicyConfig(), seed=0)
    from megatron_rl.policy import checkpoint

    return checkpoint


@pytest.fixture(scope="module")
def policy(tiny_model_dir):
    policy = build_policy(tiny_model_dir("llama", num_layers=1), "bf16")
    step(policy, 1), step(policy, 2)
    return policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory, checkpoint, policy):
    root = tmp_path_factory.mktemp("checkpoints")
    return checkpoint.save_checkpoint(root, 2, policy, {"loader": {"epoch": 1}}, keep=1)


@pytest.fixture
def fast_save(checkpoint, monkeypatch):
    """Saves of one small file, for tests of what stands around it."""

    def save(state, directory, **_):
        (Path(directory) / "data.distcp").write_bytes(b"x" * 100)

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", save)
    monkeypatch.setattr(checkpoint, "_state", lambda *_, **__: {})


def test_the_manifest_describes_the_files(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    files = {p.name: p.stat().st_size for p in saved.iterdir() if p.name != "manifest.json"}
    assert manifest["files"] == files and any(name.endswith(".distcp") for name in files)
    assert (manifest["step"], manifest["flow"]) == (2, "bf16")
    assert manifest["trainer"] == {"loader": {"epoch": 1}}
    assert set(manifest["layout"].values()) == {1}


def test_nothing_is_written_after_the_manifest_but_the_pointer(
    checkpoint, policy, tmp_path, fast_save, monkeypatch
):
    seen = []
    write = checkpoint.checkpoint_files._write_text

    def recording(path, text):
        seen.append((path.name, checkpoint.complete_steps(tmp_path)))
        write(path, text)

    monkeypatch.setattr(checkpoint.checkpoint_files, "_write_text", recording)
    directory = checkpoint.save_checkpoint(tmp_path, 4, policy, {}, keep=1)
    assert seen == [("manifest.json", []), ("latest_checkpointed_iteration.txt", [])]
    assert checkpoint.complete_steps(tmp_path) == [4]
    assert {p.name for p in directory.iterdir()} == {"data.distcp", "manifest.json"}


def test_a_save_that_dies_before_its_manifest_never_counts_and_can_be_repeated(
    checkpoint, policy, tmp_path, fast_save, monkeypatch
):
    with monkeypatch.context() as context:
        context.setattr(
            checkpoint.checkpoint_files, "_write_text", lambda *_: (_ for _ in ()).throw(KeyError())
        )
        with pytest.raises(KeyError):
            checkpoint.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    directory = checkpoint.checkpoint_files.staging_path(tmp_path, 1)
    assert directory.is_dir() and checkpoint.complete_steps(tmp_path) == []
    with pytest.raises(ValueError, match=r"no complete checkpoint: it has no manifest\.json"):
        checkpoint.load_checkpoint(directory, policy)
    checkpoint.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    assert checkpoint.complete_steps(tmp_path) == [1] and not directory.exists()


def test_a_step_saved_again_keeps_its_old_checkpoint_until_the_new_one_is_complete(
    checkpoint, policy, tmp_path, fast_save, monkeypatch
):
    """Whatever operation a save dies at, the step has a complete checkpoint afterwards."""
    files, root = checkpoint.checkpoint_files, tmp_path
    checkpoint.save_checkpoint(root, 5, policy, {"version": 0}, keep=1)

    def version():
        assert files.newest_step(root) == 5
        directory = checkpoint.checkpoint_path(root, 5)
        return files.read_manifest(directory)["trainer"]["version"]

    real = {"rename": Path.rename, "replace": Path.replace}
    for allowed in range(5):
        done = []

        def dying(name, done=done, allowed=allowed):
            def operation(self, target):
                if len(done) == allowed:
                    raise KeyboardInterrupt
                done.append(name)
                return real[name](self, target)

            return operation

        with monkeypatch.context() as context:
            for name in real:
                context.setattr(Path, name, dying(name))
            try:
                checkpoint.save_checkpoint(root, 5, policy, {"version": 1}, keep=1)
            except KeyboardInterrupt:
                assert allowed < 4
            else:
                assert done == ["replace", "replace", "rename", "rename"]
        # The manifest is the first operation: from then on the new one is found.
        assert version() == (1 if allowed else 0)
    checkpoint.save_checkpoint(root, 5, policy, {"version": 2}, keep=1)
    assert version() == 2 and {p.name for p in root.glob("global*")} == {"global_step_5"}


def test_a_run_continues_from_what_was_saved_last(checkpoint, policy, tmp_path, fast_save):
    newest = checkpoint.checkpoint_files.newest_step
    assert newest(tmp_path) is None
    for number in (6, 9, 3):
        checkpoint.save_checkpoint(tmp_path, number, policy, {}, keep=9)
        assert newest(tmp_path) == number
    shutil.rmtree(checkpoint.checkpoint_path(tmp_path, 3))
    assert newest(tmp_path) == 9
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert newest(tmp_path) == 9
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert newest(tmp_path) == 9


@pytest.mark.parametrize("damage", ["cut", "grown", "missing"])
def test_damage_to_any_file_is_refused_with_its_name(checkpoint, policy, saved, tmp_path, damage):
    names = json.loads((saved / "manifest.json").read_text())["files"]
    assert len(names) >= 3
    for name in names:
        copy = tmp_path / name / "global_step_2"
        shutil.copytree(saved, copy)
        content = (copy / name).read_bytes()
        if damage == "missing":
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content[:-1] if damage == "cut" else content + b"0")
        with pytest.raises(ValueError, match=f"{name} has .* instead of {len(content)}"):
            checkpoint.load_checkpoint(copy, policy)


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_are_kept(checkpoint, policy, tmp_path, fast_save, keep):
    for number in range(5, 56, 10):
        checkpoint.save_checkpoint(tmp_path, number, policy, {}, keep=keep)
        kept = list(range(5, number + 1, 10))[-keep:]
        assert checkpoint.complete_steps(tmp_path) == kept
        assert {p.name for p in tmp_path.glob("global*")} == {f"global_step_{s}" for s in kept}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "55\n"


@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (2, [3, 9]), (3, [3, 6, 9])])
def test_a_run_that_went_back_keeps_what_it_just_saved(
    checkpoint, policy, tmp_path, fast_save, keep, left
):
    for number in (6, 9):
        checkpoint.save_checkpoint(tmp_path, number, policy, {}, keep=9)
    checkpoint.save_checkpoint(tmp_path, 3, policy, {}, keep=keep)
    assert checkpoint.complete_steps(tmp_path) == left


def test_what_the_user_put_beside_checkpoints_is_left_alone(
    checkpoint, policy, tmp_path, fast_save
):
    first = checkpoint.save_checkpoint(tmp_path, 1, policy, {}, keep=1)
    copies = [tmp_path / name for name in ("global_step_1.best", "global_step_old", "other")]
    for copy in copies:
        shutil.copytree(first, copy)
    checkpoint.save_checkpoint(tmp_path, 2, policy, {}, keep=1)
    assert checkpoint.complete_steps(tmp_path) == [2]
    assert all((copy / "manifest.json").is_file() for copy in copies) and not first.exists()
    checkpoint.read_manifest(copies[0])


def test_after_a_load_each_parameter_counts_its_own_steps(
    checkpoint, policy, saved, tiny_model_dir
):
    from megatron_rl.policy.optimizer import torch_optimizers

    fresh = build_policy(tiny_model_dir("llama", num_layers=1), "bf16")
    assert checkpoint.load_checkpoint(saved, fresh) == {"loader": {"epoch": 1}}
    checkpoint.load_checkpoint(saved, fresh)

    def steps():
        states = [s for inner in torch_optimizers(fresh.optimizer) for s in inner.state.values()]
        return [state["step"] for state in states]

    assert len(steps()) == len(list(fresh.model.parameters()))
    assert len({tensor.data_ptr() for tensor in steps()}) == len(steps())
    assert {tensor.item() for tensor in steps()} == {2.0}
    assert fresh.scheduler.num_steps == policy.scheduler.num_steps == 2
    step(fresh, 3)
    assert {tensor.item() for tensor in steps()} == {3.0}
    assert all(torch.isfinite(t).all() for _, t in fresh.named_tensors())


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("llama", {"num_layers": 1, "tie_word_embeddings": True}),
        ("llama", {"num_layers": 1, "num_query_groups": 4}),
        ("llama", {"num_layers": 1, "vocab_size": 300}),
        ("qwen3", {"num_layers": 1}),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    checkpoint, saved, tiny_model_dir, family, model
):
    other = build_policy(tiny_model_dir(family, **model), "bf16")
    before = [t.clone() for _, t in other.named_tensors()]
    with pytest.raises(ValueError, match="is of model '.*', and this run is of '"):
        checkpoint.load_checkpoint(saved, other)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, other.named_tensors(), strict=True))
