"""Every conversion of the command line, from bytes to bytes, and what each refuses."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from checkpoints_tools.manifest import MANIFEST, check_manifest
from megatron_rl.models import linear_plan, parameter_map
from megatron_rl.models.layout import same_bits
from megatron_rl.precision import resolve_flow
from megatron_rl.precision.wire import encode

# 128-aligned, so that fp8 quantises every linear; several shards, so that there is an index.
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 128}
SIZES |= {"ffn_hidden_size": 384, "vocab_size": 263, "dtype": torch.bfloat16}
FAMILIES = [
    ("llama", False),
    ("mistral", False),
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("mixtral", False),
    ("qwen3_moe", True),
]


@pytest.fixture
def model(tiny_model_dir):
    return tiny_model_dir("qwen3", **SIZES)


def run(capsys, *argv):
    code = cli.main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def done(capsys, *argv):
    code, out, err = run(capsys, *argv, *([] if argv[0] in ("inspect", "verify") else ["--quiet"]))
    assert (code, err) == (0, ""), out + err
    return out


def refused(capsys, *argv):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, ""), out + err
    assert err.startswith("checkpoints-tools: error: ") and err.count("\n") == 1, err
    return err


def same_tensors(first, second):
    a, b = HFReader(first), HFReader(second)
    return set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
def test_megatron_and_back_is_every_byte_and_every_file(
    capsys, tmp_path, tiny_model_dir, family, tie
):
    source = tiny_model_dir(family, tie_word_embeddings=tie, **SIZES)
    done(capsys, "import", source, tmp_path / "megatron", "--max-shard-size", "200KB")
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 2
    done(capsys, "export", tmp_path / "megatron", tmp_path / "hf", "--workers", "2")
    assert same_tensors(source, tmp_path / "hf")
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != MANIFEST:
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert check_manifest(tmp_path / "hf")
    assert "bit for bit" in done(capsys, "verify", source, tmp_path / "megatron")
    assert "bit for bit" in done(capsys, "roundtrip", source)


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
def test_quantised_is_what_weight_sync_would_send(capsys, tmp_path, tiny_model_dir, family, tie):
    source = tiny_model_dir(family, tie_word_embeddings=tie, **SIZES)
    out = done(capsys, "quantize", source, tmp_path / "fp8", "--max-shard-size", "300KB")
    assert "fp8: " in out
    flow, reader, fp8 = resolve_flow("fp8"), HFReader(source), HFReader(tmp_path / "fp8")
    plan = linear_plan(parameter_map(reader.config), flow)
    expected = dict(p for name in reader for p in encode(name, reader[name], flow, plan))
    assert set(fp8) == set(expected)
    assert all(same_bits(fp8[name], tensor) for name, tensor in expected.items())
    # Of each of 2 layers: q, k, v, o, and three of the feed-forward or of each of 4 experts.
    experts = 4 if family in ("mixtral", "qwen3_moe") else 1
    assert sum(name.endswith("_scale_inv") for name in fp8) == 2 * (4 + 3 * experts)
    quantization = fp8.config["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    routers = {
        "mixtral": [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)],
        "qwen3_moe": [f"model.layers.{i}.mlp.gate" for i in range(2)],
    }
    assert quantization["modules_to_not_convert"] == ["lm_head", *routers.get(family, [])]
    assert (tmp_path / "fp8" / "tokenizer.json").is_file()
    # The same bytes come from the Megatron checkpoint.
    done(capsys, "import", source, tmp_path / "megatron")
    to_vllm = ("export", tmp_path / "megatron", "--format", "vllm-fp8")
    done(capsys, *to_vllm, tmp_path / "exported")
    assert same_tensors(tmp_path / "fp8", tmp_path / "exported")
    done(capsys, "dequantize", tmp_path / "fp8", tmp_path / "values")
    # Quantising the values again keeps every value. (Not every byte: where rounding took a block's
    # largest code to 224, half the scale and twice the codes are the same values.)
    done(capsys, "quantize", tmp_path / "values", tmp_path / "again")
    done(capsys, "dequantize", tmp_path / "again", tmp_path / "values-again")
    assert same_tensors(tmp_path / "values", tmp_path / "values-again")
    name = "model.layers.1.self_attn.o_proj.weight"
    values = HFReader(tmp_path / "values")
    assert "quantization_config" not in values.config
    assert 0 < (values[name] - reader[name]).norm() < 0.04 * reader[name].norm()


def test_verify_tells_equal_different_and_damaged_apart(capsys, tmp_path, model, tiny_model_dir):
    done(capsys, "quantize", model, tmp_path / "fp8")
    code, out, _ = run(capsys, "verify", model, model, "--logits")
    assert code == 0 and "largest difference 0 nats" in out
    code, out, _ = run(capsys, "verify", model, tmp_path / "fp8", "--logits")
    assert code == 1 and "model.layers.0.mlp.gate_proj.weight: [384, 256] torch.bfloat16 and" in out
    assert "does not have it" in out and "largest difference" in out
    assert f"{tmp_path / 'fp8'}: checksums hold" in out
    other = tiny_model_dir("qwen3", **SIZES | {"seed": 1})
    code, out, _ = run(capsys, "verify", model, other)
    assert code == 1 and "relative distance" in out and "different: 25 of 25 tensors" in out
    file = tmp_path / "fp8" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert "its checksum differs" in refused(capsys, "verify", model, tmp_path / "fp8")


def test_a_single_flipped_bit_is_found(capsys, tmp_path, model):
    done(capsys, "import", model, tmp_path / "megatron")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.k_norm.weight"
    tensors[name].view(torch.int16)[3] ^= 1
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, copy / "model.safetensors")
    code, out, _ = run(capsys, "verify", copy, tmp_path / "megatron")
    assert code == 1
    assert out.splitlines()[0].startswith(f"{name}: 1 of 128 values differ")
    assert "different: 1 of 25 tensors" in out


def test_inspect_prints_a_table_or_json_of_any_format(capsys, tmp_path, model):
    done(capsys, "quantize", model, tmp_path / "fp8")
    done(capsys, "import", model, tmp_path / "megatron")
    for path in (model, tmp_path / "megatron"):
        found = json.loads(done(capsys, "inspect", path, "--json"))
        assert found["architecture"] == "Qwen3ForCausalLM" and found["flow"] == "unquantised"
        assert len(found["tensors"]) == 25 and found["dtypes"] == {"bfloat16": 25}
        assert found["bytes"] == 2 * found["parameters"]
    text = done(capsys, "inspect", tmp_path / "fp8", "--scales")
    assert "Qwen3ForCausalLM, 2 layers" in text and "fp8" in text
    (line,) = [x for x in text.splitlines() if "0.mlp.up_proj.weight_scale_inv" in x]
    assert "float32        3x2" in line and "powers of two" in line


@pytest.mark.parametrize("command", ["import", "quantize", "dequantize", "export"])
def test_a_dry_run_writes_nothing_and_a_taken_target_is_refused(capsys, tmp_path, model, command):
    source, target = model, tmp_path / "target"
    if command == "dequantize":
        source = tmp_path / "fp8"
        done(capsys, "quantize", model, source)
    if command == "export":
        source = tmp_path / "megatron"
        done(capsys, "import", model, source)
    out = done(capsys, command, source, target, "--dry-run")
    assert "nothing was written" in out and not target.exists()
    target.mkdir()
    (target / "mine").write_text("precious")
    message = refused(capsys, command, source, target, "--quiet")
    assert str(target) in message and "--overwrite" in message
    assert [file.name for file in target.iterdir()] == ["mine"]
    done(capsys, command, source, target, "--overwrite")
    assert not (target / "mine").exists() and (target / "config.json").is_file()
    assert not list(tmp_path.glob(".*")), "a temporary directory is left"


@pytest.mark.parametrize("command", ["import", "quantize", "roundtrip"])
def test_nothing_is_quantised_twice(capsys, tmp_path, model, command):
    done(capsys, "quantize", model, tmp_path / "fp8")
    target = [] if command == "roundtrip" else [tmp_path / "target"]
    message = refused(capsys, command, tmp_path / "fp8", *target, "--quiet")
    assert "quantised already" in message and "dequantize" in message
    assert not (tmp_path / "target").exists()


def test_blocks_that_tp_would_cut_are_refused_by_name_before_anything_is_written(
    capsys, tmp_path, model
):
    # 384 rows of the ffn are three blocks: two ranks would cut the second.
    for command in (("quantize", model), ("quantize", model, "--dry-run")):
        message = refused(capsys, *command, tmp_path / "fp8", "--tp", "2", "--quiet")
        assert "mlp" in message and "TP" in message and "128" in message
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("flow", ["bf16", "fp16", "mxfp8", "nonsense"])
def test_a_flow_without_block_fp8_is_refused(capsys, tmp_path, model, flow):
    message = refused(capsys, "quantize", model, tmp_path / "out", "--flow", flow)
    assert repr(flow) in message
    assert not (tmp_path / "out").exists()


def test_dtypes_are_converted_when_asked_and_lost_values_refused(capsys, tmp_path, model):
    done(capsys, "import", model, tmp_path / "fp32", "--dtype", "float32")
    done(capsys, "export", tmp_path / "fp32", tmp_path / "hf32")
    assert all(HFReader(tmp_path / "hf32").dtype(n) == torch.float32 for n in HFReader(model))
    assert HFReader(tmp_path / "hf32").config["torch_dtype"] == "float32"
    done(capsys, "export", tmp_path / "fp32", tmp_path / "hf", "--dtype", "bfloat16")
    assert same_tensors(tmp_path / "hf", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = 2.0**20
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, tmp_path / "large" / "model.safetensors")
    arguments = ("import", tmp_path / "large", tmp_path / "half", "--dtype", "float16", "--quiet")
    message = refused(capsys, *arguments)
    assert "model.norm.weight" in message and "1.04858e+06" in message and "bfloat16" in message
    assert not (tmp_path / "half").exists()


def test_hugging_face_to_fp8_and_back_imports_no_megatron(tmp_path, model):
    program = """
import sys
from checkpoints_tools.cli import main
model, work = sys.argv[1:]
assert main(["quantize", model, work + "/fp8", "--quiet"]) == 0
assert main(["dequantize", work + "/fp8", work + "/values", "--quiet"]) == 0
assert main(["inspect", work + "/fp8"]) == 0
assert main(["verify", work + "/values", work + "/values"]) == 0
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"megatron", "vllm", "transformers", "transformer_engine"}, loaded
"""
    command = [sys.executable, "-c", program, str(model), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
