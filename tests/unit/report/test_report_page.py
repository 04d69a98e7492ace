import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import (
    MetricsWriter,
    RunWriteError,
    evaluation_path,
    read_metrics,
    read_rollouts,
    rollouts_path,
)
from megatron_rl.metrics.gate import GateFinding, TokenDifference, append_finding
from megatron_rl.report import build_comparison, build_report
from megatron_rl.report.comparison import COMPARISON_CHARTS
from megatron_rl.report.load import load_run

PLOTS = {"reward", "accuracy", "mismatch", "timing", "loss", "lengths"}
VOID = {"meta", "br", "img", "link", "hr"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Checks nesting, and collects what a page holds."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} has the handler {name}"
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                self.links.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page_of(run_dir):
    return Page(build_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def html(finished_run):
    return (finished_run / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def words(html):
    return Page(html).words


STOPPED = {"steps": 7, "planned_steps": 20, "mismatch": 2e-3}
NOTHING = {"steps": 0, "planned_steps": 20, "evaluations": False}
RUNS = {
    "complete": {},
    "stopped": STOPPED,
    "one-step": {"steps": 1, "planned_steps": 20, "evaluations": False},
    "evaluated-only": {"steps": 0, "planned_steps": 20},
    "nothing": NOTHING,
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_every_run_gets_a_sound_page_and_all_plots(reported_run, options):
    run_dir = reported_run(**options)
    page = Page((run_dir / "report.html").read_text())
    assert {path.stem for path in (run_dir / "plots").iterdir()} == PLOTS
    for path in (run_dir / "plots").iterdir():
        assert path.read_bytes().startswith(PNG_SIGNATURE)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    # Self-contained: every reference stays within the page.
    assert {link for link in page.links if not link.startswith("#")} == set()
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_the_page_fetches_nothing_and_knows_light_and_dark(html):
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", html)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    # Plots take every colour from the variables that both modes define.
    used = set(re.findall(r"var\((--plot-[a-z]+)\)", html))
    light, dark = html.split("@media (prefers-color-scheme: dark)", 1)
    for name in used:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark.split("}", 1)[0]
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        assert not re.search(r"(fill|stroke): #(?!fff)", svg)
        assert "#fe0" not in svg


def test_prompts_and_answers_are_text_never_markup(html):
    assert "<script" not in html
    assert "&lt;script&gt;alert(" in html
    assert "<b>1</b>" not in html
    assert "20 <b>" not in html


def test_hostile_names_and_texts_everywhere_are_escaped(fabricate_run):
    run_dir = fabricate_run(steps=2)
    bad = "<script>alert(1)</script>\"'&"
    environment = json.loads((run_dir / "env.json").read_text())
    environment |= {"flow": bad, "flow_summary": bad, "command": [bad], bad: {bad: bad}}
    (run_dir / "env.json").write_text(json.dumps(environment))
    config = (run_dir / "config.yaml").read_text()
    quoted = json.dumps(bad)
    config = config.replace("path: smollm2-135m-instruct", f"path: {quoted}")
    (run_dir / "config.yaml").write_text(config.replace("name: quickstart", f"name: {quoted}"))
    with MetricsWriter(run_dir, LoggingConfig(), resume_step=2) as writer:
        writer.log(2, {f"val-core/{bad}/acc/mean": 1.0, f"val-core/{bad}/reward/mean": 1.0})
    page = page_of(run_dir)
    assert "script" not in page.tags
    assert page.words.count(bad) >= 6
    assert (
        "script"
        not in Page(build_comparison([run_dir, run_dir], run_dir / "c.html").read_text()).tags
    )


def test_headline_numbers_are_the_runs(finished_run, words):
    key = "val-core/chain_sum/acc/mean"
    values = [line.metrics[key] for line in read_metrics(finished_run) if key in line.metrics]
    first, last = values[0], values[-1]
    assert f"{100 * first:.1f}% → {100 * last:.1f}%" in words
    assert f"{100 * (last - first):+.1f} points" in words
    assert "Complete: 20 steps" in words
    assert "20 of 20" in words
    assert "smollm2-135m-instruct" in words
    assert "bf16: BF16 training with FP32 master weights, BF16 rollout" in words
    assert "Exactly equal log-probs 100% of all sampled tokens" in words
    assert "incomplete" not in words


def test_the_mismatch_of_a_run_is_shown(reported_run):
    run_dir = reported_run(**STOPPED)
    means = [
        line.metrics["rollout_corr/logp_diff_abs_mean"]
        for line in read_metrics(run_dir)
        if "rollout_corr/logp_diff_abs_mean" in line.metrics
    ]
    words = Page((run_dir / "report.html").read_text()).words
    assert f"{sum(means) / len(means):.5f} nats" in words
    assert "computed twice" in words


def test_a_mismatched_run_and_what_the_gate_found_are_on_the_page(fabricate_run):
    run = fabricate_run(steps=2, evaluations=False)
    environment = json.loads((run / "env.json").read_text())
    environment["flow_mismatch"] = "MISMATCHED: the weight is e4m3 in rollout"
    environment["flow_exactness"] = "not claimed: rollout computes otherwise"
    (run / "env.json").write_text(json.dumps(environment))
    token = TokenDifference(
        step=1,
        prompt_index=2,
        sample_index=3,
        position=4,
        token_id=5,
        text="<b>",
        train_logprob=-1.5,
        rollout_logprob=-1.0,
    )
    finding = GateFinding(
        step=1, is_first=True, mean=0.5, max=0.5, bound=0.1, is_within=False, worst=(token,)
    )
    append_finding(run, finding)
    text = " ".join(page_of(run).text)
    assert "Rollout and training differ." in text and "MISMATCHED: the weight" in text
    assert "not claimed: rollout computes otherwise" in text
    assert text.count("mean |dlogp| 0.500") == 2  # in the notice, and beside the mismatch
    assert "prompt 2, sample 3, position 4: token 5 '<b>' has log-prob -1 in rollout" in text


def test_answers_are_counted_by_what_became_of_them(finished_run, words):
    before, after = (read_rollouts(evaluation_path(finished_run, step)) for step in (0, 20))
    for old, new, label in (
        (1.0, 1.0, "right before and after"),
        (0.0, 1.0, "became right"),
        (1.0, 0.0, "became wrong"),
        (0.0, 0.0, "wrong before and after"),
    ):
        count = sum(
            (a.accuracy, b.accuracy) == (old, new) for a, b in zip(before, after, strict=True)
        )
        assert f"{count} {label}" in words


def test_samples_of_first_middle_and_last_step_are_shown(finished_run, words):
    for label in ("First step (1)", "Middle step (11)", "Last step (20)"):
        assert label in words
    shown = re.findall(r"advantage (-?[\d.]+)", words)
    recorded = [
        row.advantage
        for step in (1, 11, 20)
        for row in read_rollouts(rollouts_path(finished_run, step))
    ]
    assert [float(advantage) for advantage in shown] == pytest.approx(recorded, abs=6e-4)


@pytest.mark.parametrize(("steps", "rows"), [(3, 3), (600, 500)])
def test_the_table_has_every_step_up_to_a_limit(tmp_path, steps, rows):
    with MetricsWriter(tmp_path, LoggingConfig(), resume_step=None) as writer:
        for step in range(1, steps + 1):
            writer.log(step, {"critic/rewards/mean": step / 7})
    html = build_report(tmp_path).read_text()
    body = html[html.index('<section id="steps">') :]
    shown = [int(step) for step in re.findall(r'<tr><th class="num" scope="row">(\d+)</th>', body)]
    assert len(shown) == rows
    assert (shown[0], shown[-1]) == (1, steps)
    assert ("500 of 600 (evenly spaced)" in body) == (steps == 600)


def test_an_unfinished_run_says_what_it_lacks(reported_run):
    stopped, nothing = (
        Page((reported_run(**options) / "report.html").read_text()).words
        for options in (STOPPED, NOTHING)
    )
    assert "Partial: 7 of 20 steps" in stopped
    assert "before training only" in stopped
    assert "not recorded both before and after" in stopped
    assert "No training step recorded yet (0 of 20)" in nothing
    assert "No held-out evaluation was recorded" in nothing
    assert nothing.count("No data recorded") == len(PLOTS)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe: [", b"- 1", None])
@pytest.mark.parametrize("name", ["config.yaml", "env.json"])
def test_a_damaged_file_costs_only_what_it_held(fabricate_run, name, damage):
    run_dir = fabricate_run(steps=2)
    whole = load_run(run_dir)
    (run_dir / name).unlink()
    if damage is not None:
        (run_dir / name).write_bytes(damage)
    run = load_run(run_dir)
    (problem,) = run.problems
    assert problem.startswith(f"{name} is missing or damaged")
    assert run.lines == whole.lines
    kept = "environment" if name == "config.yaml" else "config"
    assert getattr(run, kept) == getattr(whole, kept)


def test_a_page_without_configuration_and_environment(fabricate_run):
    run_dir = fabricate_run(steps=2)
    for name in ("config.yaml", "env.json"):
        (run_dir / name).unlink()
    words = page_of(run_dir).words
    assert "config.yaml is missing or damaged" in words
    assert "env.json is missing or damaged" in words
    assert "2 steps recorded; the planned number is unknown" in words
    assert "9.4%" in words


def test_damaged_rollouts_and_values_that_are_no_number(fabricate_run):
    run_dir = fabricate_run(steps=3)
    for path in (run_dir / "rollouts").iterdir():
        path.write_bytes(path.read_bytes()[:-40] + b"\xff")
    keys = {key for line in read_metrics(run_dir) for key in line.metrics}
    with MetricsWriter(run_dir, LoggingConfig(), resume_step=3) as writer:
        for step, value in enumerate((math.nan, math.inf, -1e300), start=4):
            writer.log(step, dict.fromkeys(keys, value))
    words = page_of(run_dir).words
    for shown in ("nan", "inf", "-1.00e+300"):
        assert shown in words


def test_building_again_changes_nothing(finished_run):
    def files():
        paths = [finished_run / "report.html", *(finished_run / "plots").iterdir()]
        return {path.name: path.read_bytes() for path in paths}

    first, settings = files(), dict(matplotlib.rcParams)
    build_report(finished_run)
    assert files() == first
    assert dict(matplotlib.rcParams) == settings


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match="is no directory; give the directory of a run"):
        build_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="neither config.yaml nor metrics.jsonl"):
        build_report(tmp_path)


def test_a_place_that_cannot_be_written_is_a_clear_error(fabricate_run):
    run_dir = fabricate_run(steps=1)
    (run_dir / "plots").write_text("")
    with pytest.raises(RunWriteError, match="cannot write .*png"):
        build_report(run_dir)


def test_a_report_needs_neither_pyplot_nor_torch(fabricate_run):
    code = (
        "import sys; from pathlib import Path; from megatron_rl.report import build_report\n"
        f"build_report(Path({str(fabricate_run(steps=1))!r}))\n"
        "print(sorted({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


def test_a_comparison_has_a_row_and_a_curve_for_each_run(fabricate_run, tmp_path):
    runs = [
        fabricate_run("one", seed=1),
        fabricate_run("two", seed=2, mismatch=1e-3, steps=5, planned_steps=20),
        fabricate_run("none", steps=0, planned_steps=9, evaluations=False),
    ]
    out = build_comparison(runs, tmp_path / "comparison.html")
    html = out.read_text()
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    for words in ("one Complete: 20 steps", "two Partial: 5 of 20 steps", "none No training step"):
        assert words in page.words
    reward = re.search(r'<svg[^>]*aria-label="Mean reward.*?</svg>', html, flags=re.DOTALL)[0]
    legend = re.findall(r">(one|two|none)</text>", reward)
    assert legend == ["one", "two"]
    pngs = {file.stem: file.read_bytes() for file in (tmp_path / "comparison.plots").iterdir()}
    assert set(pngs) == {chart.name for chart in COMPARISON_CHARTS}
    assert all(png.startswith(b"\x89PNG") for png in pngs.values())


def test_runs_of_one_name_are_told_apart(fabricate_run, tmp_path):
    runs = [fabricate_run(f"{folder}/same", steps=1) for folder in ("a", "b")]
    words = Page(build_comparison(runs, tmp_path / "c.html").read_text()).words
    for run in runs:
        assert f"same ({run})" in words


@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_comparison_of_too_few_or_many_is_refused(tmp_path, count):
    with pytest.raises(ValueError, match=f"2 to 8 run directories, not {count}"):
        build_comparison([tmp_path] * count, tmp_path / "c.html")
