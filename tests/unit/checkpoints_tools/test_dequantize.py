"""FP8 checkpoints of other programs become values, and damaged scales are refused."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from checkpoints_tools import cli
from checkpoints_tools.dequantize import DequantizedSource
from checkpoints_tools.hf import HFReader
from megatron_rl.models.layout import same_bits

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.fixture
def source_model(tiny_model_dir):
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 128}
    return tiny_model_dir("llama", ffn_hidden_size=384, dtype=torch.bfloat16, **sizes)


def compressed(model_dir, folder, strategy, **options):
    """A checkpoint written by the compressed-tensors library, and its own decompression."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    weights = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight, scale = module.weight.data, module.weight_scale
        if strategy == "block":
            rows, columns = scale.shape
            blocks = torch.zeros(rows * 128, columns * 128, dtype=weight.dtype)
            blocks[: weight.shape[0], : weight.shape[1]] = weight
            blocks = blocks.reshape(rows, 128, columns, 128)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        elif strategy == "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        else:
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        scale.data.copy_(calculate_qparams(low, high, weights)[0])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("tensor", {}), ("channel", {}), ("block", {"block_structure": [128, 128]})],
)
def test_compressed_tensors_is_read_as_its_own_library_reads_it(
    tmp_path, source_model, strategy, options
):
    expected = compressed(source_model, tmp_path / "compressed", strategy, **options)
    arguments = ["dequantize", str(tmp_path / "compressed"), str(tmp_path / "values"), "--quiet"]
    assert cli.main(arguments) == 0
    source, values = HFReader(source_model), HFReader(tmp_path / "values")
    assert set(values) == set(source)
    assert "quantization_config" not in values.config
    for name in values:
        assert same_bits(values[name], expected[name]), name
    name = "model.layers.1.mlp.up_proj.weight"
    assert 0 < (values[name] - source[name]).norm() < 0.04 * source[name].norm()


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return HFReader(folder)


def weight(rows=192, columns=256):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator).mul(40).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (192,), (192, 1)])
def test_scales_per_tensor_and_per_row(tmp_path, shape):
    scale = torch.rand(shape) + 0.5
    source = DequantizedSource(
        write(tmp_path / "m", {"a.weight": weight(), "a.weight_scale": scale}, PER_TENSOR),
        torch.float32,
    )
    assert list(source) == ["a.weight"] and source.dtype("a.weight") == torch.float32
    expected = weight().float() * (scale.reshape(-1, 1) if scale.dim() else scale)
    assert torch.equal(source["a.weight"], expected)
    with pytest.raises(KeyError):
        source["a.weight_scale"]


def scales(rows=2, columns=2):
    return torch.tensor([[0.5, 2.0], [0.25, 1.0]])[:rows, :columns].contiguous()


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (scales().bfloat16(), "torch.bfloat16, expected torch.float32"),
        (scales(1), r"shape \[1, 2\].*expected \[2, 2\]"),
        (scales().T[:1].contiguous(), "expected"),
        (scales().index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(torch.nan)), "finite"),
        (scales() * 0, "above zero"),
        (-scales(), "above zero"),
        (None, "0 sets of scales"),
    ],
    ids=["bf16", "rows", "columns", "nan", "zero", "negative", "none"],
)
def test_wrong_block_scales_are_refused_and_nothing_is_left(tmp_path, capsys, scale, said):
    tensors = {"a.weight": weight()}
    if scale is not None:
        tensors["a.weight_scale_inv"] = scale
    write(tmp_path / "m", tensors, BLOCK)
    assert cli.main(["dequantize", str(tmp_path / "m"), str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a.weight" in error
    assert re.search(said, error)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"a.weight": weight().bfloat16()}, {}, "no FP8 weights"),
        (
            {"a.weight": weight(), "a.weight_scale_inv": scales(), "b.weight_scale_inv": scales()},
            BLOCK,
            "b.weight_scale_inv, but no FP8 weight",
        ),
        (
            {"a.weight": weight(), "a.weight_scale_inv": scales()},
            {"quant_method": "fp8"},
            "expected a weight_block_size",
        ),
        ({"a.weight": weight()}, {"quant_method": "awq"}, "'awq' is not read"),
        (
            {"a.weight": weight()},
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}},
            },
            "not integers or FP4",
        ),
    ],
    ids=["unquantised", "orphan", "no-block-size", "awq", "int4"],
)
def test_what_cannot_be_read_is_refused(tmp_path, tensors, config, said):
    reader = write(tmp_path / "m", tensors, config)
    with pytest.raises(ValueError, match=said):
        DequantizedSource(reader)


def test_scales_of_activations_are_left_out(tmp_path):
    tensors = {
        "a.weight": weight(),
        "a.weight_scale": torch.tensor(2.0),
        "a.input_scale": torch.tensor(3.0),
        "a.bias": torch.ones(192, dtype=torch.bfloat16),
    }
    source = DequantizedSource(write(tmp_path / "m", tensors, PER_TENSOR))
    assert set(source) == {"a.weight", "a.bias"} and len(source) == 2
    assert torch.equal(source["a.weight"], (weight().float() * 2).bfloat16())


def test_partial_blocks(tmp_path):
    codes, scale_inv = weight(192, 320), torch.rand(2, 3) + 0.5
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale_inv}
    values = DequantizedSource(write(tmp_path / "m", tensors, BLOCK))
    spread = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :320]
    assert same_bits(values["a.weight"], (codes.float() * spread).bfloat16())
