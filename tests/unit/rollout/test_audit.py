"""The audit reads live modules: what is broken on either side is caught by name."""

import pytest
import torch

from megatron_rl.precision import audit
from megatron_rl.sync import stream_weights
from support.tiny_engine import build_engine, build_policy

MODEL = {"hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 384, "num_layers": 2}


@pytest.fixture(scope="module")
def sides(tiny_model_dir):
    path = tiny_model_dir("qwen3", **MODEL)
    policy = build_policy(path, "fp8", lr=1e-3)
    return policy, build_engine(path, policy)


@pytest.fixture(autouse=True)
def synced(sides):
    """Every test starts from a fresh, clean sync."""
    policy, engine = sides
    policy.weights_changed()
    engine.update_weights(stream_weights(policy, policy.flow), 0)


def in_worker(engine, function):
    with torch.no_grad():
        engine._llm.collective_rpc(function)


def layer_of(worker, name):
    return worker.model_runner.get_model().get_submodule(name)


def test_a_clean_sync_has_no_violation(sides):
    policy, engine = sides
    assert audit(policy, engine) == []
    report = engine.report()
    assert len(report.linears) == 2 * 7 + 1 and report.linears["lm_head"].weight == "bf16"
    assert all(operand.digest for operand in report.linears.values())


def corrupt_scale(worker):
    layer = layer_of(worker, "model.layers.1.mlp.down_proj")
    layer.weight_scale_inv.data[0, 1] *= 2


def corrupt_scale_and_operand(worker):
    corrupt_scale(worker)
    layer = layer_of(worker, "model.layers.1.mlp.down_proj")
    layer.quant_method.fp8_linear.process_weights_after_loading(layer)


def swap_scales(worker):
    layer = layer_of(worker, "model.layers.0.self_attn.qkv_proj")
    scales = layer.weight_scale_inv.data
    scales[0], scales[-1] = scales[-1].clone() * 4, scales[0].clone() * 4
    layer.quant_method.fp8_linear.process_weights_after_loading(layer)


def flip_a_code(worker):
    layer = layer_of(worker, "model.layers.0.mlp.gate_up_proj")
    layer.weight.data.view(torch.uint8)[-1, -1] ^= 1
    layer.quant_method.fp8_linear.process_weights_after_loading(layer)


def another_input_format(worker):
    from dataclasses import replace

    kernel = layer_of(worker, "model.layers.0.mlp.down_proj").quant_method.fp8_linear
    kernel.input_format = replace(kernel.input_format, amax_epsilon=0.0)


def an_unquantised_layer(worker):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layer = layer_of(worker, "model.layers.0.self_attn.o_proj")
    layer._kept = layer.quant_method
    layer.quant_method = UnquantizedLinearMethod()
    layer._codes, layer.weight.data = layer.weight.data, layer.dequantised_weight


def restore_the_layer(worker):
    layer = layer_of(worker, "model.layers.0.self_attn.o_proj")
    layer.quant_method, layer.weight.data = layer._kept, layer._codes


def restore_the_format(worker):
    from megatron_rl.precision.flows import INPUT

    layer_of(worker, "model.layers.0.mlp.down_proj").quant_method.fp8_linear.input_format = INPUT


@pytest.mark.parametrize(
    "damage, restore, module, what",
    [
        (corrupt_scale, None, "model.layers.1.mlp.down_proj", "not its codes times its scales"),
        (corrupt_scale_and_operand, None, "model.layers.1.mlp.down_proj", "bytes differ"),
        (swap_scales, None, "model.layers.0.self_attn.q_proj", "bytes differ"),
        (flip_a_code, None, "model.layers.0.mlp.up_proj", "bytes differ"),
        (another_input_format, restore_the_format, "model.layers.0.mlp.down_proj", "input in"),
        (an_unquantised_layer, restore_the_layer, "model.layers.0.self_attn.o_proj", "bf16"),
    ],
)
def test_a_broken_rollout_is_caught(sides, damage, restore, module, what):
    policy, engine = sides
    in_worker(engine, damage)
    try:
        violations = audit(policy, engine)
    finally:
        if restore:
            in_worker(engine, restore)
    assert any(module in text and what in text for text in violations), violations
    assert all("layers" in text for text in violations)


def test_a_broken_policy_is_caught(sides):
    policy, engine = sides
    linear = policy.model.decoder.layers[0].mlp.linear_fc2
    linear.quantised_weight().scale_inv[0, 0] *= 2
    (found,) = [v for v in audit(policy, engine) if "mlp.down_proj" in v]
    assert "its scales are not those of its weight in the policy" in found


def test_codes_of_an_old_weight_are_caught(sides):
    policy, engine = sides
    linear = policy.model.decoder.layers[1].self_attention.linear_proj
    before = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.mul_(1.5)
    try:
        (found,) = [v for v in audit(policy, engine) if "layers.1.self_attn.o_proj" in v]
    finally:
        with torch.no_grad():
            linear.weight.copy_(before)
    assert "are not those of its weight in the policy" in found


@pytest.mark.parametrize("operator", ["norm", "rope", "attention"])
def test_an_operator_that_is_not_shared_is_caught(sides, operator):
    policy, engine = sides

    def undo(worker):
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        for module in worker.model_runner.get_model().modules():
            if isinstance(module, RMSNorm) and operator == "norm":
                module._forward_method = module.forward_native
            if isinstance(module, RotaryEmbedding) and operator == "rope":
                module._forward_method = module.forward_cpu
        if operator == "attention":
            for groups in worker.model_runner.attn_groups:
                for group in groups:
                    for builder in group.metadata_builders:
                        del builder.build

    in_worker(engine, undo)
    assert audit(policy, engine) == [
        f"{operator} is to be shared; the rollout engine computes another"
    ]


def test_a_layer_in_another_format_than_the_flow_says_is_caught(sides):
    """The policy believes in one exemption more than was built."""
    from dataclasses import replace

    policy, engine = sides
    plan = policy.plan
    policy.plan = replace(plan, quantised=plan.quantised[1:])
    try:
        violations = audit(policy, engine)
    finally:
        policy.plan = plan
    named = {text.split(":")[0] for text in violations}
    assert named == {f"model.layers.0.self_attn.{x}_proj" for x in "qkv"}
    assert all("asks for bf16" in text for text in violations)


def test_a_model_that_vllm_reads_in_another_shape_is_caught(tiny_model_dir):
    """VLLM's Qwen2 takes no explicit head_dim, and cuts wider weights to size in silence."""
    path = tiny_model_dir("qwen2", hidden_size=256, head_dim=128, ffn_hidden_size=384)
    policy = build_policy(path, "bf16", lr=1e-3)
    engine = build_engine(path, policy)
    engine.update_weights(stream_weights(policy, policy.flow), 0)
    violations = audit(policy, engine)
    assert any("self_attn.q_proj" in text and "bytes differ" in text for text in violations)
