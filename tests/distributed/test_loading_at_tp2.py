"""Every family at TP 2: a checkpoint is read once, and the logits are those of transformers."""

from pathlib import Path

import pytest

from support.launch import run_distributed

MODELS = [
    ("llama", False),
    ("mistral", False),
    ("qwen2", False),
    ("qwen2", True),
    ("qwen3", False),
]


@pytest.mark.distributed
def test_one_rank_reads_and_both_compute_what_transformers_does(tiny_model_dir):
    # An odd vocabulary: the ranks hold different numbers of its tokens.
    models = [
        tiny_model_dir(family, tie_word_embeddings=tie, vocab_size=261) for family, tie in MODELS
    ]
    script = Path(__file__).with_name("tp_logits.py")
    output = run_distributed(script, nproc=2, args=list(map(str, models)), timeout_s=240)
    for rank in (0, 1):
        assert output.count(f"rank {rank}: Qwen2ForCausalLM agrees") == 2
        for line in ("LlamaFor", "MistralFor", "Qwen3For"):
            assert output.count(f"rank {rank}: {line}CausalLM agrees") == 1
        for line in ("unreadable refused", "nan refused", "read on its own"):
            assert output.count(f"rank {rank}: {line}") == 1
