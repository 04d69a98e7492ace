"""Loading: what becomes of each tensor's bits, of checkpoints of several dtypes, and of damage."""

import pytest
import torch

from checkpoints_tools.hf import HFReader

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture
def load(tiny_model_dir, parallel_layout):
    """`(family, flow, change=None, **model) -> (trainable policy, tensors)`."""

    def make(family, flow, change=None, **model):
        from megatron_rl.config import PolicyConfig
        from megatron_rl.models import model_spec
        from megatron_rl.policy.policy import Policy
        from megatron_rl.precision import resolve_flow

        reader = HFReader(tiny_model_dir(family, num_layers=1, **model))
        tensors = {name: reader[name].clone() for name in reader}
        if change:
            change(tensors)
        policy = Policy(
            model_spec(reader.config), resolve_flow(flow), PolicyConfig(), parallel_layout
        )
        policy.make_trainable(10, policy.load(tensors, list(tensors)))
        return policy, tensors

    return make


def masters(policy):
    """(local name, master weight) of every parameter, from the shards of the optimizer."""
    names = {id(p): n for n, p in policy.model.named_parameters()}
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            yield names[id(parameter)], optimizer.optimizer.param_groups[group]["params"][order]


def check_masters(policy, tensors):
    found = dict(masters(policy))
    assert set(found) == {name for name, _ in policy.model.named_parameters()}
    for name, master in found.items():
        expected = policy.parameters.entry(name).to_megatron(tensors).float()
        assert master.dtype == torch.float32
        assert torch.equal(master.reshape(-1), expected.reshape(-1)), name


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_parameters_have_unrounded_fp32_masters(load, family, tie):
    policy, tensors = load(family, "bf16", tie_word_embeddings=tie)
    check_masters(policy, tensors)
    exported = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    assert exported.keys() == tensors.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[name].bfloat16()), name
    # A step of no size writes the rounded masters back: still the checkpoint's bits.
    for group in policy.optimizer.param_groups:
        group["lr"] = 0.0
    policy.ddp.zero_grad_buffer()
    policy.optimizer.step()
    assert all(torch.equal(t, exported[name]) for name, t in policy.named_tensors())


@pytest.mark.parametrize("coarse", ["embed_tokens", "norm", "mlp", "lm_head"])
def test_the_dtypes_of_a_checkpoint_may_differ_in_any_order(load, coarse):
    def round_some(tensors):
        for name in tensors:
            if coarse in name:
                tensors[name] = tensors[name].bfloat16()

    policy, tensors = load("llama", "bf16", round_some)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.float32}
    check_masters(policy, tensors)


def test_a_checkpoint_as_coarse_as_the_parameters_is_its_own_master(load):
    def round_all(tensors):
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    policy, tensors = load("llama", "bf16", round_all)
    check_masters(policy, tensors)
    # Loading again would part the parameters from the optimizer's copies.
    with pytest.raises(AssertionError, match="before make_trainable"):
        policy.load(tensors, list(tensors))


def poison(name, value):
    def change(tensors):
        tensors[name].view(-1)[-1] = value

    return change


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (poison("model.embed_tokens.weight", float("nan")), "embed_tokens.weight holds NaN or Inf"),
        (poison(LAYER + "self_attn.k_proj.bias", float("inf")), "k_proj.bias.*holds NaN or Inf"),
        (poison(LAYER + "mlp.up_proj.weight", -float("inf")), "up_proj.weight.*holds NaN or Inf"),
        (lambda t: t.pop(LAYER + "self_attn.v_proj.bias"), "v_proj.bias"),
        (lambda t: t.update({LAYER + "mlp.router.weight": torch.ones(1)}), "mlp.router.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(258, 128)}), "lm_head.weight"),
        (
            lambda t: t.update({LAYER + "mlp.gate_proj.weight": torch.ones(191, 128)}),
            "gate_proj.weight",
        ),
    ],
    ids=["nan", "inf", "-inf", "missing", "unexpected", "rows", "gate rows"],
)
def test_a_damaged_checkpoint_names_the_tensor(load, change, message):
    with pytest.raises(ValueError, match=message):
        load("qwen2", "fp32", change)
