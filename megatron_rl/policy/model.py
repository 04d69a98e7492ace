"""The policy's model: Megatron's GPTModel, described by a ModelSpec and a precision flow.

Adds to GPTModel what RL needs and pre-training does not: packed prompt groups with explicit
positions, and a head that returns log-probs and entropies of chosen tokens without ever holding all
logits.
"""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.config import PolicyConfig
from megatron_rl.models import ModelSpec
from megatron_rl.platforms import current_platform
from megatron_rl.policy.attention import GroupAttention, PackedGroupParams
from megatron_rl.policy.fp8_linear import (
    BlockScaledColumnParallelLinear,
    BlockScaledRowParallelLinear,
)
from megatron_rl.policy.logprobs import VocabShard, token_logprobs, vocab_shard
from megatron_rl.policy.norm import RMSNorm
from megatron_rl.policy.packing import PackedGroups
from megatron_rl.policy.rotary import inverse_frequencies
from megatron_rl.precision import (
    BlockFormat,
    LinearPlan,
    PrecisionFlow,
    format_str,
    megatron_precision,
    te,
)
from megatron_rl.precision.formats import LinearFormats

NOT_OFFERED = {
    "context_parallel_size": "prompt groups are not split over ranks",
    "expert_model_parallel_size": "there is no mixture-of-experts family",
    "num_moe_experts": "there is no mixture-of-experts family",
    "virtual_pipeline_model_parallel_size": "a rank holds one stage of consecutive layers",
    "fp8": "the precision flow decides formats",
    "fp4": "the precision flow decides formats",
    "mtp_num_layers": "multi-token prediction is not trained",
}
"""Options of Megatron that would build something the rest of the system does not follow."""
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm")
"""What selective recompute can name in a dense layer; Megatron's others are of MoE and MLA."""
VOCAB_DIVISOR = 1
"""The vocabulary is padded to a multiple of this times TP: no further than sharding needs."""


def transformer_config(
    spec: ModelSpec, flow: PrecisionFlow, config: PolicyConfig
) -> TransformerConfig:
    """Megatron's configuration of the model.

    Raises:
        ValueError: ``policy.megatron`` names an unknown option, or one that the model or the flow
            decides; or the device cannot compute the flow.
    """
    pp = config.pipeline_model_parallel_size
    if spec.num_layers % pp:
        raise ValueError(
            f"the model's {spec.num_layers} layers cannot be divided into "
            f"policy.pipeline_model_parallel_size={pp} stages; choose a divisor"
        )
    derived: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden_size,
        layernorm_epsilon=spec.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=pp,
        sequence_parallel=config.sequence_parallel and config.tensor_model_parallel_size > 1,
        pipeline_dtype=megatron_precision(flow)["params_dtype"] if pp > 1 else None,
        variable_seq_lengths=pp > 1,
        moe_token_dispatcher_type="alltoall",  # the only one that variable lengths allow
        # The loss arrives normalised over the global mini-batch; Megatron must only sum.
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **megatron_precision(flow),
    )
    if uses_transformer_engine(flow):
        if problem := te.device_violation(flow, torch.cuda.get_device_capability()):
            raise ValueError(problem)
        # Parameters must be on the device for TE to quantise them.
        derived |= te.megatron_options(flow) | {"use_cpu_initialization": False}
        if config.overlap_param_gather and config.megatron.get("fp8_param"):
            raise ValueError(
                "policy.overlap_param_gather=true leaves the transposed codes of "
                "policy.megatron.fp8_param=true behind the others; set one of them to false"
            )
    elif config.megatron.get("fp8_param"):
        raise ValueError(
            "policy.megatron.fp8_param=true keeps parameters in FP8, which needs CUDA and a flow "
            "that trains quantised, such as fp8; remove it"
        )
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in config.megatron:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {nearest[0]!r}?" if nearest else "see Megatron's TransformerConfig"
            )
            raise ValueError(f"policy.megatron.{name} is no option of TransformerConfig; {hint}")
        if name in NOT_OFFERED:
            raise ValueError(
                f"policy.megatron.{name} is not offered: {NOT_OFFERED[name]}; remove it"
            )
        if name in derived:
            raise ValueError(
                f"policy.megatron.{name} follows from the model, the precision flow or another "
                "policy option and cannot be set here; remove it"
            )
    _check_recompute(config.megatron.get("recompute_modules") or ())
    return TransformerConfig(**derived, **config.megatron)


def _check_recompute(modules: Sequence[str]) -> None:
    for name in modules:
        if name not in RECOMPUTE_MODULES:
            raise ValueError(
                f"policy.megatron.recompute_modules names {name!r}, which the model does not have; "
                f"choose among {', '.join(RECOMPUTE_MODULES)}"
            )
    if "layernorm" in modules and not HAVE_TE:
        raise ValueError(
            "policy.megatron.recompute_modules names 'layernorm', whose recompute in Megatron "
            "needs Transformer Engine, and it is not installed; remove 'layernorm'"
        )


def block_spec(
    spec: ModelSpec, flow: PrecisionFlow, plan: LinearPlan, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, as module specs."""
    first = get_transformer_layer_offset(config)
    layers = [
        _layer_spec(spec, flow, plan, first + i) for i in range(get_num_layers_to_build(config))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(spec: ModelSpec, flow: PrecisionFlow, plan: LinearPlan, number: int) -> ModuleSpec:
    """One decoder layer, counted from 0 over the whole model."""
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.core_attention = ModuleSpec(
        GroupAttention,
        params={
            "rollout_kernel": "attention" in flow.shared_operators
            and current_platform().name == "cpu"
        },
    )
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if flow.trains_quantised:
        column, row = _linear_classes(flow)
        for part, prefix, name, module in (
            (attention, "self_attention", "linear_qkv", column),
            (attention, "self_attention", "linear_proj", row),
            (mlp, "mlp", "linear_fc1", column),
            (mlp, "mlp", "linear_fc2", row),
        ):
            if plan.is_quantised(f"decoder.layers.{number}.{prefix}.{name}"):
                params = {"formats": linear_formats(flow)}
                setattr(part, name, ModuleSpec(module, params=params))
    return layer


def uses_transformer_engine(flow: PrecisionFlow) -> bool:
    """Whether quantised linears are Transformer Engine's: on CUDA, and nowhere else."""
    return flow.trains_quantised and current_platform().name == "cuda"


def tokens_multiple(flow: PrecisionFlow, config: TransformerConfig) -> int:
    """What the tokens of a micro-batch are padded to a multiple of."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if not uses_transformer_engine(flow):
        return ranks
    return te.TOKENS_MULTIPLE if ranks == 1 else te.GATHER_TOKENS_MULTIPLE * ranks


def _linear_classes(flow: PrecisionFlow) -> tuple[type, type]:
    """Column- and row-parallel layers that compute block-scaled products on this platform."""
    if not uses_transformer_engine(flow):
        return BlockScaledColumnParallelLinear, BlockScaledRowParallelLinear
    from megatron_rl.policy import te_linear

    te.configure_recipe(flow)
    return (
        te_linear.TransformerEngineColumnParallelLinear,
        te_linear.TransformerEngineRowParallelLinear,
    )


def linear_formats(flow: PrecisionFlow) -> LinearFormats:
    """Operand formats of the flow's quantised linears in training.

    Raises:
        ValueError: Megatron's layers here do not compute the flow's format.
    """
    formats = flow.linear_weight, flow.linear_input, flow.output_gradient
    if not all(isinstance(fmt, BlockFormat) for fmt in formats):
        raise ValueError(
            f"flow {flow.name!r} trains linears in {', '.join(map(format_str, formats))}, which "
            "no linear layer here computes; use fp8, whose formats are block-scaled E4M3"
        )
    weight, inputs, gradient = formats
    return LinearFormats(weight=weight, input=inputs, output_gradient=gradient)


class PolicyModel(GPTModel):
    """GPTModel over packed prompt groups, with a log-prob head."""

    def __init__(
        self,
        spec: ModelSpec,
        flow: PrecisionFlow,
        plan: LinearPlan,
        config: TransformerConfig,
        padded_vocab_size: int,
    ) -> None:
        super().__init__(
            config,
            block_spec(spec, flow, plan, config),
            vocab_size=padded_vocab_size,
            max_sequence_length=spec.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=spec.tie_word_embeddings,
            position_embedding_type="rope",
        )
        self.spec = spec
        self.inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim)
        self.head_in_fp32 = flow.lm_head == "float32"
        self.before_head: Callable[[torch.nn.Parameter], None] | None = None
        """Called with the output weight before the head reads it: no module's forward does."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        packed: PackedGroups,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        with_entropy: bool = True,
        return_logits: bool = False,
    ) -> Any:
        """One micro-batch.

        Args:
            input_ids: ``[1, T]`` int64.
            position_ids: ``[1, T]`` int64.
            packed: The micro-batch that the ids belong to.
            temperature: Divides the logits.
            chunk_tokens: Rows of logits alive at one time.
            with_entropy: Compute entropies.
            return_logits: Return all logits of the stream instead (tests and verification), on a
                TP rank those of its part of the vocabulary.

        Returns:
            On the last stage log-probs ``[R]`` and entropies ``[R]`` in float32, or logits ``[T,
            V]``; on others the hidden states ``[T, 1, H]``.
        """
        hidden = self.embedding(input_ids, position_ids) if self.pre_process else None
        angles = position_ids[0].float()[:, None] * self.inverse_frequencies.to(position_ids.device)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), dim=-1)[:, None, None, :],
            packed_seq_params=PackedGroupParams(spans=packed.spans),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The head sums its input's gradient over TP ranks itself.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight, shard = self.head()
        hidden = hidden.squeeze(1)
        if self.head_in_fp32:
            hidden, weight = hidden.float(), weight.float()
        if return_logits:
            return F.linear(hidden, weight[: shard.num_valid])
        return token_logprobs(
            hidden[packed.predict_index],
            weight,
            packed.target_ids,
            shard=shard,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )

    def head(self) -> tuple[torch.Tensor, VocabShard]:
        """The output weight of this rank (padding included) and its place in the vocabulary."""
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        if self.before_head is not None:
            self.before_head(weight)
        group = parallel_state.get_tensor_model_parallel_group()
        return weight, vocab_shard(self.spec.vocab_size, weight.shape[0], group)
