"""Tiny models: complete, reproducible, loadable by transformers, with a lossless tokenizer."""

import pytest
import torch

from checkpoints_tools.hf import HFReader
from checkpoints_tools.tiny import BYTE_VOCAB_SIZE, EOS_ID, PAD_ID, write_tiny_model
from megatron_rl.models import families, model_spec, parameter_map
from megatron_rl.models.layout import same_bits

FAMILIES = [family.name for family in families()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_is_complete_and_not_trivial(tmp_path, family, tied):
    reader = HFReader(write_tiny_model(tmp_path / "m", family, tie_word_embeddings=tied))
    mapping = parameter_map(reader.config)
    mapping.check_hf_keys(reader)
    assert mapping.spec.family == family and mapping.spec.tie_word_embeddings == tied
    assert model_spec(reader.config, generation_config=reader.generation_config).eos_token_ids == (
        EOS_ID,
    )
    assert sum(reader[name].numel() for name in reader) < 1_000_000
    for name, shape in mapping.hf_shapes.items():
        value = reader[name]
        assert tuple(value.shape) == shape and value.isfinite().all()
        assert value.unique().numel() > 1
        if value.ndim == 2:
            assert value.std().item() == pytest.approx(0.05, rel=0.1)


def test_same_seed_same_bytes(tmp_path):
    def weights(path, **options):
        return (write_tiny_model(path, "qwen3", **options) / "model.safetensors").read_bytes()

    first = weights(tmp_path / "a", seed=1)
    assert first == weights(tmp_path / "b", seed=1)
    assert first != weights(tmp_path / "c", seed=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_a_rounding_of_the_float32_model(tmp_path, dtype):
    wide = HFReader(write_tiny_model(tmp_path / "wide", "qwen2"))
    narrow = HFReader(write_tiny_model(tmp_path / "narrow", "qwen2", dtype=dtype))
    assert narrow.config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert all(same_bits(wide[name].to(dtype), narrow[name]) for name in wide)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_and_runs_it(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    path = write_tiny_model(tmp_path / "m", family, num_query_groups=1, head_dim=16, vocab_size=300)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model).__name__ == model_spec(model.config).architecture
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("Hello", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, 5, 300) and logits.isfinite().all() and logits.std() > 0.01


@pytest.mark.parametrize("vocab_size", [BYTE_VOCAB_SIZE, 301])
def test_tokenizer(tmp_path, vocab_size):
    transformers = pytest.importorskip("transformers")
    path = write_tiny_model(tmp_path / "m", vocab_size=vocab_size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    text = "  Ünïcode\t\n 12 + 7 = 19 \U0001f600 "
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode()) and max(ids) < BYTE_VOCAB_SIZE
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.decode([i]) for i in range(vocab_size)), "an id that cannot be shown"
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(rendered).input_ids.count(EOS_ID) == 1


def test_without_tokenizer(tmp_path):
    path = write_tiny_model(tmp_path / "m", vocab_size=32, tokenizer=None)
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="family 'gpt2'; supported are llama"):
        write_tiny_model(tmp_path / "m", "gpt2")
    with pytest.raises(ValueError, match=f"vocab_size=32 .*{BYTE_VOCAB_SIZE}"):
        write_tiny_model(tmp_path / "m", vocab_size=32)
    with pytest.raises(ValueError, match="num_attention_heads=4.*num_key_value_heads=3"):
        write_tiny_model(tmp_path / "m", num_query_groups=3)
    assert list(tmp_path.iterdir()) == []
