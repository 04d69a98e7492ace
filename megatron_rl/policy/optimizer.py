"""Optimizer and schedule: Megatron's distributed optimizer over FP32 master weights."""

import logging
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import OptimizerConfig
from megatron_rl.precision import PrecisionFlow, megatron_loss_scale, megatron_precision

logger = logging.getLogger(__name__)


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, flow: PrecisionFlow
) -> Any:
    """Adam over the model's chunks, sharded over data-parallel ranks."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=True,
            fp8_recipe=chunks[0].config.fp8_recipe if chunks[0].config.fp8 else None,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            **megatron_precision(flow),
            **megatron_loss_scale(flow),
        ),
        chunks,
    )
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            # torch's single-pass Adam: the same update, one sweep over memory instead of a dozen.
            group["fused"], group["foreach"] = True, False
    return optimizer


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]


def parameters_from_masters(optimizer: Any, ddp: DistributedDataParallel) -> None:
    """Makes the parameters anew from the FP32 master weights, as a step does; a collective."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part._copy_main_params_to_model_params()
    ddp.start_param_sync()


def initialize_state(optimizer: Any) -> None:
    """Creates zero moments, so that a checkpoint loads into an optimizer that never stepped."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def build_scheduler(optimizer: Any, config: OptimizerConfig, total_steps: int) -> Any:
    """Linear warm-up, then constant, linear or cosine decay, in optimizer steps.

    Step ``k`` of an ``n``-step warm-up uses ``k/n`` of the peak; the decay starts after step ``n``.
    Megatron's own warm-up starts at its initial rate, which is usually 0: a first step that moves
    nothing. Starting at ``1/n`` and warming up over one step less is the same line without it.

    Raises:
        ValueError: The warm-up is as long as the decay.
    """
    decay_steps = config.lr_decay_steps or total_steps
    if config.lr_warmup_steps >= decay_steps:
        raise ValueError(
            f"policy.optimizer.lr_warmup_steps={config.lr_warmup_steps} leaves no step after the "
            f"warm-up, of {decay_steps} in all; shorten it"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / max(config.lr_warmup_steps, 1),
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=max(config.lr_warmup_steps - 1, 0),
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
