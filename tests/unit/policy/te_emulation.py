"""The CUDA path of the FP8 flow on a CPU: real classes of Transformer Engine, emulated kernels.

Run by `test_transformer_engine.py` in a process of its own, with TE's Python package on the path.
Megatron's wrappers, TE's modules, recipe, quantisers and tensors are the real ones; what they
compute is the reference quantiser's (`support.te_stand_in`).
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from support import te_optimizer_stand_in, te_stand_in

te_stand_in.install()
te_optimizer_stand_in.use_torch_adam()

from megatron.core.fp8_utils import get_fp8_recipe  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from transformer_engine.common.recipe import Float8BlockScaling  # noqa: E402
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (  # noqa: E402
    Float8BlockwiseQTensor,
)

from checkpoints_tools.hf import HFReader  # noqa: E402
from megatron_rl.config import PolicyConfig  # noqa: E402
from megatron_rl.models import model_spec  # noqa: E402
from megatron_rl.policy import te_export  # noqa: E402
from megatron_rl.policy.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from megatron_rl.policy.fp8_linear import block_scaled_linears  # noqa: E402
from megatron_rl.policy.model import tokens_multiple, transformer_config  # noqa: E402
from megatron_rl.policy.packing import PromptGroup, Response  # noqa: E402
from megatron_rl.policy.parallel import initialize  # noqa: E402
from megatron_rl.policy.policy import FrozenPolicy, Policy  # noqa: E402
from megatron_rl.precision import dequantize_block, quantize_block, resolve_flow, te  # noqa: E402
from megatron_rl.precision.environment import environment_violations  # noqa: E402
from megatron_rl.precision.products import block_linear  # noqa: E402

# 256 / 128 = 2 and 384 / 128 = 3 columns of scales, which TE rounds up to 4.
SIZES = {"hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 384, "num_layers": 2}
BIASED = SIZES | {"num_attention_heads": 2, "num_query_groups": 1, "head_dim": None}
IN_BF16 = SIZES | {"dtype": torch.bfloat16}
"""A checkpoint no finer than the parameters, which are coarser than it only when held in FP8."""
GROUPS = [
    PromptGroup(
        prompt_ids=[5, 6, 7, 8, 9, 10, 11, 12],
        responses=[Response(row=row, token_ids=range(20 + row, 29 + row)) for row in range(3)],
    )
]
SHAPE = (3, 9)
BOTH_STORES = pytest.mark.parametrize("fp8_param", [False, True], ids=["bf16_param", "fp8_param"])


@pytest.fixture(scope="module", autouse=True)
def layout():
    """Made on the CPU platform: it lets Megatron run here."""
    return initialize(PolicyConfig(), seed=0)


@pytest.fixture
def cuda():
    with te_stand_in.emulated_cuda():
        yield


def flow_named(name="fp8", **roles):
    # Shared operators are the CPU's; the products are what is compared here.
    return replace(resolve_flow(name), shared_operators=(), **roles)


def build(layout, path, flow, kind=FrozenPolicy, **megatron):
    reader = HFReader(path)
    config = PolicyConfig(megatron=megatron, optimizer={"lr": 1e-3})
    policy = kind(model_spec(reader.config), flow, config, layout)
    unrounded = policy.load(reader, list(reader))
    if kind is Policy:
        policy.make_trainable(10, unrounded)
    return policy


@pytest.fixture(scope="module")
def reference(layout, tiny_model_dir):
    """The CPU path's policy of the same weights."""
    return build(layout, tiny_model_dir("qwen3", **SIZES), flow_named())


@pytest.fixture
def emulated(cuda, layout, tiny_model_dir):
    def make(family="qwen3", flow=None, sizes=SIZES, **megatron):
        return build(layout, tiny_model_dir(family, **sizes), flow or flow_named(), **megatron)

    return make


def same_bytes(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
    )


def score(policy):
    return policy.score(GROUPS, SHAPE, temperature=1.0).logprobs


def test_the_process_has_the_flows_environment():
    assert environment_violations(flow_named(), os.environ) == []
    fp32 = resolve_flow({"base": "fp8", "linear_weight": "e4m3 128x128 fp32"})
    (found,) = environment_violations(fp32, os.environ)
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" in found
    assert environment_violations(flow_named("bf16"), {}) == []


@BOTH_STORES
def test_quantised_layers_are_transformer_engines_and_exempt_ones_megatrons(emulated, fp8_param):
    flow = flow_named(exempt_last_layers=1, exempt_modules=("*.0.self_attn.o_proj",))
    policy = emulated(flow=flow, fp8_param=fp8_param)
    found = dict(block_scaled_linears(policy.model))
    assert sorted(found) == [
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.0.mlp.linear_fc2",
        "decoder.layers.0.self_attention.linear_qkv",
    ]
    for linear in found.values():
        assert type(linear).__name__.startswith("TransformerEngine")
        assert isinstance(linear.weight, Float8BlockwiseQTensor) is fp8_param
    exempt = policy.model.get_submodule("decoder.layers.1.mlp.linear_fc1")
    assert type(exempt) is ColumnParallelLinear and exempt.weight.dtype == torch.bfloat16
    assert score(policy).isfinite().all()


def test_the_recipe_is_the_flows(emulated):
    flow = flow_named()
    policy = emulated(flow=flow)
    assert policy.megatron_config.fp8 == "e4m3"
    recipe = get_fp8_recipe(policy.megatron_config)
    assert type(recipe) is Float8BlockScaling
    assert te.recipe_formats(recipe) == te.training_formats(flow)
    assert recipe.fp8_quant_fwd_inp.amax_epsilon == 448 * 2.0**-33
    declared = te.training_formats(flow)
    linears = dict(block_scaled_linears(policy.model))
    assert {linear.formats for linear in linears.values()} == {declared}
    score(policy)
    assert {linear.formats for linear in linears.values()} == {declared}
    linears["decoder.layers.0.mlp.linear_fc1"].quantizers["scaling_fwd"][0].amax_epsilon = 0.5
    assert linears["decoder.layers.0.mlp.linear_fc1"].formats.input.amax_epsilon == 0.5


def test_fp32_scales_reach_the_recipe_and_the_codes(emulated):
    modes = {"scale_rounding": "fp32"}
    base = flow_named()
    roles = ("linear_weight", "linear_input", "output_gradient")
    flow = replace(base, **{role: replace(getattr(base, role), **modes) for role in roles})
    policy = emulated(flow=flow, fp8_param=True)
    assert te.recipe_formats(get_fp8_recipe(policy.megatron_config)) == te.training_formats(flow)
    served = dict(policy.served_tensors())
    scales = served["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert not (torch.frexp(scales)[0] == 0.5).all()
    te.configure_recipe(base)


@BOTH_STORES
def test_served_codes_and_scales_are_the_cpu_paths(emulated, reference, fp8_param):
    policy = emulated(fp8_param=fp8_param)
    ours, expected = dict(policy.served_tensors()), dict(reference.served_tensors())
    assert list(ours) == list(expected)
    assert [name for name in ours if not same_bytes(ours[name], expected[name])] == []
    assert ours["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 3)


def test_each_part_of_a_fused_weight_has_its_own_blocks(emulated, tiny_model_dir):
    served = dict(emulated(fp8_param=True).served_tensors())
    source = HFReader(tiny_model_dir("qwen3", **SIZES))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        name = f"model.layers.1.{part}.weight"
        codes, scale_inv = quantize_block(source[name].bfloat16())
        assert same_bytes(served[name], codes), name
        assert same_bytes(served[f"{name}_scale_inv"], scale_inv), name


def test_values_of_a_parameter_in_fp8_are_codes_times_scales(emulated):
    policy = emulated(fp8_param=True)
    tensors = dict(policy.named_tensors())
    served = dict(policy.served_tensors())
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[name].dtype == torch.bfloat16
    spread = served[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(tensors[name].float(), served[name].float() * spread)


@BOTH_STORES
def test_every_linear_computes_the_cpu_paths_bits(emulated, reference, fp8_param):
    policy = emulated(fp8_param=fp8_param)
    expected = dict(block_scaled_linears(reference.model))
    generator = torch.Generator().manual_seed(1)
    recipe = get_fp8_recipe(policy.megatron_config)
    for name, linear in block_scaled_linears(policy.model):
        n, k = linear.weight.shape
        x = torch.randn(144, 1, k, generator=generator).bfloat16()
        x[5] *= 1e4
        x[6] = 0.0
        x[7] *= 1e-9  # below the floor of the input's scale
        grad = torch.randn(144, 1, n, generator=generator).bfloat16()
        results = []
        for module in (linear, expected[name]):
            leaf = x.clone().requires_grad_()
            module.weight.grad = None
            module.weight.requires_grad_()
            with autocast(recipe):
                output, bias = module(leaf)
            assert bias is None
            output.backward(grad)
            results.append((output, leaf.grad, module.weight.grad))
        for what, ours, right in zip(("output", "dx", "dW"), *results, strict=True):
            assert same_bytes(ours, right), (name, what, (ours != right).sum().item())


def autocast(recipe):
    from transformer_engine.pytorch import autocast

    return autocast(enabled=True, recipe=recipe)


def test_a_bias_is_added_to_the_rounded_product(emulated, layout, tiny_model_dir):
    policy = emulated("qwen2", sizes=BIASED)
    with mock.patch("torch.cuda.is_available", lambda: False):
        with mock.patch("megatron_rl.platforms.device.Platform", lambda **_: CPU):
            expected = build(layout, tiny_model_dir("qwen2", **BIASED), flow_named())
    name = "decoder.layers.0.self_attention.linear_qkv"
    ours, right = policy.model.get_submodule(name), expected.model.get_submodule(name)
    x = torch.randn(32, 1, 256).bfloat16()
    with torch.no_grad(), autocast(get_fp8_recipe(policy.megatron_config)):
        assert ours.bias.abs().sum() > 0
        assert same_bytes(ours(x)[0], right(x)[0])


CPU = SimpleNamespace(name="cpu", device=torch.device("cpu"))


@BOTH_STORES
def test_log_probs_are_the_cpu_paths(emulated, reference, fp8_param):
    assert same_bytes(score(emulated(fp8_param=fp8_param)), score(reference))


def test_micro_batches_are_padded_for_the_weight_gradient(emulated):
    policy = emulated()
    assert policy._options(1.0, False).pad_to_multiple == 16
    assert tokens_multiple(flow_named("bf16"), policy.megatron_config) == 1
    parallel = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2)
    assert tokens_multiple(policy.flow, parallel) == 256


def test_changed_weights_are_quantised_anew(emulated):
    policy = emulated()
    before = score(policy)
    linear = policy.model.get_submodule("decoder.layers.0.mlp.linear_fc2")
    with torch.no_grad():
        linear.weight.mul_(-1.5)
    assert linear.operand_fault() == "its codes are not those of its weight"
    policy.weights_changed()
    x = torch.randn(16, 1, 384).bfloat16()
    with torch.no_grad(), autocast(get_fp8_recipe(policy.megatron_config)):
        # Outside Megatron's schedule, which announces the first micro-batch by itself.
        output = linear(x)[0]
        weight = dequantize_block(*quantize_block(linear.weight))
        assert same_bytes(output, block_linear(x, weight, policy.flow.linear_input))
    assert linear.operand_fault() is None
    assert not torch.equal(score(policy), before)


def test_the_report_reads_live_formats_and_codes(emulated):
    policy = emulated()
    score(policy)
    report = policy.report()
    down = report.linears["model.layers.0.mlp.down_proj"]
    assert (down.weight, down.input) == ("e4m3 128x128 pow2", "e4m3 1x128 pow2 amax>=5.22e-08")
    assert down.kernel == "TransformerEngineRowParallelLinear" and down.fault is None
    workspace = policy.model.get_submodule("decoder.layers.0.mlp.linear_fc2")._fp8_workspaces
    workspace["weight"]._rowwise_scale_inv[0, 0] *= 2
    fault = policy.report().linears["model.layers.0.mlp.down_proj"].fault
    assert fault == "its scales are not those of its weight"


def test_a_weight_without_rowwise_codes_is_refused(emulated):
    policy = emulated(fp8_param=True)
    weight = policy.model.get_submodule("decoder.layers.0.mlp.linear_fc2").weight
    weight.update_usage(rowwise_usage=True, columnwise_usage=True)
    weight.update_usage(rowwise_usage=False, columnwise_usage=True)
    with pytest.raises(ValueError, match="only its transposed codes"):
        te_export.read_codes(weight)


def test_a_format_that_te_does_not_compute_is_refused(emulated):
    flow = resolve_flow({"base": "fp8", "linear_weight": "e4m3 1x128"})
    with pytest.raises(ValueError, match="linear_weight is e4m3 1x128 pow2.*e4m3 128x128"):
        emulated(flow=replace(flow, shared_operators=()))


def likelihood(logprobs, entropy, rows, columns):
    return -logprobs.sum() / 27


def steps(policy):
    """Two optimizer steps; the codes served after each, and the gradient norms."""
    served, norms = [], []
    for _ in range(2):
        norms.append(policy.update(GROUPS, SHAPE, likelihood, temperature=1.0).grad_norm)
        served.append(
            {name: tensor.clone() for name, tensor in policy.served_tensors() if "proj" in name}
        )
    return served, norms


@pytest.fixture(scope="module")
def trained(layout, tiny_model_dir):
    """The CPU path's codes and gradient norms of the same two steps."""
    return steps(build(layout, tiny_model_dir("qwen3", **IN_BF16), flow_named(), Policy))


@BOTH_STORES
def test_codes_after_optimizer_steps_are_the_cpu_paths(emulated, trained, fp8_param):
    served, norms = steps(emulated(sizes=IN_BF16, kind=Policy, fp8_param=fp8_param))
    assert norms == trained[1]
    for ours, expected in zip(served, trained[0], strict=True):
        assert [name for name in expected if not same_bytes(ours[name], expected[name])] == []
    name = "model.layers.0.mlp.up_proj.weight"
    assert not same_bytes(served[0][name], served[1][name])


@BOTH_STORES
def test_a_checkpoint_restores_masters_and_codes(emulated, tmp_path, fp8_param):
    options = {"sizes": IN_BF16, "kind": Policy, "fp8_param": fp8_param}
    policy, restored = emulated(**options), emulated(**options)
    served = steps(policy)[0][-1]
    load_checkpoint(save_checkpoint(tmp_path, 2, policy, {}, keep=1), restored)
    ours = dict(restored.served_tensors())
    assert [name for name in served if not same_bytes(ours[name], served[name])] == []
    masters = [dict(p.model.named_parameters()) for p in (policy, restored)]
    assert all(torch.equal(masters[0][n].main_param, masters[1][n].main_param) for n in masters[0])


def test_parameters_in_fp8_are_refused_where_they_cannot_be_kept(emulated, layout, tiny_model_dir):
    spec = model_spec(HFReader(tiny_model_dir("qwen3", **SIZES)).config)
    overlap = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    config = PolicyConfig(megatron={"fp8_param": True}, **overlap)
    with pytest.raises(ValueError, match="overlap_param_gather=true"):
        transformer_config(spec, flow_named(), config)
    with pytest.raises(ValueError, match="flow that trains quantised"):
        transformer_config(spec, flow_named("bf16"), config)
