"""The contract between the trainer and whatever samples for it.

Token in, token out: prompts arrive as token ids and leave as token ids with the log-prob of each
sampled token under the distribution it was sampled from (temperature applied). Nothing is decoded
and encoded again.
"""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rl.precision.audit import ModelReport


class NonFiniteWeights(ValueError):
    """A weight update holds NaN or Inf: the policy has diverged."""


class RolloutTimeout(TimeoutError):
    """Sampling did not end within its time limit."""

    def __init__(self, num_finished: int, num_requests: int, limit_s: float) -> None:
        """Counts are of responses, over all engines of the job."""
        self.num_finished = num_finished
        self.num_requests = num_requests
        self.limit_s = limit_s
        super().__init__(
            f"sampling did not end within {limit_s:g} s: {num_finished} of {num_requests} "
            "responses were finished; raise rollout.timeout_s (in a recipe of sft: "
            "evaluation.timeout_s), or sample fewer or shorter responses"
        )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are sampled: always from the trained distribution, uncut and unpenalised."""

    n: int = 1
    """Samples per prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    max_tokens: int = 256
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the model's EOS tokens."""
    ignore_eos: bool = False
    """Keep sampling past EOS."""
    seed: int | None = None
    """Seed of this call. The seed of a sample follows from it, the prompt's index and the sample's
    index, so a call repeats itself whatever the batch. None: unseeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled response."""

    prompt_index: int
    """Index of its prompt in the call."""
    sample_index: int
    """Index among the samples of its prompt."""
    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the sampled distribution."""
    finish_reason: Literal["stop", "length"]
    """``stop``: a stop token was sampled. ``length``: cut at ``max_tokens``."""

    @property
    def truncated(self) -> bool:
        """Whether the response was cut."""
        return self.finish_reason == "length"


class Engine(abc.ABC):
    """A rollout engine: generates, and takes new weights."""

    @abc.abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Samples ``sampling.n`` responses to each prompt, ordered by prompt, then sample.

        Args:
            prompts: Token ids of each prompt.
            sampling: How to sample.
            prompt_indices: Numbers of the prompts, which seeds and completions carry; by default
                their places in ``prompts``.

        Raises:
            ValueError: A prompt is empty or leaves no room for a response.
            RolloutTimeout: The time limit passed. Nothing is returned of what was finished, and the
                engine can be used again.
            RuntimeError: The last weight update failed, so the engine holds no known policy.
        """

    @abc.abstractmethod
    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights by a complete stream of (Hugging Face name, tensor), in layer order.

        After it returns, ``generate`` samples the new policy and ``version`` is in force. A stream
        that is incomplete, names an unknown or repeated tensor, or holds a non-finite value raises,
        and the engine refuses to generate until a complete update succeeds.

        Raises:
            ValueError: The stream is wrong; the message names the tensor.
        """

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Version of the weights in force; -1 for those the engine was started with."""

    @abc.abstractmethod
    def report(self) -> ModelReport:
        """What the live model computes, for :func:`megatron_rl.precision.audit.audit`."""

    def sleep(self) -> None:  # noqa: B027 - optional
        """Releases memory for the trainer, where the engine can."""

    def wake(self) -> None:  # noqa: B027 - optional
        """Takes the memory back before generating."""

    def close(self) -> None:  # noqa: B027 - optional
        """Frees the engine."""
