"""Checkpoints go through megatron-core alone, at any layout, and come back bit for bit."""

from pathlib import Path

import pytest
import torch

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from checkpoints_tools.locate import open_checkpoint
from megatron_rl.models.layout import same_bits
from support.launch import run_distributed

SCRIPT = Path(__file__).with_name("plain_megatron.py")
# An odd vocabulary: Megatron pads it, and the export must trim it.
SIZES = {"head_dim": 32, "vocab_size": 263, "dtype": torch.bfloat16}
TIED = {"tie_word_embeddings": True}
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", TIED),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", TIED),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", TIED),
    # Megatron stacks no layers that differ: another layout of its files.
    "qwen3_moe-mixed": ("qwen3_moe", {"decoder_sparse_step": 2}),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("tp", "pp"), [(1, 1), (2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_every_family_round_trips_through_plain_megatron(tmp_path, tiny_model_dir, tp, pp):
    sources = {
        name: tiny_model_dir(family, **options, **SIZES)
        for name, (family, options) in MODELS.items()
    }
    arguments = [str(tp), str(pp)]
    for name, source in sources.items():
        imported, saved = tmp_path / f"{name}-imported", tmp_path / f"{name}-saved"
        assert cli.main(["import", str(source), str(imported), "--quiet"]) == 0
        arguments += [str(imported), str(saved)]
    output = run_distributed(SCRIPT, tp * pp, arguments, timeout_s=240)
    assert output.count(": done") == tp * pp
    for name, source in sources.items():
        exported = tmp_path / f"{name}-hf"
        saved = tmp_path / f"{name}-saved"
        command = ["export", str(saved), str(exported), "--hf-config", str(source), "--quiet"]
        assert cli.main(command) == 0
        a, b = HFReader(source), HFReader(exported)
        assert set(a) == set(b)
        for tensor in a:
            assert same_bits(a[tensor], b[tensor]), (name, tensor)
        assert (exported / "tokenizer.json").is_file()
        assert not open_checkpoint(saved, source).passed_over
        if tp * pp == 1:
            megatron = torch.load(tmp_path / f"{name}-imported" / "logits.pt")
            torch.testing.assert_close(megatron, hf_logits(source), rtol=0, atol=2e-5)


def hf_logits(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(32)[None]).logits
