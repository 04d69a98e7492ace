"""Sections of a run that describe its parts: model, precision, data, reward, rollout, algorithm.

Units stand in the names (``_tokens``, ``_s``, ``_bytes``); a name without a unit is a count or a
ratio.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class ModelConfig(ConfigSection):
    """The policy that training starts from."""

    path: str
    """A Hugging Face directory, or the name of a bundled model (``smollm2-135m-instruct``)."""


class PrecisionConfig(ConfigSection):
    """The precision flow, which sets the formats of training, rollout and weight sync together."""

    flow: str | dict[str, Any] = "bf16"
    """Name of the flow (``bf16``, ``fp16``, ``fp8``, ``fp8_rollout``, ``fp32``), or a mapping of
    ``base`` and the roles that differ from it (see docs/precision.md)."""
    exact: bool = True
    """Share the operators between the products with the rollout engine, so that sampled log-probs
    are reproduced bit for bit, where the platform can (CPU, rollout TP 1). False: each engine's own
    operators."""
    allow_mismatch: bool = False
    """Start although rollout computes in other formats than training. The run says so in every
    header and report."""
    gate: Literal["warn", "stop", "off"] = "warn"
    """What to do when log-probs of rollout and policy differ at the first step by more than
    ``gate_bound``, where weights are identical."""
    gate_bound: float | None = Field(default=None, ge=0)
    """Largest accepted mean difference of log-probs; by default the flow's own bound."""


class DataSourceConfig(ConfigSection):
    """One set of prompts: a file of rows, or a generated ``reasoning-gym`` task."""

    name: str
    """``data_source`` of the rows; metric keys carry it (``val-core/<name>/...``)."""
    kind: Literal["file", "reasoning_gym"]
    """``file``: JSONL or parquet rows. ``reasoning_gym``: a procedurally generated task."""
    path: str | None = None
    """``file``: path of a ``.jsonl`` or ``.parquet`` file."""
    task: str | None = None
    """``reasoning_gym``: name of the task, such as ``chain_sum``."""
    task_config: dict[str, Any] = Field(default_factory=dict)
    """``reasoning_gym``: the task's own options, passed on unchanged."""
    size: int = Field(default=1024, gt=0)
    """``reasoning_gym``: number of rows to generate. ``file``: at most this many rows are read."""
    seed: int = 0
    """``reasoning_gym``: seed of the generator. Train and held-out sets need different seeds."""
    prompt_template: str | None = None
    """Python format string over ``question``, ``answer``, ``metadata`` and ``shots`` that makes the
    prompt text; by default the question itself."""
    num_shots: int = Field(default=0, ge=0)
    """Solved examples before the question, made by ``shot_template`` and joined into ``shots``."""
    shot_template: str = "{question} {answer}\n"
    """Python format string of one solved example."""
    use_chat_template: bool = False
    """Wrap a string prompt as a user message in the chat template; message lists always are."""

    @model_validator(mode="after")
    def _check_kind(self) -> "DataSourceConfig":
        needed = {"file": "path", "reasoning_gym": "task"}[self.kind]
        if not getattr(self, needed):
            raise ValueError(f"a data source of kind {self.kind!r} needs `{needed}`; set it")
        return self


class PerfectibleConfig(ConfigSection):
    """Which training prompts a run keeps by what the starting policy makes of them."""

    min_accuracy: float = Field(default=0.2, ge=0, le=1)
    """Least share of right answers, included."""
    max_accuracy: float = Field(default=0.8, ge=0, le=1)
    """Largest share of right answers, included."""
    num_samples: int = Field(default=16, gt=0)
    """Answers to each prompt, sampled at ``rollout.temperature``."""

    @model_validator(mode="after")
    def _check_range(self) -> "PerfectibleConfig":
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy={self.min_accuracy:g} is above max_accuracy={self.max_accuracy:g}; "
                "swap them"
            )
        return self


class DataConfig(ConfigSection):
    """Prompts for training and for evaluation."""

    train: tuple[DataSourceConfig, ...] = Field(min_length=1)
    """Training prompts; several sources are concatenated, then shuffled."""
    val: tuple[DataSourceConfig, ...] = ()
    """Held-out prompts for evaluation."""
    train_batch_size: int = Field(default=16, gt=0)
    """Prompts per step (each is sampled ``rollout.n`` times)."""
    max_prompt_length_tokens: int = Field(default=512, gt=0)
    """Longest prompt accepted."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a longer prompt: stop and name its row, or drop it and count."""
    shuffle: bool = True
    """Shuffle the training prompts anew every epoch (seeded)."""
    perfectible: PerfectibleConfig | None = None
    """Train on the prompts whose sampled accuracy lies in a range before the first step; off by
    default, ``{}`` takes the range's defaults."""


class RewardConfig(ConfigSection):
    """How a response becomes a number."""

    function: str = "auto"
    """``auto`` picks the verifier by the row; else a built-in (``exact_match``, ``math``,
    ``reasoning_gym``) or ``path/to/file.py:compute_score``."""
    extract: Literal["none", "first_line", "first_number", "last_number", "boxed", "answer_tag"] = (
        "none"
    )
    """What of the response the verifier sees."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one scoring call; a call over it counts as a reward failure."""
    failure_score: float = 0.0
    """Score of a response whose scoring failed."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that score user functions, whose calls may hang or crash."""


class RolloutConfig(ConfigSection):
    """Sampling of responses by vLLM."""

    n: int = Field(default=8, gt=0)
    """Samples per prompt (the group of GRPO)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the policy's log-probs are taken at the same one."""
    max_response_length_tokens: int = Field(default=256, gt=0)
    """Longest response; a response cut there is flagged as truncated."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, each of which must be a single token of the tokenizer. The
    model's own EOS tokens always end one."""
    ignore_eos: bool = False
    """Keep sampling past EOS (benchmarks)."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share one engine; every rank takes part, whatever the training layout."""
    max_num_seqs: int = Field(default=256, gt=0)
    """Most sequences that the engine decodes together."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the engine's KV cache, in GiB."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit of sampling one batch, or one evaluation; shorter than
    ``trainer.collective_timeout_s``. A run over it ends."""
    seed_mode: Literal["per_request", "none"] = "per_request"
    """``per_request``: a run repeats (seeded by run seed, step, prompt, sample)."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments, by vLLM's own names."""


class KLConfig(ConfigSection):
    """KL penalty to the frozen starting policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL term in the loss; 0 keeps no reference policy in memory."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator (Schulman, 2020)."""


class RolloutCorrectionConfig(ConfigSection):
    """Importance weights against the mismatch of the policy that sampled and the one trained."""

    rule: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mis", "geometric_rejection", "icepop"
    ] = "none"
    """``token_tis``, ``sequence_tis``: ratio of a token or its sequence, truncated at ``cap``.
    ``sequence_mis``: a sequence beyond ``cap`` is dropped. ``icepop``: a token outside ``low`` to
    ``high`` is dropped. ``geometric_rejection``: a sequence is dropped by its mean ratio, the
    others keep weight 1. A sequence rule scores a batch once more than ``token_tis`` and ``icepop``
    when the batch is used for a single optimizer step."""
    cap: float | None = Field(default=None, ge=1)
    """Largest weight of ``token_tis``, ``sequence_tis`` and ``sequence_mis``; by default 2."""
    low: float | None = Field(default=None, gt=0, le=1)
    """Lower bound of ``icepop`` (by default 0.5) and ``geometric_rejection`` (0.999)."""
    high: float | None = Field(default=None, ge=1)
    """Upper bound of ``icepop`` (by default 5) and ``geometric_rejection`` (1.001)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "RolloutCorrectionConfig":
        used: tuple[str, ...] = ("low", "high") if self._has_range else ("cap",)
        if self.rule == "none":
            used = ()
        for name in ("cap", "low", "high"):
            if getattr(self, name) is not None and name not in used:
                reads = " and ".join(used) or "no bound"
                raise ValueError(
                    f"`{name}` is set, but rule {self.rule!r} reads {reads}; remove it, or choose "
                    "a rule that reads it"
                )
        return self

    @property
    def _has_range(self) -> bool:
        return self.rule in ("icepop", "geometric_rejection")

    @property
    def is_per_token(self) -> bool:
        """Whether a token's weight depends on that token alone."""
        return self.rule in ("token_tis", "icepop")

    @property
    def bounds(self) -> tuple[float, ...]:
        """Arguments of the rule: ``(cap,)`` or ``(low, high)``."""
        if not self._has_range:
            return (2.0 if self.cap is None else self.cap,)
        low, high = (0.5, 5.0) if self.rule == "icepop" else (0.999, 1.001)
        return low if self.low is None else self.low, high if self.high is None else self.high


class AlgorithmConfig(ConfigSection):
    """The policy-gradient estimator and its loss."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"] = "grpo"
    """How rewards of a group become advantages."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    """Lower clip range of the surrogate: ratio >= 1 - this."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """Upper clip range of the surrogate: ratio <= 1 + this."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Dual-clip constant for negative advantages (arXiv 1912.09729); off by default."""
    loss_aggregation: AggregationMode = "token-mean"
    """How per-token losses are averaged over a mini-batch."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus in the loss."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights on the surrogate; off by default."""
    num_epochs: int = Field(default=1, gt=0)
    """Passes over each rollout batch."""
    mini_batch_size_prompts: int | None = Field(default=None, gt=0)
    """Prompts per optimizer step; by default all prompts of the rollout batch (fully on-policy)."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss (they still count in the group's statistics)."""
