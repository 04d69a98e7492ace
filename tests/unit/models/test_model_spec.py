"""From Hugging Face configs to model specs: agreement with transformers, refusals, token ids."""

import json

import pytest

from megatron_rl.models import RopeSpec, eos_token_ids, families, family_of, model_spec

ARCHITECTURES = {family.name: family.architecture for family in families()}


def config(family="llama", **changes):
    """A config.json with only the keys that every family must have."""
    base = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 8,
        "intermediate_size": 160,
        "vocab_size": 101,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    if family == "mistral":
        base["sliding_window"] = None
    if family != "llama":
        base["num_key_value_heads"] = 4
    return base | changes


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_reads_every_field():
    spec = model_spec(
        config(
            "qwen3",
            head_dim=32,
            tie_word_embeddings=True,
            rope_theta=1000000,
            bos_token_id=5,
            pad_token_id=6,
            eos_token_id=[7, 8],
        ),
        generation_config={"eos_token_id": [8, 9]},
    )
    assert (spec.family, spec.architecture) == ("qwen3", "Qwen3ForCausalLM")
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size) == (3, 96, 160)
    assert (spec.num_attention_heads, spec.num_query_groups, spec.q_per_group) == (8, 4, 2)
    assert (spec.head_dim, spec.vocab_size, spec.max_position_embeddings) == (32, 101, 2048)
    assert spec.norm_epsilon == 1e-5
    assert spec.rope == RopeSpec(theta=1e6)
    assert spec.tie_word_embeddings and spec.qk_norm and not spec.qkv_bias
    assert (spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids) == (5, 6, (7, 8, 9))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_raw_json_and_transformers_object_agree(family):
    """Our defaults for absent keys are transformers' own."""
    transformers = pytest.importorskip("transformers")
    # 32 divides the absent-key defaults 8 and 32 of num_key_value_heads.
    raw = config(family, num_attention_heads=32, hidden_size=128, vocab_size=1000)
    if family != "llama":
        del raw["num_key_value_heads"]
    parsed = transformers.AutoConfig.for_model(**raw)
    assert model_spec(raw) == model_spec(parsed)
    assert model_spec(raw) == model_spec(json.loads(parsed.to_json_string()))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3},
    ],
)
def test_rope_spellings_agree(rope):
    """transformers 4 (both key names), transformers 5, both at once, and the parsed object."""
    transformers = pytest.importorskip("transformers")
    old = config(rope_theta=5e5, rope_scaling=rope)
    older_scaling = {("type" if k == "rope_type" else k): v for k, v in rope.items()}
    older = config(rope_theta=500000, rope_scaling=older_scaling)
    new = config(rope_parameters={"rope_theta": 5e5, **rope})
    both = config(rope_theta=5e5, rope_scaling=rope, rope_parameters={"rope_theta": 5e5, **rope})
    parsed = transformers.AutoConfig.for_model(**json.loads(json.dumps(old)))
    specs = {model_spec(c).rope for c in (old, older, new, both, parsed)}
    assert specs == {
        RopeSpec(
            theta=5e5, type=rope["rope_type"], **{k: rope[k] for k in rope if k != "rope_type"}
        )
    }


def test_rope_defaults_to_theta_10000():
    assert model_spec(config(rope_scaling=None)).rope == RopeSpec(theta=10000.0)


def test_head_dim_explicit_or_derived():
    assert model_spec(config()).head_dim == 12
    assert model_spec(config(head_dim=None)).head_dim == 12
    assert model_spec(config(head_dim=20)).head_dim == 20
    assert model_spec(config("qwen3")).head_dim == 128


def test_harmless_windows_are_accepted():
    assert model_spec(config("mistral", sliding_window=2048))
    assert model_spec(config("qwen2", sliding_window=128, use_sliding_window=False))
    assert model_spec(
        config("qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=3)
    )


def test_family_from_model_type_only_without_architectures():
    assert family_of({"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        family_of({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})


REFUSED = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
    ("llama", {"architectures": None, "model_type": "gemma"}, "'gemma'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("mistral", {"sliding_window": 1024}, "sliding_window=1024.*2048"),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1},
        "use_sliding_window=True.*max_window_layers=1",
    ),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("llama", {"hidden_size": None}, "no hidden_size"),
    ("llama", {"hidden_size": "96"}, "hidden_size='96'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads=8.*num_key_value_heads=3"),
    ("llama", {"hidden_size": 100}, "hidden_size=100.*num_attention_heads=8"),
    ("llama", {"head_dim": 15}, "head_dim=15"),
    ("llama", {"eos_token_id": 101}, "eos_token_id=101.*vocab_size=101"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ("llama", {"bos_token_id": -1}, "bos_token_id=-1"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}},
        "rope_parameters.low_freq_factor is missing",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor=4.0.*high_freq_factor=4.0",
    ),
    ("llama", {"rope_theta": 0}, "rope_theta is 0"),
    ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "disagree"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}},
        "disagree",
    ),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refusals_name_key_and_value(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        model_spec(config(family, **changes))
    assert "\n" not in str(error.value)


def test_config_of_wrong_type():
    with pytest.raises(ValueError, match="not list"):
        model_spec([])


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 3]}, (2, 3)),
        ({"eos_token_id": [4, 5]}, {"eos_token_id": 3}, (4, 5, 3)),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, (3,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {}, (2,)),
    ],
)
def test_eos_ids_of_both_files(in_config, in_generation, expected):
    assert eos_token_ids(config() | in_config, in_generation) == expected


def test_pad_id_outside_the_vocabulary_is_no_pad_id():
    assert model_spec(config(pad_token_id=-1)).pad_token_id is None
