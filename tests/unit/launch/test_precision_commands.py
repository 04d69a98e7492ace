"""`megatron-rl precision ...`, and what is refused before an engine is imported."""

import json
import os

import pytest

from megatron_rl.config import load_config
from megatron_rl.launch.cli import main
from megatron_rl.trainer.flow_status import flow_status, gate_bound
from support.tiny_run import megatron_rl, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir("llama", hidden_size=256, head_dim=128, ffn_hidden_size=384)
    return write_recipe(tmp_path_factory.mktemp("precision"), model)


def printed(capsys, *arguments, code=0):
    assert main([*map(str, arguments)]) == code
    found = capsys.readouterr()
    return found.out if code == 0 else found.out + found.err


def refused(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-rl: error: ")
    return lines[0]


def test_show_prints_roles_and_the_graph_of_a_flow_or_a_recipe(recipe, capsys):
    by_name = printed(capsys, "precision", "show", "bf16")
    assert by_name == printed(capsys, "precision", "show", "--config", recipe)
    assert by_name == printed(capsys, "precision", "show")
    for text in ("master_weight", "training forward:", "training backward:", "rollout:"):
        assert text in by_name
    assert "not both" in refused(capsys, "precision", "show", "fp8", "--config", recipe)


def test_diff_names_the_roles_that_differ(recipe, capsys):
    lines = printed(capsys, "precision", "diff", "bf16", "fp8").splitlines()
    assert [line.split()[0] for line in lines] == [
        "linear_weight",
        "linear_input",
        "output_gradient",
    ]
    assert all("bf16  ->  e4m3" in line for line in lines)
    assert printed(capsys, "precision", "diff", recipe, "bf16") == "no role differs\n"
    assert "did you mean 'fp8'" in refused(capsys, "precision", "diff", "bf16", "fp9")


def test_check_says_contained_or_lists_every_violation(recipe, capsys):
    check = ("precision", "check", "--config", recipe)
    assert printed(capsys, *check).endswith("contained\n")
    text = printed(capsys, *check, "precision.flow=fp8")
    assert "quantised: 8 of 8 linear layers" in text and text.endswith("contained\n")
    text = printed(capsys, *check, "precision.flow=fp8_rollout", code=2)
    assert text.count("format: the ") == 2 and "contained" not in text
    tp = "policy.tensor_model_parallel_size=2"
    text = printed(capsys, *check, "precision.flow=fp8", tp, code=2)
    assert "partition: decoder.layers.0.mlp.linear_fc1 [768 x 256]" in text
    assert printed(capsys, *check, tp).endswith("contained\n")


def test_mismatched_formats_are_refused_at_once_unless_allowed(recipe, capsys):
    for command in ("train", "sft"):
        path = recipe if command == "train" else sft_recipe(recipe)
        run = (command, "--config", path, "precision.flow=fp8_rollout")
        message = refused(capsys, *run)
        assert "is e4m3 128x128 pow2 in rollout and bf16 in training" in message
        assert "precision.allow_mismatch=true" in message
        allowed = (*run[:3], "--dry-run", run[3], "precision.allow_mismatch=true")
        assert "# flow: fp8_rollout" in printed(capsys, *allowed)
        assert "MX formats" in refused(
            capsys, *run[:3], "precision.flow=mxfp8", "precision.allow_mismatch=true"
        )


def sft_recipe(recipe):
    tree = load_config(recipe)
    path = recipe.with_name("sft.yaml")
    source = {"name": "a", "kind": "file", "path": tree.data.train[0].path}
    path.write_text(json.dumps({"model": {"path": tree.model.path}, "data": {"train": [source]}}))
    return path


def test_a_layer_that_cannot_be_cut_is_refused_before_an_engine_is_imported(recipe, tmp_path):
    for name in ("vllm", "megatron"):
        (tmp_path / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = megatron_rl(
        *("train", "--config", recipe, "precision.flow=fp8", "precision.allow_mismatch=true"),
        "policy.tensor_model_parallel_size=2",
        env=os.environ | {"PYTHONPATH": path},
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and "training TP 2" in lines[0] and "that work" in lines[0], lines


def status(recipe, *overrides):
    from megatron_rl.models import model_spec
    from megatron_rl.precision import flow_of

    config = load_config(recipe, overrides)
    hf_config = json.loads(open(f"{config.model.path}/config.json").read())
    return config, flow_status(config, flow_of(config.precision), model_spec(hf_config))


def test_every_header_says_what_the_flow_promises(recipe, monkeypatch):
    from megatron_rl.trainer import flow_status as module

    monkeypatch.setattr(module, "cpu_isa", lambda: "avx512_bf16")
    config, found = status(recipe)
    statement = "exactly on-policy: log-probs are reproduced bit for bit"
    assert found.header().splitlines() == [found.flow.short_str(), statement]
    assert found.environment()["flow_exactness"] == statement
    assert "flow_mismatch" not in found.environment()
    assert gate_bound(config, found.flow) == 0

    config, found = status(recipe, "precision.flow=fp8_rollout", "precision.allow_mismatch=true")
    assert found.header().startswith("MISMATCHED: the weight of the linear layers is e4m3")
    assert found.environment()["flow_mismatch"] == found.header().splitlines()[0]
    assert found.header().splitlines()[-1].startswith("not claimed: rollout computes")
    assert "8 of 8 linear layers" in found.environment()["flow_quantised"]
    assert gate_bound(config, found.flow) == 0.3
    config, found = status(recipe, "precision.gate_bound=0.05")
    assert gate_bound(config, found.flow) == 0.05

    monkeypatch.setattr(module, "cpu_isa", lambda: "amx")
    config, found = status(recipe)
    assert "not claimed: the kernels of this processor (amx)" in found.header()
    assert gate_bound(config, found.flow) == 0.1


def test_the_processor_is_named_by_its_widest_instructions(monkeypatch):
    import torch

    from megatron_rl.platforms import cpu_isa

    for capabilities, name in (
        ({"amx_tile": True, "avx512_bf16": True, "avx512_f": True, "avx2": True}, "amx"),
        ({"amx_tile": False, "avx512_bf16": True, "avx512_f": True}, "avx512_bf16"),
        ({"avx512_f": True, "avx2": True}, "avx512"),
        ({"avx2": True}, "avx2"),
        ({"architecture": "aarch64"}, "aarch64"),
        ({}, "unknown"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert cpu_isa() == name
