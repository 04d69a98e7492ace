"""Damaged and foreign models: one sentence, exit code 2, and nothing that was half-written."""

import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from checkpoints_tools.hf_writer import write_planned
from checkpoints_tools.pieces import model_pieces

SIZES = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 128}
SIZES |= {"ffn_hidden_size": 384, "dtype": torch.bfloat16}
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path, tiny_model_dir):
    """A model in several shards, free to be damaged."""
    source = HFReader(tiny_model_dir("qwen2", **SIZES))
    write_planned(
        tmp_path / "model",
        hf_config=source.config,
        pieces=model_pieces(source),
        assets_from=source.asset_directory,
        max_shard_bytes=400_000,
    )
    return tmp_path / "model"


def refused(capsys, tmp_path, *argv):
    before = sorted(tmp_path.iterdir())
    code = cli.main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, ""), captured.err
    lines = [line for line in captured.err.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("checkpoints-tools: error: ")
    assert sorted(tmp_path.iterdir()) == before, "something is left"
    return lines[0]


def truncate(model):
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    return shard.name


def remove_shard(model):
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    return shard.name


def index_of_absent_tensor(model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.absent.weight"] = content["weight_map"][NAME]
    index.write_text(json.dumps(content))
    return "model.layers.7.absent.weight"


def _change(model, change):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / index["weight_map"][NAME]
    tensors = load_file(shard)
    tensors[NAME] = change(tensors[NAME])
    save_file(tensors, shard)


def other_shape(model):
    _change(model, lambda tensor: tensor[:-1].contiguous())
    return f"{NAME} with shape [383, 256]"


def integers(model):
    _change(model, lambda tensor: tensor.view(torch.int16))
    return NAME


def missing_tensor(model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = model / content["weight_map"].pop(NAME)
    tensors = load_file(shard)
    del tensors[NAME]
    save_file(tensors, shard)
    index.write_text(json.dumps(content))
    return NAME


def unknown_architecture(model):
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    config["model_type"] = "mamba"
    (model / "config.json").write_text(json.dumps(config))
    return "MambaForCausalLM"


def no_config(model):
    (model / "config.json").unlink()
    return "config.json"


def garbled_config(model):
    (model / "config.json").write_text("{")
    return "config.json"


DAMAGE = [
    truncate,
    remove_shard,
    index_of_absent_tensor,
    other_shape,
    integers,
    missing_tensor,
    unknown_architecture,
    no_config,
    garbled_config,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["import", "quantize"])
def test_a_damaged_model_is_refused(capsys, tmp_path, model, command, damage):
    named = damage(model)
    message = refused(capsys, tmp_path, command, model, tmp_path / "out", "--quiet")
    assert named in message, message


def test_values_that_are_not_finite_cannot_be_quantised(capsys, tmp_path, model):
    _change(model, lambda tensor: tensor.index_fill(0, torch.tensor([5]), torch.nan))
    message = refused(capsys, tmp_path, "quantize", model, tmp_path / "out", "--quiet")
    assert NAME in message and "not finite" in message


@pytest.mark.parametrize("command", ["import", "quantize", "export"])
def test_a_full_disk_is_noticed_before_anything_is_written(
    capsys, tmp_path, model, monkeypatch, command
):
    source = model
    if command == "export":
        source = tmp_path / "megatron"
        assert cli.main(["import", str(model), str(source), "--quiet"]) == 0
        capsys.readouterr()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    message = refused(capsys, tmp_path, command, source, tmp_path / "out", "--quiet")
    assert "100" in message and "kB" in message and str(tmp_path) in message


@pytest.mark.parametrize("command", ["import", "quantize"])
def test_a_disk_that_fills_up_leaves_nothing(capsys, tmp_path, model, monkeypatch, command):
    """The room was there at the start, and another program took it."""
    import os

    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    arguments = (command, model, tmp_path / "out", "--quiet", "--max-shard-size", "300KB")
    assert "No space left on device" in refused(capsys, tmp_path, *arguments)
    assert len(calls) >= 2


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_damaged_megatron_checkpoint_is_refused(capsys, tmp_path, model, name):
    megatron = tmp_path / "megatron"
    assert cli.main(["import", str(model), str(megatron), "--quiet"]) == 0
    capsys.readouterr()
    file = megatron / name
    file.write_bytes(file.read_bytes()[:-10])
    message = refused(capsys, tmp_path, "export", megatron, tmp_path / "out", "--quiet")
    assert name in message
    file.unlink()
    refused(capsys, tmp_path, "export", megatron, tmp_path / "out", "--quiet")


def test_what_is_no_model_is_refused(capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for command in ("import", "quantize", "dequantize", "export"):
        message = refused(capsys, tmp_path, command, empty, tmp_path / "out")
        assert str(empty) in message
        assert "absent" in refused(capsys, tmp_path, command, tmp_path / "absent", tmp_path / "out")
    assert str(empty) in refused(capsys, tmp_path, "inspect", empty)
