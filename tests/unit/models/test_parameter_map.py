"""The parameter map: bitwise round trips, agreement with literal loops, key and shape errors."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.models import families, model_spec, parameter_map
from megatron_rl.models.layout import FusedQKV, same_bits

ARCHITECTURES = {family.name: family.architecture for family in families()}


def config(family="llama", *, heads=8, groups=4, head_dim=6, tied=False, vocab=101, **changes):
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": 40,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "tie_word_embeddings": tied,
    } | changes


def random_checkpoint(mapping, *, dtype=torch.bfloat16):
    """Random bits, so NaN payloads and infinities are among the values that must survive."""
    generator = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    return {
        name: torch.randint(
            0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator
        ).view(dtype)
        for name, shape in mapping.hf_shapes.items()
    }


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert same_bits(actual[name], tensor), name


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_round_trip_is_bitwise_at_every_tp(family, tied, groups):
    """HF -> Megatron -> shards and back, with fewer, as many and more groups than ranks."""
    mapping = parameter_map(
        config(family, groups=groups, tied=tied), make_vocab_size_divisible_by=16
    )
    checkpoint = random_checkpoint(mapping)
    for tp in (1, 2, 4):
        mapping.check_tp(tp)
        returned = {}
        for entry in mapping:
            full = entry.to_megatron(checkpoint)
            assert tuple(full.shape) == entry.shape
            shards = [entry.shard(full, tp_rank=rank, tp_size=tp) for rank in range(tp)]
            assert {tuple(shard.shape) for shard in shards} == {entry.shard_shape(tp)}
            tensors = entry.to_hf(entry.unshard(shards))
            assert all(tensor.is_contiguous() for tensor in tensors.values())
            returned |= tensors
        assert_same(returned, checkpoint)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(family, tied):
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    sizes = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
    raw = config(family, tied=tied, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    # As files have them: in memory, transformers stacks experts.
    tensors = revert_weight_conversion(model, model.state_dict())
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    mapping = parameter_map(raw)
    mapping.check_hf_keys(expected)
    assert all(expected[name] == shape for name, shape in mapping.hf_shapes.items())


def literal_qkv(q, k, v, *, groups, q_per_group, head_dim):
    """Megatron's order, row by row."""
    rows = []
    for group in range(groups):
        for head in range(q_per_group):
            for row in range(head_dim):
                rows.append(q[(group * q_per_group + head) * head_dim + row])
        for source in (k, v):
            for row in range(head_dim):
                rows.append(source[group * head_dim + row])
    return torch.stack(rows)


@settings(deadline=None, max_examples=60)
@given(
    groups=st.integers(1, 6),
    q_per_group=st.integers(1, 5),
    head_dim=st.integers(1, 4).map(lambda n: 2 * n),
    bias=st.booleans(),
)
def test_qkv_is_the_literal_interleave(groups, q_per_group, head_dim, bias):
    heads = groups * q_per_group
    tail = () if bias else (3,)
    q, k, v = (
        torch.arange(n * head_dim * (1 if bias else 3)).reshape(-1, *tail) + 10_000 * i
        for i, n in enumerate((heads, groups, groups))
    )
    layout = FusedQKV(groups, q_per_group)
    full = layout.join((q, k, v))
    expected = literal_qkv(q, k, v, groups=groups, q_per_group=q_per_group, head_dim=head_dim)
    assert torch.equal(full, expected)
    for part, original in zip(layout.split(full), (q, k, v), strict=True):
        assert torch.equal(part, original)
    # A rank that owns whole groups holds exactly the interleave of its own heads.
    for tp in (n for n in range(1, groups + 1) if groups % n == 0):
        for rank in range(tp):
            own = literal_qkv(
                *(part.chunk(tp)[rank] for part in (q, k, v)),
                groups=groups // tp,
                q_per_group=q_per_group,
                head_dim=head_dim,
            )
            assert torch.equal(layout.shard(full, rank, tp), own)


@settings(deadline=None, max_examples=40)
@given(
    groups=st.integers(1, 4),
    q_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    tp=st.integers(1, 16),
    vocab=st.integers(1, 70),
    divisor=st.sampled_from([1, 3, 8, 128]),
)
def test_any_tp_either_round_trips_or_is_refused(groups, q_per_group, head_dim, tp, vocab, divisor):
    mapping = parameter_map(
        config("qwen2", heads=groups * q_per_group, groups=groups, head_dim=head_dim, vocab=vocab),
        make_vocab_size_divisible_by=divisor,
    )
    assert 1 in mapping.tp_sizes()
    if tp not in mapping.tp_sizes():
        with pytest.raises(ValueError, match=f"size {tp} .*Sizes that work"):
            mapping.check_tp(tp)
        return
    mapping.check_tp(tp)
    checkpoint = random_checkpoint(mapping)
    returned = {}
    for entry in mapping:
        full = entry.to_megatron(checkpoint)
        shards = [entry.shard(full, tp_rank=rank, tp_size=tp) for rank in range(tp)]
        returned |= entry.to_hf(entry.unshard(shards))
    assert_same(returned, checkpoint)


def test_gate_up_shard_holds_gate_and_up_of_the_rank():
    mapping = parameter_map(config())
    entry = mapping.entry("decoder.layers.1.mlp.linear_fc1.weight")
    checkpoint = random_checkpoint(mapping)
    gate, up = (checkpoint[name] for name in entry.hf_names)
    full = entry.to_megatron(checkpoint)
    for rank in range(4):
        rows = range(rank * 10, rank * 10 + 10)
        literal = torch.stack([gate[r] for r in rows] + [up[r] for r in rows])
        assert same_bits(entry.shard(full, tp_rank=rank, tp_size=4), literal)


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_is_padded_with_zeros_and_cut(tied):
    mapping = parameter_map(config(tied=tied, vocab=101), make_vocab_size_divisible_by=16)
    assert [mapping.padded_vocab_size(tp) for tp in (1, 2, 4, 8)] == [112, 128, 128, 128]
    checkpoint = random_checkpoint(mapping)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        entry = mapping.entry(name)
        full = entry.to_megatron(checkpoint)
        padded = torch.cat([entry.shard(full, tp_rank=r, tp_size=8) for r in range(8)])
        assert padded.shape == (128, 24) and not padded[101:].view(torch.uint8).any()
        assert same_bits(padded[:101], full)
        assert_same(entry.to_hf(padded), {entry.hf_names[0]: checkpoint[entry.hf_names[0]]})


def test_a_rank_may_hold_padding_only():
    entry = parameter_map(config(vocab=3), make_vocab_size_divisible_by=1).entries[0]
    full = torch.ones(3, 24)
    assert entry.shard_shape(4) == (1, 24)
    assert not entry.shard(full, tp_rank=3, tp_size=4).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_layouts_carry_codes_and_block_scales(dtype):
    """Joining codes and joining per-block scales commute with looking up a row's block."""
    groups, q_per_group, block, blocks_per_head = 2, 3, 4, 2
    layout = FusedQKV(groups, q_per_group)
    heads = (groups * q_per_group, groups, groups)
    scales = [
        torch.arange(n * blocks_per_head, dtype=torch.uint8)[:, None] + 50 * i
        for i, n in enumerate(heads)
    ]
    codes = [scale.repeat_interleave(block, 0).expand(-1, 5).contiguous() for scale in scales]
    full_codes = layout.join([code.view(dtype) for code in codes]).view(torch.uint8)
    full_scales = layout.join([scale.view(dtype) for scale in scales]).view(torch.uint8)
    assert torch.equal(full_codes, full_scales.repeat_interleave(block, 0).expand(-1, 5))
    for rank in range(2):
        shard = layout.shard(full_scales, rank, 2).repeat_interleave(block, 0).expand(-1, 5)
        assert torch.equal(layout.shard(full_codes, rank, 2), shard)
    for part, original in zip(layout.split(full_scales), scales, strict=True):
        assert torch.equal(part, original)


def test_entries_follow_the_forward_pass():
    mapping = parameter_map(config("qwen3"))
    layers = [entry.layer for entry in mapping]
    assert layers == [None] + [0] * 8 + [1] * 8 + [None, None]
    assert [entry.megatron_name for entry in mapping][:9] == [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ]
    assert [entry.megatron_name for entry in mapping][-2:] == [
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    kinds = {entry.megatron_name.split(".")[-2]: (entry.kind, entry.tp_axis) for entry in mapping}
    assert kinds["linear_qkv"] == ("fused_qkv", 0)
    assert kinds["linear_fc1"] == ("fused_gate_up", 0)
    assert kinds["linear_proj"] == kinds["linear_fc2"] == ("row", 1)
    assert kinds["word_embeddings"] == kinds["output_layer"] == ("vocab", 0)
    assert kinds["q_layernorm"] == kinds["final_layernorm"] == ("replicated", None)


def test_map_accepts_a_spec():
    assert parameter_map(model_spec(config("qwen2"))) == parameter_map(config("qwen2"))


def test_impossible_tp_names_what_works():
    """SmolLM2-135M: 9 heads in 3 groups; at TP 9 the fused rows do not divide."""
    mapping = parameter_map(
        config(heads=9, groups=3, head_dim=64, hidden_size=576, intermediate_size=1536)
    )
    assert mapping.tp_sizes() == (1, 3)
    with pytest.raises(ValueError, match=r"size 2 .*9 query heads\. .*this model: 1, 3\."):
        mapping.check_tp(2)
    entry = mapping.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    with pytest.raises(ValueError, match="linear_qkv.weight .*size 9: there are 960 fused rows"):
        entry.shard(torch.zeros(entry.shape), tp_rank=0, tp_size=9)
    with pytest.raises(ValueError, match="feed-forward width is 40"):
        parameter_map(config(heads=16, groups=16)).check_tp(16)
    with pytest.raises(ValueError, match="there are 4 query groups"):
        parameter_map(config(heads=24, groups=4)).check_tp(6)


@functools.cache
def tied_map():
    return parameter_map(config(tied=True))


def test_check_hf_keys():
    mapping = parameter_map(config())
    keys = list(mapping.hf_shapes)
    mapping.check_hf_keys(keys)
    mapping.check_hf_keys(
        [*keys, "model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    )
    wrong = [key for key in keys if key != "lm_head.weight"]
    wrong += ["model.norm.weight", "model.layers.2.self_attn.rotary_emb.inv_freq", "extra"]
    with pytest.raises(ValueError) as error:
        mapping.check_hf_keys(wrong)
    assert str(error.value).endswith(
        "missing lm_head.weight; unexpected extra, "
        "model.layers.2.self_attn.rotary_emb.inv_freq; duplicate model.norm.weight."
    )
    with pytest.raises(ValueError, match="and 13 more"):
        mapping.check_hf_keys([])


def test_check_megatron_keys():
    keys = [entry.megatron_name for entry in tied_map()]
    tied_map().check_megatron_keys([*keys, "decoder.layers.0.mlp.linear_fc1._extra_state"])
    tied_map().check_megatron_keys([*keys, "output_layer.weight"])
    with pytest.raises(ValueError, match="missing decoder.final_layernorm.weight; unexpected x"):
        tied_map().check_megatron_keys([*keys[:-1], "x"])
    with pytest.raises(ValueError, match="missing output_layer.weight"):
        parameter_map(config()).check_megatron_keys(keys)
    with pytest.raises(ValueError, match="duplicate decoder.final_layernorm.weight"):
        tied_map().check_megatron_keys([*keys, keys[-1]])


def test_tied_head_in_the_file_must_equal_the_embedding():
    checkpoint = random_checkpoint(tied_map())
    embedding = tied_map().entry("embedding.word_embeddings.weight")
    assert tied_map().entry("output_layer.weight") is embedding
    tied_map().check_hf_keys([*checkpoint, "lm_head.weight"])
    head = checkpoint["model.embed_tokens.weight"].clone()
    full = embedding.to_megatron(checkpoint | {"lm_head.weight": head})
    assert list(embedding.to_hf(full)) == ["model.embed_tokens.weight"]
    head[3, 3] = -head[3, 3]
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        embedding.to_megatron(checkpoint | {"lm_head.weight": head})


def test_wrong_tensors_are_named():
    mapping = parameter_map(config())
    checkpoint = random_checkpoint(mapping)
    entry = mapping.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = entry.hf_names
    with pytest.raises(ValueError, match=f"needs {k}, which is missing"):
        entry.to_megatron({q: checkpoint[q], v: checkpoint[v]})
    with pytest.raises(ValueError, match=rf"{k} has shape \[12, 24\].*\[24, 24\]"):
        entry.to_megatron(checkpoint | {k: checkpoint[k][:12]})
    with pytest.raises(ValueError, match=f"{v} is torch.float32 but {q} is torch.bfloat16"):
        entry.to_megatron(checkpoint | {v: checkpoint[v].float()})
    full = entry.to_megatron(checkpoint)
    with pytest.raises(ValueError, match=r"\[95, 24\], expected \[96, 24\]"):
        entry.to_hf(full[:95])
    with pytest.raises(ValueError, match=r"1 pieces of .*give \[48, 24\]"):
        entry.unshard([entry.shard(full, tp_rank=0, tp_size=2)])
    with pytest.raises(ValueError, match="no Megatron parameter decoder.layers.2"):
        mapping.entry("decoder.layers.2.mlp.linear_fc2.weight")


def test_replicas_that_drifted_apart_are_an_error():
    entry = parameter_map(config()).entry("decoder.final_layernorm.weight")
    weight = torch.full((24,), torch.nan)
    assert entry.unshard([weight, weight.clone()]) is weight
    with pytest.raises(ValueError, match="ranks 0 and 1"):
        entry.unshard([weight, torch.zeros(24)])
