"""The policy: a Megatron model with its optimizer, behind the few calls that the trainer makes."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module

from megatron_rl.config import PolicyConfig
from megatron_rl.models import ModelSpec, ParameterMap, linear_plan, parameter_map
from megatron_rl.platforms import current_platform
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.policy.execution import ExecutionOptions, Objective, TokenValues, run_groups
from megatron_rl.policy.fp8_linear import invalidate_codes
from megatron_rl.policy.loss_scale import DynamicLossScale
from megatron_rl.policy.model import (
    VOCAB_DIVISOR,
    PolicyModel,
    tokens_multiple,
    transformer_config,
)
from megatron_rl.policy.optimizer import build_optimizer, build_scheduler
from megatron_rl.policy.packing import PromptGroup
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.report import describe_model
from megatron_rl.policy.weights import (
    export_hf_weights,
    export_served_weights,
    load_hf_weights,
    mark_tensor_parallel,
)
from megatron_rl.precision import LinearPlan, PrecisionFlow
from megatron_rl.precision.audit import ModelReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one optimizer step did."""

    values: TokenValues
    """Log-probs and entropies before the step, and the loss."""
    grad_norm: float
    """Global gradient norm before clipping; NaN when the step was skipped."""
    lr: float
    """Learning rate of the step."""
    skipped: bool = False
    """An overflow skipped the step: weights, moments and schedule are as before (FP16 only)."""
    loss_scale: float | None = None
    """Loss scale after the step, with which the next one begins; None without one."""


class FrozenPolicy:
    """A policy that only scores: the reference of the KL term, or an evaluation of a checkpoint."""

    def __init__(
        self,
        spec: ModelSpec,
        flow: PrecisionFlow,
        config: PolicyConfig,
        layout: ParallelLayout,
    ) -> None:
        """Builds the model; :meth:`load` must fill it before use."""
        self.spec = spec
        self.flow = flow
        self.config = config
        self.layout = layout
        self.parameters: ParameterMap = parameter_map(
            spec, make_vocab_size_divisible_by=VOCAB_DIVISOR
        )
        self.parameters.check_tp(layout.tp_size)
        self.plan: LinearPlan = linear_plan(self.parameters, flow)
        self.megatron_config = transformer_config(spec, flow, config)
        vocab_size = self.parameters.padded_vocab_size(layout.tp_size)
        self.model = PolicyModel(spec, flow, self.plan, self.megatron_config, vocab_size).to(
            current_platform().device
        )
        mark_tensor_parallel(self.model, self.parameters)
        half = self.megatron_config.bf16 or self.megatron_config.fp16
        self.wrapped: torch.nn.Module = (
            Float16Module(self.megatron_config, self.model) if half else self.model
        )

    def load(
        self, tensors: Mapping[str, torch.Tensor], keys: Iterable[str]
    ) -> dict[str, torch.Tensor]:
        """Fills the weights from Hugging Face tensors; see :func:`load_hf_weights`."""
        unrounded = load_hf_weights(self.model, self.parameters, tensors, keys, self.layout)
        self.weights_changed()
        return unrounded

    def score(
        self,
        groups: Sequence[PromptGroup],
        shape: tuple[int, int],
        *,
        temperature: float,
        with_entropy: bool = False,
    ) -> TokenValues:
        """Log-probs (and entropies) of the groups' response tokens, without gradients."""
        self.wrapped.eval()
        with torch.no_grad():
            return run_groups(
                self._chunks(),
                groups,
                shape,
                self.layout,
                self._options(temperature, with_entropy),
            )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) pairs in layer order; they may share the model's memory."""
        return export_hf_weights(
            self.model, self.parameters, self.layout, self.megatron_config.params_dtype
        )

    def served_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`named_tensors`, with the codes and scales that quantised layers multiply by."""
        return export_served_weights(self.model, self.parameters, self.layout, self.flow, self.plan)

    def report(self) -> ModelReport:
        """What the live modules compute, for :func:`megatron_rl.precision.audit.audit`."""
        return describe_model(self.model, self.parameters, self.layout, self.served_tensors())

    def weights_changed(self) -> None:
        """To be called after every change of the weights: drops what was derived from them."""
        invalidate_codes(self.model)

    def _chunks(self) -> list[torch.nn.Module]:
        return [self.wrapped]

    def _options(self, temperature: float, with_entropy: bool) -> ExecutionOptions:
        return ExecutionOptions(
            micro_batch_tokens=self.config.micro_batch_tokens,
            share_prefix=self.config.share_prompt_prefix,
            chunk_tokens=self.config.logprob_chunk_tokens,
            pad_to_multiple=tokens_multiple(self.flow, self.megatron_config),
            temperature=temperature,
            with_entropy=with_entropy,
        )


class Policy(FrozenPolicy):
    """The trained policy: adds DDP, the distributed optimizer and the learning-rate schedule."""

    optimizer: Any
    scheduler: Any
    ddp: DistributedDataParallel
    loss_scale: DynamicLossScale | None = None

    def load(
        self, tensors: Mapping[str, torch.Tensor], keys: Iterable[str]
    ) -> dict[str, torch.Tensor]:
        """Fills the weights; the optimizer must not exist yet, since it copies them."""
        assert not hasattr(self, "optimizer"), "load weights before make_trainable"
        return super().load(tensors, keys)

    def make_trainable(
        self, total_optimizer_steps: int, unrounded: Mapping[str, torch.Tensor]
    ) -> None:
        """Wraps the loaded model for training.

        Args:
            total_optimizer_steps: Length of the run, for the schedule.
            unrounded: What :meth:`load` returned: master weights finer than the parameters.
        """
        self.ddp = DistributedDataParallel(
            self.megatron_config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=self.flow.gradient_reduction == "float32",
                use_distributed_optimizer=True,
                overlap_grad_reduce=self.config.overlap_grad_reduce,
                overlap_param_gather=self.config.overlap_param_gather,
                fp8_param_gather=self.megatron_config.fp8_param,
            ),
            self.wrapped,
        )
        if self.config.overlap_grad_reduce:
            # Only the last micro-batch's backward starts the reduction.
            self.megatron_config.no_sync_func = self.ddp.no_sync
        if self.config.overlap_param_gather:
            self.model.before_head = self._wait_for_parameter
        self.optimizer = build_optimizer([self.ddp], self.config.optimizer, self.flow)
        if unrounded:
            self.optimizer.reload_model_params(state_dict=dict(unrounded))
        if self.flow.loss_scale is not None:
            self.loss_scale = DynamicLossScale(self.flow.loss_scale, self.optimizer)
        self.scheduler = build_scheduler(
            self.optimizer, self.config.optimizer, total_optimizer_steps
        )
        self.megatron_config.finalize_model_grads_func = _sum_gradients
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss

    def update(
        self,
        groups: Sequence[PromptGroup],
        shape: tuple[int, int],
        objective: Objective,
        *,
        temperature: float,
        with_entropy: bool = True,
    ) -> UpdateResult:
        """One optimizer step on the objective; with a loss scale, an overflow skips it.

        Raises:
            NonFiniteError: The loss or gradient norm is NaN or Inf. After a bad loss the weights
                are as before; after a bad norm they are not to be used. With a loss scale: it
                cannot be lowered further.
        """
        self.wrapped.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        values = run_groups(
            self._chunks(),
            groups,
            shape,
            self.layout,
            self._options(temperature, with_entropy),
            objective,
        )
        lr = self.current_lr
        loss_is_finite = math.isfinite(values.loss)
        grad_norm: float | None
        if self.loss_scale is not None:
            grad_norm = self.loss_scale.step(self.optimizer, loss_is_finite=loss_is_finite)
        elif loss_is_finite:
            success, grad_norm, _ = self.optimizer.step()
            assert success, "without a loss scale every step succeeds"
        else:
            raise NonFiniteError(f"the loss is {values.loss}")
        if grad_norm is not None:
            self.weights_changed()
            if not math.isfinite(grad_norm):
                raise NonFiniteError(f"the gradient norm is {grad_norm}")
            self.scheduler.step(increment=1)
        return UpdateResult(
            values=values,
            grad_norm=math.nan if grad_norm is None else float(grad_norm),
            lr=lr,
            skipped=grad_norm is None,
            loss_scale=None if self.loss_scale is None else self.loss_scale.scale,
        )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`FrozenPolicy.named_tensors`; a collective over the data-parallel ranks too."""
        self.gather_parameters()
        return super().named_tensors()

    def served_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`FrozenPolicy.served_tensors`; a collective over the data-parallel ranks too."""
        self.gather_parameters()
        return super().served_tensors()

    def gather_parameters(self) -> None:
        """Completes the parameters after a step, before anything but the model reads them.

        With ``overlap_param_gather`` a step leaves each rank with its own updated part, and the
        rest stale until the next forward pass asks for it. A collective over data-parallel ranks.
        """
        if not self.config.overlap_param_gather or not hasattr(self, "ddp"):
            return
        for group in self.ddp.bucket_groups + self.ddp.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)

    def _wait_for_parameter(self, parameter: torch.nn.Parameter) -> None:
        """Does what DDP's forward pre-hook does for modules, for a parameter read outside one."""
        self.ddp.param_to_bucket_group[parameter].finish_param_sync()

    @property
    def current_lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _chunks(self) -> list[torch.nn.Module]:
        return [self.ddp]


def _sum_gradients(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduces gradients as sums: the objective is already normalised, so tokens are not counted."""
    finalize_model_grads(chunks, None, **kwargs)
