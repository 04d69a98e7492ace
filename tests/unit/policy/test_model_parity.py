"""The policy computes what transformers computes, for every family."""

import pytest
import torch

from checkpoints_tools.hf import HFReader
from megatron_rl.policy.packing import pack_groups
from support.groups import random_groups, reference_logprobs, shape_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def hf_model(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny_policy, tiny_model_dir, family, tie):
    model = {"tie_word_embeddings": tie}
    policy = tiny_policy(family, model=model)
    reference = hf_model(tiny_model_dir(family, **model))
    ids = torch.randint(3, 250, (1, 33), generator=torch.Generator().manual_seed(1))
    # One response of one token: the whole stream is one plain sequence.
    from megatron_rl.policy.packing import PromptGroup, Response

    group = PromptGroup(prompt_ids=ids[0].tolist(), responses=(Response(row=0, token_ids=[7]),))
    packed = pack_groups([group])
    with torch.no_grad():
        ours = policy.wrapped(
            packed.input_ids, packed.position_ids, packed=packed, return_logits=True
        )
        theirs = reference(ids).logits[0]
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_grouped_logprobs_equal_transformers_on_plain_sequences(
    tiny_policy, tiny_model_dir, family, temperature
):
    policy = tiny_policy(family)
    groups = random_groups()
    values = policy.score(groups, shape_of(groups), temperature=temperature, with_entropy=True)
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(
            hf_model(tiny_model_dir(family)), groups, temperature
        )
    torch.testing.assert_close(values.logprobs, logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(values.entropy, entropy, rtol=0, atol=2e-5)


def test_a_rope_scaled_model_equals_transformers(tmp_path, tiny_model_dir, tiny_policy):
    import json
    import shutil

    from megatron_rl.models import model_spec
    from megatron_rl.policy.rotary import inverse_frequencies

    path = tmp_path / "scaled"
    shutil.copytree(tiny_model_dir("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    (path / "config.json").write_text(json.dumps(config))
    spec = model_spec(HFReader(path).config)
    ours = inverse_frequencies(spec.rope, spec.head_dim)
    assert torch.equal(ours, hf_model(path).model.rotary_emb.inv_freq)


@pytest.mark.parametrize("flow", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_returns_the_checkpoint(tiny_policy, tiny_model_dir, family, flow):
    dtype = torch.float32 if flow == "fp32" else torch.bfloat16
    policy = tiny_policy(family, flow)
    reader = HFReader(tiny_model_dir(family))
    exported = dict(policy.named_tensors())
    assert list(exported) == list(policy.parameters.hf_shapes)
    for name, tensor in exported.items():
        assert torch.equal(tensor, reader[name].to(dtype)), name


def test_master_weights_start_from_the_unrounded_checkpoint(tiny_policy, tiny_model_dir):
    policy = tiny_policy("llama", "bf16")
    reader = HFReader(tiny_model_dir("llama"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(reader[name].bfloat16().float(), reader[name])
    masters = [
        parameter
        for group in policy.optimizer.param_groups
        for parameter in group["params"]
        if parameter.numel() == reader[name].numel()
    ]
    assert any(torch.equal(m.view(-1), reader[name].reshape(-1)) for m in masters)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "model.extra"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "model.norm.weight holds NaN"),
    ],
    ids=["missing", "unexpected", "nan"],
)
def test_a_damaged_checkpoint_is_refused(tiny_model_dir, tiny_policy, change, message):
    from megatron_rl.policy.policy import FrozenPolicy

    built = tiny_policy("llama")
    policy = FrozenPolicy(built.spec, built.flow, built.config, built.layout)
    reader = HFReader(tiny_model_dir("llama"))
    tensors = {name: reader[name].clone() for name in reader}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        policy.load(tensors, list(tensors))
