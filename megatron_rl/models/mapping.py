"""The parameter map: every Megatron parameter of a model, and where it lies in Hugging Face's.

Weight sync walks it from Megatron to Hugging Face, the checkpoint tools in both directions, so that
a name or a layout is written down once. The map is complete by construction (it is made from the
config), hence the checks of key sets: a checkpoint with a tensor too few or too many is an error
that names it, never a model with some random weights in it.

Megatron's names are those of megatron-core's GPTModel with the local layer spec, experts one by one
(`SequentialMLP`) and with global numbers. Multi-token prediction is not described.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.models.entry import ParameterEntry
from megatron_rl.models.hf_config import HFConfig, model_spec
from megatron_rl.models.layout import FusedGateUp, FusedQKV, Layout, Replicated, Sliced, Vocab
from megatron_rl.models.registry import family_named
from megatron_rl.models.spec import ModelSpec

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MEGATRON_HEAD = "output_layer.weight"
# How many names an error message lists.
_MAX_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class ParameterMap:
    """Ordered entries: embedding, decoder layers, final norm, output head (unless tied)."""

    spec: ModelSpec
    """The model."""
    entries: tuple[ParameterEntry, ...]
    """One entry a Megatron parameter, in forward order."""
    make_vocab_size_divisible_by: int
    """Vocabulary rows are padded to a multiple of this times the tensor-parallel size."""

    def __iter__(self) -> Iterator[ParameterEntry]:
        """Iterate over the entries in forward order."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Count the entries."""
        return len(self.entries)

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor and its shape, in map order."""
        return {
            name: shape
            for entry in self.entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
        }

    @cached_property
    def _by_megatron_name(self) -> dict[str, ParameterEntry]:
        found = {entry.megatron_name: entry for entry in self.entries}
        return found | ({_MEGATRON_HEAD: self.entries[0]} if self.spec.tie_word_embeddings else {})

    @property
    def ignored_hf_keys(self) -> frozenset[str]:
        """Buffers that old checkpoints carry and that follow from the config."""
        layers = range(self.spec.num_layers)
        return frozenset(
            ["model.rotary_emb.inv_freq"]
            + [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers]
        )

    def entry(self, megatron_name: str) -> ParameterEntry:
        """Look up an entry.

        Args:
            megatron_name: Name with a global layer number. For a tied model `output_layer.weight`
                (the last pipeline stage's copy of the embedding) gives the embedding's entry.

        Raises:
            ValueError: The model has no such parameter.
        """
        if megatron_name not in self._by_megatron_name:
            raise ValueError(f"{self.spec.architecture} has no Megatron parameter {megatron_name}.")
        return self._by_megatron_name[megatron_name]

    def padded_vocab_size(self, tp_size: int) -> int:
        """Vocabulary rows that Megatron allocates at a tensor-parallel size."""
        layout = self.entries[0].layout
        assert isinstance(layout, Vocab)
        return layout.padded_size(tp_size)

    def tp_sizes(self) -> tuple[int, ...]:
        """All tensor-parallel sizes that can split this model."""
        kinds = {(entry.layout, entry.shape): entry for entry in self.entries}.values()
        return tuple(
            size
            for size in range(1, self.spec.num_attention_heads + 1)
            if not any(entry.tp_problem(size) for entry in kinds)
        )

    def check_tp(self, tp_size: int) -> None:
        """Check that the model can be split `tp_size` ways.

        Raises:
            ValueError: It cannot; says why and which sizes work.
        """
        for entry in self.entries:
            problem = entry.tp_problem(tp_size)
            if problem:
                works = ", ".join(map(str, self.tp_sizes()))
                raise ValueError(
                    f"Tensor parallel size {tp_size} cannot split {entry.megatron_name}: "
                    f"{problem}. Sizes that work for this model: {works}."
                )

    def check_hf_keys(self, keys: Iterable[str]) -> None:
        """Check that a Hugging Face checkpoint has exactly this model's tensors.

        Args:
            keys: All tensor names of the checkpoint, repeated ones repeated. A tied model may
                carry `lm_head.weight`, whose values `ParameterEntry.to_megatron` then compares.

        Raises:
            ValueError: Keys are missing, unexpected or duplicate; names them.
        """
        optional = set(self.ignored_hf_keys)
        if self.spec.tie_word_embeddings:
            optional.add(_HEAD)
        problem = _key_problem(list(keys), set(self.hf_shapes), optional)
        if problem:
            raise ValueError(f"The Hugging Face checkpoint does not fit its config: {problem}.")

    def check_megatron_keys(self, keys: Iterable[str]) -> None:
        """Check that a set of Megatron parameters is exactly this model's.

        Args:
            keys: Parameter names with global layer numbers, over all pipeline stages, each once.
                A tied model may carry the last stage's `output_layer.weight`; Transformer Engine's
                `_extra_state` entries are passed over.

        Raises:
            ValueError: Keys are missing, unexpected or duplicate; names them.
        """
        optional = {_MEGATRON_HEAD} if self.spec.tie_word_embeddings else set()
        given = [key for key in keys if not key.endswith("._extra_state")]
        problem = _key_problem(given, {entry.megatron_name for entry in self.entries}, optional)
        if problem:
            raise ValueError(f"The Megatron parameters do not fit the model: {problem}.")


def parameter_map(
    hf_config: HFConfig | ModelSpec, *, make_vocab_size_divisible_by: int = 128
) -> ParameterMap:
    """Make the parameter map of a model.

    Args:
        hf_config: Content of `config.json`, a transformers config object, or a ready `ModelSpec`.
        make_vocab_size_divisible_by: Megatron's option of that name.

    Returns:
        The map.

    Raises:
        ValueError: The config is not of a supported model.
    """
    assert make_vocab_size_divisible_by >= 1
    spec = hf_config if isinstance(hf_config, ModelSpec) else model_spec(hf_config)
    vocab = Vocab(spec.vocab_size, make_vocab_size_divisible_by)
    matrix = (spec.vocab_size, spec.hidden_size)
    tied = spec.tie_word_embeddings
    entries = [
        ParameterEntry(
            megatron_name="embedding.word_embeddings.weight",
            hf_names=(_EMBEDDING,),
            hf_shapes=(matrix,),
            layer=None,
            layout=vocab,
            tied_hf_name=_HEAD if tied else None,
        )
    ]
    for layer in range(spec.num_layers):
        entries += _layer_entries(spec, layer)
    entries.append(
        ParameterEntry(
            megatron_name="decoder.final_layernorm.weight",
            hf_names=("model.norm.weight",),
            hf_shapes=((spec.hidden_size,),),
            layer=None,
            layout=Replicated(),
        )
    )
    if not tied:
        entries.append(
            ParameterEntry(
                megatron_name=_MEGATRON_HEAD,
                hf_names=(_HEAD,),
                hf_shapes=(matrix,),
                layer=None,
                layout=vocab,
            )
        )
    return ParameterMap(
        spec=spec,
        entries=tuple(entries),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
    )


def _layer_entries(spec: ModelSpec, layer: int) -> Iterator[ParameterEntry]:
    hidden, head = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_attention_heads * head, spec.num_query_groups * head
    qkv = FusedQKV(spec.num_query_groups, spec.q_per_group)
    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def entry(
        megatron: str, layout: Layout, shapes: tuple[tuple[int, ...], ...], *hf: str
    ) -> ParameterEntry:
        kind = "bias" if megatron.endswith(".bias") else "weight"
        return ParameterEntry(
            megatron_name=f"decoder.layers.{layer}.{megatron}",
            hf_names=tuple(f"model.layers.{layer}.{name}.{kind}" for name in hf),
            hf_shapes=shapes,
            layer=layer,
            layout=layout,
        )

    whole = Replicated()
    yield entry("input_layernorm.weight", whole, ((hidden,),), "input_layernorm")
    qkv_shapes = ((q_size, hidden), (kv_size, hidden), (kv_size, hidden))
    yield entry("self_attention.linear_qkv.weight", qkv, qkv_shapes, *qkv_names)
    if spec.qkv_bias:
        bias_shapes = ((q_size,), (kv_size,), (kv_size,))
        yield entry("self_attention.linear_qkv.bias", qkv, bias_shapes, *qkv_names)
    if spec.qk_norm:
        yield entry("self_attention.q_layernorm.weight", whole, ((head,),), "self_attn.q_norm")
        yield entry("self_attention.k_layernorm.weight", whole, ((head,),), "self_attn.k_norm")
    proj_shape = ((hidden, q_size),)
    yield entry("self_attention.linear_proj.weight", Sliced(1), proj_shape, "self_attn.o_proj")
    yield entry("pre_mlp_layernorm.weight", whole, ((hidden,),), "post_attention_layernorm")

    def feed_forward(megatron: str, ffn: int, *hf: str) -> Iterator[ParameterEntry]:
        fc1_shapes = ((ffn, hidden), (ffn, hidden))
        yield entry(f"{megatron}.linear_fc1.weight", FusedGateUp(), fc1_shapes, *hf[:2])
        yield entry(f"{megatron}.linear_fc2.weight", Sliced(1), ((hidden, ffn),), hf[2])

    moe = spec.moe
    if moe is None or layer not in moe.layers:
        names = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
        yield from feed_forward("mlp", spec.ffn_hidden_size, *names)
        return
    spelling = family_named(spec.family).experts
    assert spelling is not None
    yield entry("mlp.router.weight", whole, ((moe.num_experts, hidden),), f"{spelling.block}.gate")
    for expert in range(moe.num_experts):
        names = (f"{spelling.block}.experts.{expert}.{part}" for part in spelling.projections)
        megatron = f"mlp.experts.local_experts.{expert}"
        yield from feed_forward(megatron, moe.ffn_hidden_size, *names)


def _key_problem(given: list[str], expected: set[str], optional: set[str]) -> str | None:
    present = set(given)
    problems = {
        "missing": sorted(expected - present),
        "unexpected": sorted(present - expected - optional),
        "duplicate": sorted(key for key, count in Counter(given).items() if count > 1),
    }
    texts = []
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            texts.append(f"{what} {', '.join(names[:_MAX_NAMES])}{more}")
    return "; ".join(texts) or None
