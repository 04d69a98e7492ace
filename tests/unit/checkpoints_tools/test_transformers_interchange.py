"""Exported directories load in transformers, with the logits of the model they came from."""

import pytest
import torch

from checkpoints_tools import cli

FAMILIES = [("llama", False), ("mistral", False), ("qwen2", True), ("qwen2", False)]
FAMILIES += [("qwen3", False), ("qwen3", True), ("mixtral", False), ("qwen3_moe", False)]


def logits(path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(path)("What is 12 + 30?", return_tensors="pt").input_ids
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
def test_an_export_has_the_logits_of_its_source(tmp_path, tiny_model_dir, family, tie):
    sizes = {"head_dim": 64, "vocab_size": 263, "dtype": torch.bfloat16}
    if family == "qwen2":
        sizes["hidden_size"] = 256  # it has no head_dim of its own
    source = tiny_model_dir(family, tie_word_embeddings=tie, **sizes)
    assert cli.main(["import", str(source), str(tmp_path / "megatron"), "--quiet"]) == 0
    export = ["export", str(tmp_path / "megatron"), str(tmp_path / "hf"), "--quiet"]
    assert cli.main([*export, "--max-shard-size", "100KB"]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    expected = logits(source)
    assert torch.equal(logits(tmp_path / "hf"), expected)
    assert expected.std() > 0.1
