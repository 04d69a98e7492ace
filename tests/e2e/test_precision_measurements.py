"""`megatron-rl precision compare` and `attribute` on a tiny model, through the command line."""

import pytest

from support.tiny_run import megatron_rl, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir(
        "qwen3", hidden_size=256, num_attention_heads=2, head_dim=128, ffn_hidden_size=512
    )
    changes = {"trainer.total_steps": 2, "evaluation.num_samples": 0}
    return write_recipe(tmp_path_factory.mktemp("measurements"), model, **changes)


def table(text):
    """Rows of the (one) markdown table in a text, as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_compare_trains_each_flow_and_ranks_their_mismatch(recipe, tmp_path):
    output = tmp_path / "compare"
    command = ("precision", "compare", "--config", recipe, "--output", output)
    result = megatron_rl(*command, "--flows", "bf16,bf16:plain,fp8_rollout", timeout_s=400)
    assert result.returncode == 0, result.stdout + result.stderr
    head, _, *rows = table(result.stdout[result.stdout.index("| flow") :])
    assert [row[0] for row in rows] == ["bf16", "bf16:plain", "fp8_rollout"]
    mean = {row[0]: float(row[head.index("mean abs dlogp")]) for row in rows}
    assert mean["bf16"] == 0.0 < mean["bf16:plain"] < mean["fp8_rollout"]
    assert rows[0][head.index("tokens equal")] == "100.0%"
    assert (output / "comparison.html").is_file()
    assert (output / "table.md").read_text().startswith("| flow")
    again = megatron_rl(*command, "--flows", "bf16")
    assert again.returncode == 2 and "choose another --output" in again.stderr


def test_a_comparison_of_an_unknown_flow_is_refused(recipe, tmp_path):
    command = ("precision", "compare", "--config", recipe, "--output", tmp_path / "none")
    result = megatron_rl(*command, "--flows", "bf16,fp9")
    assert result.returncode == 2 and "did you mean 'fp8'" in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_attribution_shows_which_operators_count(recipe):
    result = megatron_rl("precision", "attribute", "--config", recipe, "--prompts", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    _, _, *rows = table(result.stdout)
    mean = {row[0]: float(row[1]) for row in rows}
    assert mean["all shared"] == 0.0
    # vLLM may compute RoPE with torch by itself; norm and attention it never does as the trainer.
    differing = {label: value for label, value in mean.items() if "rope" not in label}
    del differing["all shared"]
    assert len(mean) == 8 and len(differing) == 5 and min(differing.values()) > 0.0
    assert mean["only rope"] > 0.0
