"""Bad input ends with one sentence and exit code 2; later failures keep what was written."""

import json
import resource

import pytest

from megatron_rl.metrics.gate import read_findings
from support.tiny_run import megatron_rl, metrics_of, refusal, train, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    return write_recipe(tmp_path_factory.mktemp("errors"), tiny_model_dir("llama"))


def refused(recipe, *overrides):
    return refusal("train", recipe, *overrides)


def test_bad_configuration_is_refused_at_once(recipe):
    assert "did you mean 'rollout.temperature'" in refused(recipe, "rollout.temprature=1")
    assert "groups of one" in refused(recipe, "rollout.n=1")
    assert "did you mean 'bf16'" in refused(recipe, "precision.flow=bf61")
    assert "cannot read the config file" in refused(recipe.with_name("absent.yaml"))
    assert "neither a Hugging Face directory" in refused(recipe, "model.path=nowhere")


def test_bad_data_is_refused_before_a_model_is_built(recipe, tmp_path):
    data = tmp_path / "rows.jsonl"
    override = f"data.train.0.path={data}"
    assert "does not exist" in refused(recipe, override)
    data.write_text("")
    assert "holds no rows" in refused(recipe, override)
    data.write_text(json.dumps({"prompt": "a"}) + "\n")
    assert "row 1 has no ground truth" in refused(recipe, override)
    data.write_text('{"prompt": "a", "answer": 1}\n{broken\n')
    assert "row 2 is not JSON" in refused(recipe, override)
    data.write_text(json.dumps({"prompt": "x" * 50, "answer": 1}) + "\n")
    message = refused(recipe, override)
    assert "50 tokens" in message and "overlong_prompts=drop" in message
    assert "no function 'absent'" in refused(
        recipe, f"reward.function={recipe.with_name('reward.py')}:absent"
    )
    assert "no option of TransformerConfig" in refused(recipe, "policy.megatron={num_layer: 3}")


def test_a_reward_that_raises_or_hangs_is_counted(recipe, tmp_path):
    function = tmp_path / "bad.py"
    function.write_text(
        "import time\n"
        "def compute_score(source, text, truth, extra=None):\n"
        "    if len(text) % 3 == 0:\n        raise KeyError('no such thing')\n"
        "    if len(text) % 3 == 1:\n        time.sleep(60)\n"
        "    return 0.5\n"
    )
    run = train(
        recipe,
        "name=bad_reward",
        f"reward.function={function}:compute_score",
        "reward.timeout_s=0.2",
        "trainer.total_steps=1",
        "trainer.save_final_checkpoint=false",
        "trainer.export_hf=false",
        "evaluation.at_start=false",
        "data.val=[]",
    )
    assert 0 < metrics_of(run)[1, "rollout/reward_failures"] <= 16


def test_divergence_ends_the_run_and_keeps_what_was_written(recipe):
    result = megatron_rl(
        "train",
        "--config",
        str(recipe),
        "name=diverges",
        "policy.optimizer.lr=1e38",
        "policy.optimizer.clip_grad=0",
        "trainer.total_steps=5",
        "evaluation.at_start=false",
        "data.val=[]",
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "NaN or Inf" in result.stderr or "is nan" in result.stderr or "is inf" in result.stderr
    assert "policy.optimizer.lr" in result.stderr
    run = recipe.parent / "runs" / "diverges"
    assert not list(run.glob("checkpoints/*")) and not (run / "hf").exists()


@pytest.mark.slow
def test_the_gate_stops_a_run_and_nothing_is_trained(recipe):
    result = megatron_rl(
        *("train", "--config", str(recipe), "name=gate", "precision.gate=stop"),
        *("precision.exact=false", "precision.gate_bound=0", "evaluation.at_start=false"),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and "over the bound of 0; nothing was trained" in lines[0], lines
    assert result.stdout.count(": token ") == 5
    run = recipe.parent / "runs" / "gate"
    (finding,) = read_findings(run)
    assert not finding.is_within and finding.mean > 0
    assert (run / "metrics.jsonl").read_text() == "" and not (run / "checkpoints").exists()


@pytest.mark.slow
def test_an_allowed_mismatch_is_in_every_header(recipe, tmp_path, tiny_model_dir):
    model = tiny_model_dir("llama", hidden_size=256, head_dim=128, ffn_hidden_size=384)
    result = megatron_rl(
        *("train", "--config", str(recipe), "name=mismatched", f"model.path={model}"),
        *("precision.flow=fp8_rollout", "precision.allow_mismatch=true", "trainer.total_steps=1"),
        *("trainer.save_final_checkpoint=false", "trainer.export_hf=false", "logging.report=true"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run = recipe.parent / "runs" / "mismatched"
    assert "MISMATCHED: the weight of the linear layers" in result.stdout
    for name in ("env.json", "report.html"):
        assert "MISMATCHED: the weight of the linear layers" in (run / name).read_text()
    (finding,) = read_findings(run)
    assert finding.is_within and 0 < finding.mean < finding.bound == 0.3


def test_a_full_disk_ends_the_run_and_keeps_what_was_written(recipe):
    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))

    result = megatron_rl(
        "train",
        "--config",
        str(recipe),
        "name=full_disk",
        "trainer.save_interval_steps=2",
        preexec_fn=limit_file_size,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "megatron-rl: the run failed" in result.stderr and "Make room" in result.stderr
    assert "Traceback" not in result.stderr
    run = recipe.parent / "runs" / "full_disk"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert not list(run.glob("checkpoints/*/manifest.json"))


def test_a_model_with_experts_is_refused_before_it_is_built(tmp_path, tiny_model_dir):
    recipe = write_recipe(tmp_path, tiny_model_dir("qwen3_moe"))
    result = megatron_rl("train", "--config", str(recipe))
    assert result.returncode == 2, result.stderr
    assert (
        "Qwen3MoeForCausalLM, and training models with experts is not implemented" in result.stderr
    )


def test_an_output_directory_that_cannot_be_made_is_one_sentence(recipe):
    result = megatron_rl("train", "--config", str(recipe), "output_dir=/dev/null/runs")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-rl: the run failed: "), result.stderr
    assert "/dev/null/runs" in lines[0]
