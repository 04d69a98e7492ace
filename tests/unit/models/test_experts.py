"""Models with experts: which layers have them, what is quantised of them, what is refused."""

import pytest

from megatron_rl.models import linear_plan, model_spec, parameter_map
from megatron_rl.precision import partition_violations, resolve_flow
from megatron_rl.precision.wire import quantization_config


def config(**changes):
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
    } | changes


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3}),
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"mlp_only_layers": [0, 3]}, {1, 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}),
    ],
)
def test_layers_with_experts_are_those_of_transformers(changes, layers):
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = config(**changes)
    moe = model_spec(raw).moe
    assert moe is not None and moe.layers == layers
    assert (moe.num_experts, moe.experts_per_token, moe.ffn_hidden_size) == (3, 2, 256)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    theirs = {i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert theirs == layers
    dense = {
        e.layer for e in parameter_map(raw) if e.megatron_name.endswith("mlp.linear_fc1.weight")
    }
    assert dense == {0, 1, 2, 3} - layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 4}, "num_experts_per_tok=4 .* more than num_experts=3"),
        ({"num_experts": 0}, "num_experts=0 .* positive integer"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "leave none of the 4 layers with experts"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step='2'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_spec(config(**changes))


def test_router_jitter_is_refused():
    changes = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    changes |= {"num_local_experts": 3, "router_jitter_noise": 0.1}
    with pytest.raises(ValueError, match="router_jitter_noise=0.1"):
        model_spec(config(**changes))


def test_routers_stay_and_experts_are_cut_by_their_own_width():
    flow = resolve_flow("fp8")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    plan = linear_plan(parameter_map(config(decoder_sparse_step=2, **heads)), flow)
    routers = [f"model.layers.{i}.mlp.gate" for i in (1, 3)]
    assert quantization_config(flow, plan)["modules_to_not_convert"] == ["lm_head", *routers]
    assert plan.is_quantised("model.layers.1.mlp.experts.2.down_proj")
    # 256 / 2 is a block, 256 / 4 is none; the dense layers' 512 could be cut four ways.
    assert not partition_violations(plan, train_tp=2, rollout_tp=2)
    (first, *_) = partition_violations(plan, train_tp=4, rollout_tp=1)
    assert "local_experts.0.linear_fc1 [512 x 256] cannot be cut" in first


@pytest.mark.parametrize("named", ["1.down_proj", "1.up_proj"])
def test_experts_of_a_layer_are_exempt_together(named):
    """vLLM holds them in one tensor, and asks of a layer's experts whether any is in the list."""
    from dataclasses import replace

    flow = replace(resolve_flow("fp8"), exempt_modules=(f"model.layers.2.mlp.experts.{named}",))
    plan = linear_plan(parameter_map(config()), flow)
    exempt = [name for name in plan.exempt_hf_modules if ".experts." in name]
    assert len(exempt) == 9 and all(name.startswith("model.layers.2.") for name in exempt)
    assert plan.is_quantised("model.layers.2.self_attn.o_proj")


def test_narrow_experts_are_exempt_whole():
    """160 rows per projection are no whole blocks; the down projection alone could be quantised
    by its rows, but not by its columns."""
    plan = linear_plan(parameter_map(config(moe_intermediate_size=160)), resolve_flow("fp8"))
    assert not any(".experts." in name for shape in plan.quantised for name in shape.hf_modules)
    assert plan.is_quantised("model.layers.0.self_attn.q_proj")
