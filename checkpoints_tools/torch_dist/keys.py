"""Where a Megatron parameter lies in a `torch_dist` checkpoint.

megatron-core stores layers stacked: `decoder.layers.5.mlp.linear_fc2.weight` is index 5 of the
leading axis of key `decoder.layers.mlp.linear_fc2.weight`, and expert 3 of that layer is index
`[5, 3]` of `decoder.layers.mlp.experts.experts.linear_fc2.weight`. Models whose layers differ, and
newer versions on request, have a key per layer, or per layer and expert, where moreover the gate
and the up projection may be apart (`..._w`, `..._v`). Two norms are stored under the name that they
have in Transformer Engine's fused layers. All of these are found; one is written.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_rl.models import ParameterMap
from megatron_rl.models.entry import ParameterEntry

_LAYER = re.compile(r"decoder\.layers\.\d+\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_EXPERTS = "mlp.experts.experts."
# Live name in the local layer spec -> name in Transformer Engine's fused layers.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# Parts of a model; other keys are the optimizer's and the random states'.
_MODEL = ("embedding.", "encoder.", "decoder.", "output_layer.", "mtp.")
# Modules whose Transformer Engine form keeps an extra state, which Megatron asks for on loading.
_STATEFUL = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True, slots=True)
class Location:
    """A parameter, or half of one, in a checkpoint."""

    keys: tuple[str, ...]
    """One key, or those of the gate and of the up projection."""
    index: tuple[int, ...]
    """Place on the leading axes: layer, expert."""
    stack: tuple[int, ...]
    """Sizes of the leading axes."""


def is_model_key(key: str) -> bool:
    """Whether a key is of the model's weights."""
    return key.startswith(_MODEL) and not key.endswith("._extra_state")


class KeyMap:
    """The keys of one model's parameters."""

    def __init__(self, parameters: ParameterMap) -> None:
        self._num_layers = parameters.spec.num_layers
        self._modules: dict[int, list[str]] = {}
        self._expert_layers: set[int] = set()
        self._num_experts = 0
        layers: dict[int, set[str]] = {}
        for entry in parameters:
            if entry.layer is None:
                continue
            rest = _rest(entry)
            layers.setdefault(entry.layer, set()).add(rest)
            self._modules.setdefault(entry.layer, []).append(rest.rpartition(".")[0])
            if expert := _EXPERT.fullmatch(rest):
                self._expert_layers.add(entry.layer)
                self._num_experts = max(self._num_experts, int(expert[1]) + 1)
        # Megatron stacks layers that all have the same parameters.
        self._stacked = len(set(map(frozenset, layers.values()))) == 1

    def find(self, entry: ParameterEntry, has: Callable[[str], bool]) -> Location:
        """Where a checkpoint has a parameter.

        Args:
            entry: The parameter.
            has: Whether the checkpoint has a key.

        Raises:
            ValueError: Nowhere.
        """
        for place in self._candidates(entry):
            if all(map(has, place.keys)):
                return place
        wanted = next(self._candidates(entry)).keys[0]
        raise ValueError(
            f"the checkpoint lacks {wanted}, where {entry.megatron_name} should be: it and the "
            "model config are not of one model."
        )

    def _candidates(self, entry: ParameterEntry) -> Iterator[Location]:
        """Everywhere that a parameter may be, Megatron's default first."""
        if entry.layer is None:
            yield Location((entry.megatron_name,), (), ())
            return
        rest = _rest(entry)
        expert = _EXPERT.fullmatch(rest)
        for prefix, index, stack in (self._prefix(entry.layer, True), self._prefix(entry.layer)):
            if expert:
                yield self._stacked_expert(prefix, index, stack, expert)
                names = [f"{prefix}{_EXPERTS}{expert[1]}.{expert[2]}"]
            else:
                names = [prefix + name for name in (_FUSED_NORMS.get(rest), rest) if name]
            for name in names:
                yield Location((name,), index, stack)
                if entry.kind == "fused_gate_up":
                    yield Location((f"{name}_w", f"{name}_v"), index, stack)

    def written(self, entry: ParameterEntry) -> list[Location]:
        """Where a parameter is written: everywhere that megatron-core's layer specs look for it."""
        if entry.layer is None:
            return [Location((entry.megatron_name,), (), ())]
        rest = _rest(entry)
        prefix, index, stack = self._prefix(entry.layer, self._stacked)
        if expert := _EXPERT.fullmatch(rest):
            return [self._stacked_expert(prefix, index, stack, expert)]
        names = [_FUSED_NORMS.get(rest, rest)]
        if rest.startswith("pre_mlp") and entry.layer in self._expert_layers:
            # The local layer spec renames it even there; Transformer Engine fuses no norm with
            # experts.
            names.append(rest)
        return [Location((prefix + name,), index, stack) for name in names]

    def extra_states(self) -> Iterator[str]:
        """Keys of the (empty) extra states that Megatron's layers ask for when they load."""
        yield "decoder.final_layernorm._extra_state/shard_0_1"
        for layer, modules in self._modules.items():
            prefix, index, stack = self._prefix(layer, self._stacked)
            for module in dict.fromkeys([*modules, "self_attention.core_attention"]):
                if expert := _EXPERT.fullmatch(module):
                    place = self._stacked_expert(prefix, index, stack, expert)
                    yield _extra_state(place.keys[0], place.index, place.stack)
                elif module in _STATEFUL or (
                    module == "pre_mlp_layernorm" and layer in self._expert_layers
                ):
                    yield _extra_state(prefix + module, index or (0,), stack or (1,))

    def _prefix(
        self, layer: int, stacked: bool = False
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        if stacked:
            return "decoder.layers.", (layer,), (self._num_layers,)
        return f"decoder.layers.{layer}.", (), ()

    def _stacked_expert(
        self, prefix: str, index: tuple[int, ...], stack: tuple[int, ...], expert: re.Match[str]
    ) -> Location:
        key = f"{prefix}{_EXPERTS}{expert[2]}"
        return Location((key,), (*index, int(expert[1])), (*stack, self._num_experts))


def _extra_state(module: str, index: tuple[int, ...], stack: tuple[int, ...]) -> str:
    return f"{module}._extra_state/shard_{_dotted(index)}_{_dotted(stack)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _rest(entry: ParameterEntry) -> str:
    """The name of a layer's parameter within its layer."""
    match = _LAYER.fullmatch(entry.megatron_name)
    assert match is not None, entry.megatron_name
    return match[1]
