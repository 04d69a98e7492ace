import sys

import pytest

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import MetricsWriter, read_metrics


def tensorboard_scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_what_the_file_says_also_after_a_resume(tmp_path):
    config = LoggingConfig(tensorboard=True)
    for first, resume_step in ((0, None), (3, 2)):
        with MetricsWriter(tmp_path, config, resume_step=resume_step) as writer:
            for step in range(first, 6):
                writer.log(step, {"a/x": step + first / 8, "b": 1.0})
    expected = {
        key: [(line.step, line.metrics[key]) for line in read_metrics(tmp_path)]
        for key in ("a/x", "b")
    }
    assert [value for _, value in expected["a/x"]] == [0.0, 1.0, 2.0, 3.375, 4.375, 5.375]
    assert tensorboard_scalars(tmp_path) == expected


@pytest.mark.parametrize(
    ("option", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, option, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install {option}.*logging.{option}=false"):
        MetricsWriter(tmp_path, LoggingConfig(**{option: True}), resume_step=None)


class FakeWandb:
    """Records calls, as the W&B client would receive them."""

    def __init__(self):
        self.starts, self.rows, self.defined, self.finished = [], [], [], 0

    def init(self, **options):
        self.starts.append(options)
        return self

    def define_metric(self, *names, **options):
        self.defined.append((names, options))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", None)])
def test_a_resumed_run_continues_its_wandb_run(tmp_path, monkeypatch, mode, resume):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("seed: 7\n")
    config = LoggingConfig(wandb=True, wandb_mode=mode, wandb_project="p")
    for resume_step in (None, 1):
        with MetricsWriter(run_dir, config, resume_step=resume_step, clock=lambda: 0.0) as writer:
            writer.log(2, {"x": 1.0})
    first, second = (start["id"] for start in fake.starts)
    assert first == second != ""
    assert {start["resume"] for start in fake.starts} == {resume}
    assert fake.starts[0] | {"id": "", "dir": ""} == {
        "project": "p",
        "name": "my-run",
        "id": "",
        "resume": resume,
        "mode": mode,
        "dir": "",
        "config": {"seed": 7},
    }
    assert fake.rows == [{"x": 1.0, "trainer/global_step": 2, "trainer/time_s": 0.0}] * 2
    assert (("*",), {"step_metric": "trainer/global_step"}) in fake.defined
    assert fake.finished == 2


def test_wandb_offline_works_without_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in (("SILENT", "true"), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for variable in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{variable}_DIR", str(tmp_path / "home"))
    config = LoggingConfig(wandb=True, wandb_mode="offline")
    ids = []
    for resume_step in (None, 1):
        with MetricsWriter(tmp_path, config, resume_step=resume_step) as writer:
            ids.append(wandb.run.id)
            writer.log(2, {"x": 1.0})
    assert ids[0] == ids[1]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
