"""The configuration of a run: further sections, the whole, and checks that span sections."""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.sections import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    RewardConfig,
    RolloutConfig,
)

NEEDS_GROUPS = ("grpo", "dr_grpo", "rloo")


class OptimizerConfig(ConfigSection):
    """Adam with FP32 master weights (Megatron's distributed optimizer)."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up: step ``k`` of ``n`` uses ``k/n`` of ``lr``."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    lr_decay_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps until ``min_lr``; by default the whole run."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (norms and biases are exempt)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's second-moment decay."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient-norm limit; 0 turns clipping off."""


class PolicyConfig(ConfigSection):
    """The trained model on Megatron-core."""

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Ranks that split each layer (TP)."""
    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    """Pipeline stages (PP)."""
    sequence_parallel: bool = False
    """Split norms and residual stream over TP ranks along the tokens (SP); needs TP > 1."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs; needs
    ``overlap_grad_reduce``."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most tokens in one forward/backward; a longer single prompt group still runs alone."""
    share_prompt_prefix: bool = True
    """Compute each prompt once for all responses of its group (exact; see docs/batching.md)."""
    logprob_chunk_tokens: int = Field(default=512, gt=0)
    """Tokens whose logits are alive at one time."""
    optimizer: OptimizerConfig = OptimizerConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron ``TransformerConfig`` options, by Megatron's own names."""

    @model_validator(mode="after")
    def _check_overlap(self) -> "PolicyConfig":
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError(
                "policy.overlap_param_gather=true needs policy.overlap_grad_reduce=true; set both"
            )
        return self


class EvaluationConfig(ConfigSection):
    """Held-out evaluation."""

    interval_steps: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 evaluates at the start and the end only."""
    at_start: bool = True
    """Evaluate before the first step."""
    greedy: bool = True
    """Greedy accuracy."""
    num_samples: int = Field(default=0, ge=0)
    """Samples per prompt for mean@k at ``temperature``; 0 turns sampling off."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled evaluation."""


class TrainerConfig(ConfigSection):
    """Length of the run, checkpoints, resume."""

    total_steps: int = Field(default=100, gt=0)
    """Rollout-and-update steps."""
    save_interval_steps: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 saves at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Complete checkpoints kept; older ones are deleted after a newer one is complete."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    """``auto`` continues from the newest complete checkpoint of the run directory."""
    resume_path: str | None = None
    """Checkpoint directory for ``resume_mode=path``."""
    collective_timeout_s: float = Field(default=2400.0, gt=0)
    """Time limit of one collective between ranks: longer than ``rollout.timeout_s``, for which the
    other ranks may wait, short enough that a dead peer ends the run."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on; one at a time."""
    save_final_checkpoint: bool = True
    """Save a resumable checkpoint after the last step."""
    export_hf: bool = True
    """Write the final policy as a Hugging Face directory."""


class LoggingConfig(ConfigSection):
    """Where metrics go besides ``metrics.jsonl`` and the console."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "megatron-rl"
    """W&B project."""
    wandb_mode: Literal["online", "offline"] = "online"
    """W&B mode; ``offline`` needs no network."""
    rollout_samples: int = Field(default=8, ge=0)
    """Sample rollouts written per step for the report."""
    report: bool = True
    """Build ``report.html`` and its plots at the end."""


class RunConfig(ConfigSection):
    """A run of ``megatron-rl train``: everything that decides what it computes."""

    name: str = "run"
    """Name of the run; the run directory is ``output_dir/name``."""
    output_dir: str = "runs"
    """Parent of run directories."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, sampling and initialisation."""
    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_across_sections(self) -> "RunConfig":
        if self.algorithm.advantage_estimator in NEEDS_GROUPS and self.rollout.n < 2:
            raise ValueError(
                f"rollout.n={self.rollout.n} gives groups of one, whose advantage is always zero "
                f"with algorithm.advantage_estimator={self.algorithm.advantage_estimator}; set "
                "rollout.n to 2 or more (8 is usual), or use advantage_estimator=reinforce_baseline"
            )
        mini = self.algorithm.mini_batch_size_prompts
        if mini is not None and self.data.train_batch_size % mini:
            raise ValueError(
                f"algorithm.mini_batch_size_prompts={mini} does not divide data.train_batch_size="
                f"{self.data.train_batch_size}; choose a divisor"
            )
        check_time_limits("rollout.timeout_s", self.rollout.timeout_s, self.trainer)
        if self.trainer.resume_mode == "path" and not self.trainer.resume_path:
            raise ValueError("trainer.resume_mode=path needs trainer.resume_path; set it")
        return self

    @property
    def max_sequence_length_tokens(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.data.max_prompt_length_tokens + self.rollout.max_response_length_tokens

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout batch is used for."""
        mini = self.algorithm.mini_batch_size_prompts or self.data.train_batch_size
        return self.algorithm.num_epochs * (self.data.train_batch_size // mini)


def check_time_limits(name: str, timeout_s: float, trainer: TrainerConfig) -> None:
    """Refuses a time limit of sampling that the ranks waiting for it would not wait out.

    Raises:
        ValueError: ``timeout_s``, the option ``name``, is not below the limit of a collective.
    """
    if timeout_s >= trainer.collective_timeout_s:
        raise ValueError(
            f"{name}={timeout_s:g} must be below trainer.collective_timeout_s="
            f"{trainer.collective_timeout_s:g}, since ranks that are done wait for the others in a "
            f"collective; lower {name} or raise trainer.collective_timeout_s"
        )
