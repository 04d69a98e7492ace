"""Checkpoints with a file a rank: values and FP8 codes come out as they went in, or not at all."""

import os

import pytest
import torch

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from megatron_rl.models import linear_plan, parameter_map
from megatron_rl.models.layout import same_bits
from megatron_rl.precision import resolve_flow
from megatron_rl.precision.wire import encode
from support.rank_files import block_tensor, scaled_tensor, te_modules, write_ranks

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 128}
SIZES |= {"ffn_hidden_size": 512, "vocab_size": 263, "dtype": torch.bfloat16}
FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"]


def export(source, target, model, *options):
    arguments = ["export", source, target, "--hf-config", model, "--quiet", *options]
    return cli.main([str(argument) for argument in arguments])


def refused(capsys, source, target, model, *options):
    assert export(source, target, model, *options) == 2
    assert not target.exists()
    error = capsys.readouterr().err
    assert error.startswith("checkpoints-tools: error: ") and error.count("\n") == 1, error
    return error


def quantise(te, make=block_tensor, **options):
    """Every linear layer of the decoder but the routers as `make` stores it."""

    def convert(entry, shard, rank):
        linear = entry.layer is not None and shard.ndim == 2 and "router" not in entry.megatron_name
        return make(te, shard, **options) if linear else shard

    return convert


def model_of(tiny_model_dir, family, **changes):
    sizes = SIZES | changes
    if family == "qwen2":  # it has no head_dim of its own
        sizes |= {"num_attention_heads": 2}
    return tiny_model_dir(family, **sizes)


def served(model):
    """What weight sync would send."""
    reader, flow = HFReader(model), resolve_flow("fp8")
    plan = linear_plan(parameter_map(reader.config), flow)
    return dict(pair for name in reader for pair in encode(name, reader[name], flow, plan))


def assert_holds(path, expected):
    reader = HFReader(path)
    assert set(reader) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(reader[name], tensor), name


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_come_back_from_any_layout(tmp_path, tiny_model_dir, family, tp, pp):
    tied = family == "qwen3"
    model = tiny_model_dir(family, tie_word_embeddings=tied, head_dim=32, dtype=torch.bfloat16)
    source = write_ranks(model, tmp_path / "ranks", tp=tp, pp=pp)
    assert export(source, tmp_path / "hf", model) == 0
    reader = HFReader(model)
    assert_holds(tmp_path / "hf", {name: reader[name] for name in reader})


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_and_scales_are_kept_byte_for_byte(tmp_path, tiny_model_dir, family, tp):
    model = model_of(tiny_model_dir, family)
    tp = 1 if family == "qwen2" else tp  # one query group
    with te_modules(old=tp == 2) as te:
        source = write_ranks(model, tmp_path / "ranks", tp=tp, pp=2, convert=quantise(te))
    assert export(source, tmp_path / "fp8", model, "--format", "vllm-fp8") == 0
    assert_holds(tmp_path / "fp8", served(model))
    quantised = tmp_path / "quantised"
    assert cli.main(["quantize", str(model), str(quantised), "--quiet"]) == 0
    assert HFReader(tmp_path / "fp8").config == HFReader(quantised).config
    # The values are what the codes stand for.
    assert export(source, tmp_path / "values", model) == 0
    values = tmp_path / "of-codes"
    assert cli.main(["dequantize", str(tmp_path / "fp8"), str(values), "--quiet"]) == 0
    reader = HFReader(values)
    assert_holds(tmp_path / "values", {name: reader[name] for name in reader})


def test_a_tensor_that_kept_only_its_transposed_codes(tmp_path, tiny_model_dir):
    model = model_of(tiny_model_dir, "llama")
    with te_modules() as te:
        convert = quantise(te, columnwise_only=True)
        source = write_ranks(model, tmp_path / "ranks", tp=2, convert=convert)
    assert export(source, tmp_path / "fp8", model, "--format", "vllm-fp8") == 0
    assert_holds(tmp_path / "fp8", served(model))


def test_blocks_that_cross_a_boundary_are_refused_unless_requantised(
    capsys, tmp_path, tiny_model_dir
):
    # 384 / 2 = 192 rows of gate and of up on a rank: one block holds rows of both.
    model = model_of(tiny_model_dir, "llama", ffn_hidden_size=384)
    with te_modules() as te:
        source = write_ranks(model, tmp_path / "ranks", tp=2, convert=quantise(te))
    error = refused(capsys, source, tmp_path / "fp8", model, "--format", "vllm-fp8")
    assert "decoder.layers.0.mlp.linear_fc1 [768 x 256] cannot be cut in blocks" in error
    assert "at training TP 2" in error and "--requantize" in error
    assert export(source, tmp_path / "values", model) == 0
    options = ("--format", "vllm-fp8", "--requantize")
    assert export(source, tmp_path / "fp8", model, *options) == 0
    assert_holds(tmp_path / "fp8", served(tmp_path / "values"))


def test_blocks_must_allow_the_tp_that_will_serve_them(capsys, tmp_path, tiny_model_dir):
    model = model_of(tiny_model_dir, "llama", ffn_hidden_size=384)
    with te_modules() as te:
        source = write_ranks(model, tmp_path / "ranks", convert=quantise(te))
    options = ("--format", "vllm-fp8", "--tp", "2")
    assert "at rollout TP 2" in refused(capsys, source, tmp_path / "fp8", model, *options)


def test_one_scale_a_tensor_is_kept_and_two_are_refused(capsys, tmp_path, tiny_model_dir):
    model = model_of(tiny_model_dir, "llama")

    def scaled(te, scale_of_rank):
        def convert(entry, shard, rank):
            return quantise(te, scaled_tensor, scale_inv=scale_of_rank[rank])(entry, shard, rank)

        return convert

    with te_modules() as te:
        same = write_ranks(model, tmp_path / "same", tp=2, convert=scaled(te, (0.001, 0.001)))
        differ = write_ranks(model, tmp_path / "differ", tp=2, convert=scaled(te, (0.001, 0.002)))
    assert export(same, tmp_path / "fp8", model, "--format", "vllm-fp8") == 0
    reader, original = HFReader(tmp_path / "fp8"), HFReader(model)
    assert "weight_block_size" not in reader.config["quantization_config"]
    for name in original:
        if not name.endswith("_proj.weight"):
            assert same_bits(reader[name], original[name])
            continue
        codes = (original[name].float() / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same_bits(reader[name], codes), name
        assert same_bits(reader[f"{name}_scale"], torch.tensor(0.001)), name
    error = refused(capsys, differ, tmp_path / "no", model, "--format", "vllm-fp8")
    assert "another scale on each of its 2 tensor-parallel ranks (0.001, 0.002)" in error
    options = ("--format", "vllm-fp8", "--requantize")
    assert export(differ, tmp_path / "anew", model, *options) == 0
    assert export(differ, tmp_path / "values", model) == 0
    assert_holds(tmp_path / "anew", served(tmp_path / "values"))


def test_experts_of_a_layer_must_be_alike(capsys, tmp_path, tiny_model_dir):
    model = model_of(tiny_model_dir, "mixtral")
    with te_modules() as te:
        all_of_them = quantise(te)

        def all_but_one(entry, shard, rank):
            is_one = entry.megatron_name.endswith("1.mlp.experts.local_experts.2.linear_fc1.weight")
            return shard if is_one else all_of_them(entry, shard, rank)

        source = write_ranks(model, tmp_path / "ranks", convert=all_but_one)
    error = refused(capsys, source, tmp_path / "fp8", model, "--format", "vllm-fp8")
    assert "local_experts.2.linear_fc1 unquantised beside experts in FP8" in error


def test_inspect_shows_the_codes(capsys, tmp_path, tiny_model_dir):
    model = model_of(tiny_model_dir, "llama")
    with te_modules() as te:
        source = write_ranks(model, tmp_path / "ranks", tp=2, convert=quantise(te))
    command = ["inspect", str(source), "--hf-config", str(model), "--scales"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "float8_e4m3fn" in out and "powers of two" in out


class Evil:
    """Runs a command where it is unpickled by the book."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_that_a_file_names_is_run(tmp_path, tiny_model_dir):
    model = tiny_model_dir("llama", head_dim=32)
    ran = tmp_path / "ran"
    extra = {"optimizer": [Evil(ran)], "rng_state": {"a": (Evil(ran), {1, 2}, slice(3))}}
    source = write_ranks(model, tmp_path / "ranks", **extra)
    torch.load(source / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert ran.exists(), "the file is harmless, and shows nothing"
    ran.unlink()
    assert export(source, tmp_path / "hf", model) == 0
    assert not ran.exists()


def test_what_is_missing_or_of_another_kind_is_named(capsys, tmp_path, tiny_model_dir):
    model = tiny_model_dir("llama", head_dim=32)
    source = write_ranks(model, tmp_path / "ranks", tp=2, pp=2)
    step = source / "iter_0000005"

    def error():
        return refused(capsys, source, tmp_path / "hf", model)

    file = step / "mp_rank_01_001" / "model_optim_rng.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-5000])
    assert "is damaged or was not written to its end" in error()
    torch.save({"model0": {}, "model1": {}}, file)
    assert "several model chunks (virtual pipeline stages)" in error()
    file.write_bytes(content)
    moved = step / "mp_rank_00_000_001"
    file.parent.rename(moved)
    assert "expert parallelism" in error()
    moved.rename(tmp_path / "aside")
    assert "none of rank 1, stage 1" in error()
    for name in ("mp_rank_00_001", "mp_rank_01_000"):
        (step / name).rename(tmp_path / name)
    assert "tensor_model_parallel_size 2, but the files that are there are of 1" in error()
    other = tiny_model_dir("llama", head_dim=32, ffn_hidden_size=256)
    for name in ("mp_rank_00_001", "mp_rank_01_000"):
        (tmp_path / name).rename(step / name)
    (tmp_path / "aside").rename(step / "mp_rank_01_001")
    assert export(source, tmp_path / "hf", model) == 0
    assert "they are not of one model" in refused(capsys, source, tmp_path / "no", other)
