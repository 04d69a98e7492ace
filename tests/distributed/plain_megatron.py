"""Run by test_megatron_interchange: checkpoints through megatron-core alone, on any layout.

It imports nothing of this project, as a user's own script would not. Arguments: the tensor- and
pipeline-parallel sizes, then pairs of directories. Each first one is loaded by
`dist_checkpointing.load` into a GPTModel whose weights were random, and saved again into the second
by `dist_checkpointing.save`. What a script needs on a machine without CUDA is in `without_cuda`.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F


def without_cuda():
    """megatron-core allocates on the current CUDA device; here that is the CPU."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def build(hf, tp, pp, dtype):
    """A plain GPTModel of a Hugging Face config, on this rank's place."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    qk_norm = hf["model_type"].startswith("qwen3")
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))
    experts = {}
    if num_experts:
        experts = {
            "num_moe_experts": num_experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
            # Hugging Face counts from the other end: its step 2 begins with a dense layer.
            "moe_layer_freq": [0, 1] if hf.get("decoder_sparse_step") == 2 else 1,
        }
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        normalization="RMSNorm",
        qk_layernorm=qk_norm,
        add_bias_linear=False,
        add_qkv_bias=hf["model_type"].startswith("qwen2"),
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **experts,
    )
    if num_experts:
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    # Megatron-LM's padding, not this project's: to a multiple of 128 x TP.
    multiple = 128 * tp
    model = GPTModel(
        config,
        spec,
        vocab_size=-(-hf["vocab_size"] // multiple) * multiple,
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(hf["rope_theta"]),
    )
    return model.to(dtype)


def logits(model, vocab_size):
    """What the model, now in FP32, makes of the first token ids."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    # There is no CUDA generator to switch to, and no dropout that would draw from it.
    CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    # megatron-core 0.16.1 leaves the name undefined where Transformer Engine is not installed.
    moe_utils.te_general_gemm = None
    ids = torch.arange(32)[None]
    mask = torch.ones(32, 32, dtype=torch.bool).triu(1)[None, None]
    with torch.inference_mode():
        out = model.float().eval()(ids, ids, mask)
    return out[..., :vocab_size]


def main():
    tp, pp = int(sys.argv[1]), int(sys.argv[2])
    without_cuda()
    from megatron.core import dist_checkpointing, parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(7)
    for source, target in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        hf = json.loads((Path(source) / "config.json").read_text())
        model = build(hf, tp, pp, getattr(torch, hf["torch_dtype"]))
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, source)
        model.load_state_dict(state["model"])
        if torch.distributed.get_rank() == 0:
            os.makedirs(target)
        torch.distributed.barrier()
        dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 1}, target)
        if tp * pp == 1:
            torch.save(logits(model, hf["vocab_size"]), Path(source) / "logits.pt")
    ours = {"megatron_rl", "checkpoints_tools"} & {name.split(".")[0] for name in sys.modules}
    assert not ours, ours
    print(f"rank {torch.distributed.get_rank()}: done")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # megatron-core's writers are processes that import this file
    main()
