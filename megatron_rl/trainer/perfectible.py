"""The perfectible set: training prompts that the starting policy answers neither always nor never.

A policy can be brought to answer all of them rightly, so a run that does not is at fault, not its
data (arXiv 2510.26788). The set belongs to a run: it is chosen once, before anything is trained,
and kept in the run directory, so that a resumed run goes on with the same one.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import PerfectibleConfig, RunConfig
from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollout import Sampling, derive_seed
from megatron_rl.trainer.components import Components, RunParts
from megatron_rl.trainer.evaluation import score_completions
from megatron_rl.trainer.loop import late_sampling_named, sync

FILE_NAME = "perfectible.json"


def with_perfectible_prompts(
    parts: RunParts, run_dir: Path, *, is_resumed: bool, tell: Callable[[str], None]
) -> RunParts:
    """The parts of a run with a loader of perfectible prompts, where ``data.perfectible`` asks.

    A collective: every rank calls it, before a checkpoint is loaded.

    Args:
        parts: The run; its policy is the one that the run starts from.
        run_dir: Where the chosen set is, or will be.
        is_resumed: Whether the set of ``run_dir`` is that of this run.
        tell: Shows a person one line.

    Raises:
        ValueError: Too few prompts are left, a reward has no accuracy, or the set of a resumed run
            was chosen otherwise.
        TimeoutError: Sampling exceeded its limit.
    """
    if not isinstance(parts, Components) or parts.config.data.perfectible is None:
        return parts
    config, perfectible = parts.config, parts.config.data.perfectible
    prompts, path = parts.inputs.train_prompts, run_dir / FILE_NAME
    chosen_by = _chosen_by(config, len(prompts))
    if is_resumed and path.is_file():
        kept = _read(path, chosen_by)
    else:
        sync(parts, 0)
        with late_sampling_named("answers for data.perfectible"):
            accuracies = prompt_accuracies(parts, perfectible.num_samples)
        kept = perfectible_indices(accuracies, perfectible)
        require_a_batch(len(kept), accuracies, config)
        if parts.policy.layout.rank == 0:
            _write(path, chosen_by, kept, accuracies)
    if parts.policy.layout.rank == 0:
        tell(f"perfectible: {len(kept)} of {len(prompts)} training prompts, {_range(perfectible)}")
    data = config.data
    loader = PromptLoader(
        [prompts[i] for i in kept], data.train_batch_size, config.seed, data.shuffle
    )
    return dataclasses.replace(parts, loader=loader)


def prompt_accuracies(parts: Components, num_samples: int) -> list[float]:
    """Share of right answers to each training prompt, sampled as in training.

    Prompts go to the engine in portions of about one training batch, since a batch is what
    ``rollout.timeout_s`` limits; seeds depend on a prompt's place in the whole.

    Raises:
        ValueError: The reward function says nothing about right and wrong.
        RolloutTimeout: A portion exceeded the limit.
    """
    rollout = parts.config.rollout
    sampling = Sampling(
        n=num_samples,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_length_tokens,
        stop_token_ids=parts.inputs.stop_token_ids,
        ignore_eos=rollout.ignore_eos,
        seed=derive_seed(parts.config.seed, "perfectible"),
    )
    portion = max(1, parts.config.data.train_batch_size * rollout.n // num_samples)
    prompts = parts.inputs.train_prompts
    right = [0.0] * len(prompts)
    for start in range(0, len(prompts), portion):
        numbers = range(start, min(start + portion, len(prompts)))
        ids = [prompts[i].token_ids for i in numbers]
        completions = parts.engine.generate(ids, sampling, numbers)
        _, rewards = score_completions(
            prompts, completions, parts.inputs.tokenizer, parts.inputs.rewards
        )
        for completion, reward in zip(completions, rewards, strict=True):
            if reward.accuracy is None and reward.failed is None:
                raise ValueError(
                    f"reward.function={parts.config.reward.function} returns no `acc` and no plain "
                    "0 or 1, which data.perfectible needs; return one, or remove data.perfectible"
                )
            right[completion.prompt_index] += reward.accuracy or 0.0
    return [total / num_samples for total in right]


def perfectible_indices(accuracies: Sequence[float], config: PerfectibleConfig) -> list[int]:
    """Places of the accuracies in the closed range of ``config``, in order."""
    return [i for i, a in enumerate(accuracies) if config.min_accuracy <= a <= config.max_accuracy]


def require_a_batch(num_kept: int, accuracies: Sequence[float], config: RunConfig) -> None:
    """Refuses a set that does not fill one batch.

    Raises:
        ValueError: It does not.
    """
    perfectible, size = config.data.perfectible, config.data.train_batch_size
    assert perfectible is not None
    if num_kept < size:
        below = sum(a < perfectible.min_accuracy for a in accuracies)
        above = sum(a > perfectible.max_accuracy for a in accuracies)
        raise ValueError(
            f"data.perfectible keeps {num_kept} of {len(accuracies)} training prompts "
            f"({_range(perfectible)}; {below} are below, {above} above), fewer than "
            f"data.train_batch_size={size}; widen the range, add prompts or lower the batch size"
        )


def _range(config: PerfectibleConfig) -> str:
    return (
        f"accuracy {config.min_accuracy:g} to {config.max_accuracy:g} in "
        f"{config.num_samples} samples"
    )


def _chosen_by(config: RunConfig, num_prompts: int) -> dict[str, Any]:
    """What the set follows from, as far as a run's continuation might change it."""
    assert config.data.perfectible is not None
    return {
        **config.data.perfectible.model_dump(),
        "seed": config.seed,
        "num_prompts": num_prompts,
    }


def _read(path: Path, chosen_by: dict[str, Any]) -> list[int]:
    saved = json.loads(path.read_text())
    for name, value in chosen_by.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} was chosen with {name}={saved.get(name)} and it is {value} now; restore "
                "it, or start a run of another name"
            )
    kept: list[int] = saved["kept"]
    return kept


def _write(path: Path, chosen_by: dict[str, Any], kept: list[int], accuracies: list[float]) -> None:
    content = {**chosen_by, "kept": kept, "accuracies": [round(a, 6) for a in accuracies]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(path)
