import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import (
    Console,
    MetricsWriter,
    Rollout,
    RunHeader,
    evaluation_path,
    write_rollouts,
)
from megatron_rl.metrics.console_lines import (
    column_header,
    evaluation_line,
    header_block,
    overflow_line,
    remaining_seconds,
    step_line,
)

STEP_METRICS = {
    "critic/rewards/mean": 0.5123,
    "train/accuracy": 0.4375,
    "response_length/mean": 12.25,
    "actor/entropy": 1.234,
    "rollout_corr/logp_diff_abs_mean": 0.0,
    "actor/grad_norm": 0.98765,
    "perf/total_num_tokens": 6000.0,
    "perf/time_per_step": 12.0,
}


class Stream(io.TextIOWrapper):
    """A text stream of a given encoding that keeps what was written."""

    def __init__(self, encoding):
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding, errors="strict", write_through=True)

    def text(self):
        return self.raw_bytes.getvalue().decode(self.encoding)


def rollout(step, row, response, accuracy):
    return Rollout(
        step=step,
        data_source="chain_sum",
        prompt=f"solved example\n\nQ: {row} + 1 =",
        response=response,
        ground_truth=str(row + 1),
        score=accuracy or 0.0,
        accuracy=accuracy,
        truncated=False,
        response_length_tokens=3,
        mode="greedy",
    )


@pytest.fixture
def finished_run(tmp_path):
    with MetricsWriter(tmp_path, LoggingConfig(), resume_step=None, clock=lambda: 0.0) as writer:
        for step, accuracy in ((0, 0.125), (20, 0.48)):
            writer.log(
                step,
                {"val-core/chain_sum/acc/mean": accuracy, "val-core/chain_sum/reward/mean": 0.2},
            )
    before = [rollout(0, row, "\x1b[31mnaïve ✨[bold]", 0.0) for row in range(9)]
    after = [rollout(20, row, "", 1.0 if row else None) for row in range(9)]
    write_rollouts(evaluation_path(tmp_path, 0), before)
    write_rollouts(evaluation_path(tmp_path, 20), after)
    return tmp_path


def test_a_step_line_holds_the_values_under_their_heads():
    header, line = column_header(100), step_line(7, 100, STEP_METRICS, eta_s=1116.0)
    values = dict(zip(header.split(), line.split(), strict=True))
    assert values == {
        "step": "7/100",
        "reward": "0.512",
        "acc": "43.8%",
        "len": "12.2",
        "entropy": "1.234",
        "|dlogp|": "0",
        "grad": "0.988",
        "tok/s": "500",
        "sec": "12.0",
        "ETA": "18m36s",
    }


USUAL = {
    "critic/rewards/mean": st.floats(-99, 99),
    "train/accuracy": st.floats(0, 1),
    "response_length/mean": st.floats(1, 9999),
    "actor/entropy": st.floats(0, 20),
    "rollout_corr/logp_diff_abs_mean": st.floats(0, 100),
    "actor/grad_norm": st.floats(1e-30, 99_999),
    "perf/total_num_tokens": st.floats(1, 1e8),
    "perf/time_per_step": st.floats(0.1, 9999),
}


@given(st.fixed_dictionaries({}, optional=USUAL), st.integers(1, 999), st.floats(0, 1e6))
def test_columns_stay_aligned_within_80_characters(metrics, step, eta_s):
    header, line = column_header(999), step_line(step, 999, metrics, eta_s)
    assert len(line) == len(header) <= 80
    ends = [match.end() for match in re.finditer(r"\S+", header)]
    assert [match.end() for match in re.finditer(r"\S+", line)] == ends


def test_unusually_wide_values_stay_apart():
    huge = {key: -1.23456e300 for key in STEP_METRICS} | {"actor/entropy": float("nan")}
    assert len(step_line(1, 10, huge, 0.0).split()) == len(column_header(10).split())


def test_remaining_time_scales_with_the_steps_left_and_ignores_outliers():
    assert remaining_seconds([], 10) is None
    assert remaining_seconds([2.0, 2.0, 2.0, 90.0, 2.0], 10) == 20.0
    assert remaining_seconds([2.0], 0) == 0.0


def test_the_header_is_repeated_and_the_eta_ends_at_zero():
    stream = Stream("utf-8")
    console = Console(total_steps=45, file=stream)
    for step in range(1, 46):
        console.step(step, STEP_METRICS)
    lines = stream.text().splitlines()
    assert [number for number, line in enumerate(lines) if "reward" in line] == [0, 21, 42]
    assert lines[1].split()[-1] == "8m48s"
    assert lines[-1].split()[-1] == "0.0s"


def test_output_that_is_no_terminal_is_plain(finished_run):
    stream = Stream("utf-8")
    console = Console(total_steps=20, file=stream)
    console.header(
        RunHeader(name="n", model="m", flow="f", data="d", steps="20", run_dir=finished_run)
    )
    console.step(1, STEP_METRICS)
    console.evaluation(1, {"val-core/chain_sum/acc/mean": 0.5})
    console.summary(finished_run)
    assert "\x1b" not in stream.text()
    assert "\r" not in stream.text()
    assert max(len(line) for line in stream.text().splitlines() if "run dir" not in line) <= 100


def test_an_evaluation_says_what_changed_since_the_first():
    before = {"val-core/a/acc/mean": 0.125, "val-core/a/reward/mean": 0.5}
    after = {
        "val-core/a/acc/mean": 0.48,
        "val-core/a/reward/mean": 0.25,
        "val-core/a/acc/mean@4": 0.4,
        "timing_s/eval": 8.2,
    }
    assert evaluation_line(0, before, {}) == "eval at step 0  a: accuracy 12.5%, reward 0.500"
    assert evaluation_line(20, after, before) == (
        "eval at step 20  a: accuracy 48.0% (+35.5 points), reward 0.250 (-0.250), "
        "accuracy@4 40.0%  [8.2s]"
    )
    assert evaluation_line(20, after, {}).count("(") == 0
    assert "nothing was measured" in evaluation_line(5, {}, before)


def test_the_summary_shows_before_and_after_and_sample_answers(finished_run):
    stream = Stream("utf-8")
    report = finished_run / "report.html"
    Console(total_steps=20, file=stream).summary(finished_run, report=report)
    text = stream.text()
    accuracy_row = next(line for line in text.splitlines() if "exact match" in line)
    for value in ("chain_sum", "12.5%", "48.0%", "+35.5 points"):
        assert value in accuracy_row
    assert "5 of 9 held-out prompts, evenly spaced" in text
    assert "✗ \\x1b[31mnaïve ✨[bold]" in text  # shown, not obeyed
    assert text.count("✓ (empty)") == 4
    assert text.count("· (empty)") == 1
    assert "solved example" not in text
    assert text.rstrip().endswith(f"report: {report}")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_these_characters_gets_others(finished_run, encoding):
    stream = Stream(encoding)
    Console(total_steps=20, file=stream).summary(finished_run)
    text = stream.text()
    assert "x \\x1b[31m" in text
    assert "\\u2728" in text
    assert text.count("+ (empty)") == 4
    assert not re.search("[✓✗┏│━]", text)


@pytest.mark.parametrize("steps", [[], [0]])
def test_the_summary_of_an_unfinished_run_shows_what_there_is(tmp_path, steps):
    with MetricsWriter(tmp_path, LoggingConfig(), resume_step=None) as writer:
        for step in steps:
            writer.log(step, {"val-core/s/acc/mean": 0.25})
    stream = Stream("utf-8")
    Console(total_steps=20, file=stream).summary(tmp_path)
    assert ("25.0%" in stream.text()) == bool(steps)
    assert "held-out prompts, evenly" not in stream.text()


def test_an_overflow_is_said_below_its_step():
    metrics = STEP_METRICS | {"actor/loss_scale": 16384.0, "actor/skipped_steps": 0.0}
    assert overflow_line(7, metrics) is None and overflow_line(7, STEP_METRICS) is None
    stream = Stream("utf-8")
    Console(total_steps=9, file=stream).step(7, metrics | {"actor/skipped_steps": 2.0})
    last = stream.text().splitlines()[-1]
    assert last == "step 7: overflow, 2 optimizer steps skipped; loss scale 16384"


def test_further_lines_of_the_flow_stand_below_the_first(tmp_path):
    header = RunHeader(
        name="n", model="m", flow="bf16\nexact", data="d", steps="s", run_dir=tmp_path
    )
    lines = header_block(header).splitlines()
    row = next(i for i, line in enumerate(lines) if "bf16" in line)
    assert lines[row + 1] == " " * lines[row].index("bf16") + "exact"
