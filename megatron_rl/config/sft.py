"""The configuration of supervised fine-tuning; sections are shared with reinforcement learning.

A tree of its own rather than a mode of :class:`RunConfig`: what one of the two does not follow, it
does not accept.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.run import (
    EvaluationConfig,
    LoggingConfig,
    PolicyConfig,
    TrainerConfig,
    check_time_limits,
)
from megatron_rl.config.sections import (
    DataSourceConfig,
    ModelConfig,
    PrecisionConfig,
    RewardConfig,
    RolloutConfig,
)


class SFTDataConfig(ConfigSection):
    """Prompts with the responses to learn, and held-out prompts."""

    train: tuple[DataSourceConfig, ...] = Field(min_length=1)
    """Training rows; several sources are concatenated, then shuffled."""
    val: tuple[DataSourceConfig, ...] = ()
    """Held-out prompts for evaluation; without any, no rollout engine is started."""
    response_template: str = "{ground_truth}"
    """Python format string that makes the response to learn, such as ``" {ground_truth}\\n"``. It
    may name ``ground_truth``, ``answer`` (the same unless the row says otherwise) and the text and
    numbers of the row's ``extra_info``. EOS follows it."""
    batch_size_sequences: int = Field(default=32, gt=0)
    """Prompt-response pairs per step."""
    max_sequence_length_tokens: int = Field(default=512, gt=0)
    """Longest prompt and response together, EOS included."""
    overlong_sequences: Literal["error", "drop"] = "error"
    """What to do with a longer training row: stop and name it, or drop it and count."""
    shuffle: bool = True
    """Shuffle the training rows anew every epoch (seeded)."""


class SFTEvaluationConfig(EvaluationConfig):
    """Held-out evaluation by vLLM; there is none without ``data.val``."""

    max_response_length_tokens: int = Field(default=64, gt=0)
    """Longest response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, each of which must be a single token of the tokenizer."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share one engine; every rank takes part, whatever the training layout."""
    max_num_seqs: int = Field(default=256, gt=0)
    """Most sequences that the engine decodes together."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the engine's KV cache, in GiB."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit of one evaluation's sampling; shorter than ``trainer.collective_timeout_s``."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments, by vLLM's own names."""


class SFTConfig(ConfigSection):
    """A run of ``megatron-rl sft``: everything that decides what it computes."""

    name: str = "sft"
    """Name of the run; the run directory is ``output_dir/name``."""
    output_dir: str = "runs"
    """Parent of run directories."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order and initialisation."""
    model: ModelConfig
    """The model that training starts from."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes of training and of the evaluation's engine."""
    data: SFTDataConfig
    """Training and held-out rows."""
    policy: PolicyConfig = PolicyConfig()
    """The trained model: parallel sizes, micro-batches, optimizer."""
    trainer: TrainerConfig = TrainerConfig()
    """Length of the run, checkpoints, resume; a step is one optimizer step."""
    evaluation: SFTEvaluationConfig = SFTEvaluationConfig()
    """When and how held-out prompts are answered."""
    reward: RewardConfig = RewardConfig()
    """How a held-out answer is scored."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics go; training samples nothing, so ``rollout_samples`` writes nothing."""

    @model_validator(mode="after")
    def _check_across_sections(self) -> "SFTConfig":
        check_time_limits("evaluation.timeout_s", self.evaluation.timeout_s, self.trainer)
        if self.trainer.resume_mode == "path" and not self.trainer.resume_path:
            raise ValueError("trainer.resume_mode=path needs trainer.resume_path; set it")
        if (
            self.data.val
            and self.evaluation.max_response_length_tokens >= self.max_sequence_length_tokens
        ):
            raise ValueError(
                "evaluation.max_response_length_tokens="
                f"{self.evaluation.max_response_length_tokens} leaves no room for a prompt in "
                f"data.max_sequence_length_tokens={self.max_sequence_length_tokens}; lower it"
            )
        return self

    @property
    def max_sequence_length_tokens(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.data.max_sequence_length_tokens

    @property
    def rollout(self) -> RolloutConfig:
        """The engine's settings, in the form that a rollout engine reads."""
        evaluation = self.evaluation
        return RolloutConfig(
            max_response_length_tokens=evaluation.max_response_length_tokens,
            stop=evaluation.stop,
            tensor_parallel_size=evaluation.tensor_parallel_size,
            max_num_seqs=evaluation.max_num_seqs,
            kv_cache_gib=evaluation.kv_cache_gib,
            timeout_s=evaluation.timeout_s,
            vllm=evaluation.vllm,
        )
