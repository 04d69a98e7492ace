"""Where the mismatch comes from: one operator after the other computed by each engine for itself.

For a model, a flow and some prompts, rollout and policy hold the same weights, and only the set of
operators that they share changes: all, all but one, none. Rounding noise saturates - one operator
that differs moves nearly as much as three - so the table has to be read from both ends.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoints_tools.hf import HFReader
from megatron_rl.config import RunConfig
from megatron_rl.metrics.mismatch import mismatch_metrics
from megatron_rl.policy import parallel
from megatron_rl.policy.policy import FrozenPolicy
from megatron_rl.precision import PrecisionFlow
from megatron_rl.precision.flow import SHAREABLE_OPERATORS
from megatron_rl.rollout import Engine, Sampling, derive_seed
from megatron_rl.sync import stream_weights
from megatron_rl.trainer.batch import prompt_groups
from megatron_rl.trainer.components import Inputs, build_engine, load_inputs


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """One row: which operators were shared, and how far the log-probs were apart."""

    label: str
    num_tokens: int
    mean: float
    """Mean ``|dlogp|``."""
    largest: float
    """Largest ``|dlogp|``."""
    exact_share: float
    """Share of tokens whose two log-probs are bit for bit equal."""


def variants(flow: PrecisionFlow) -> Iterator[tuple[str, PrecisionFlow]]:
    """The flow with all operators shared, with one left out, and with none."""
    yield "all shared", replace(flow, shared_operators=SHAREABLE_OPERATORS)
    for operator in SHAREABLE_OPERATORS:
        others = tuple(o for o in SHAREABLE_OPERATORS if o != operator)
        yield f"all but {operator}", replace(flow, shared_operators=others)
    for operator in SHAREABLE_OPERATORS:
        yield f"only {operator}", replace(flow, shared_operators=(operator,))
    yield "none (plain torch)", replace(flow, shared_operators=())


def attribute(
    config: RunConfig,
    model_path: Path,
    quiet: Callable[[], AbstractContextManager[None]],
    num_prompts: int,
) -> list[Attribution]:
    """Measures every variant of the recipe's flow on the recipe's first training prompts.

    Args:
        config: The recipe; one process serves it whole.
        model_path: Hugging Face directory of the policy.
        quiet: Context manager that silences third-party libraries.
        num_prompts: Prompts, each sampled ``rollout.n`` times.

    Raises:
        ValueError: Something about the input is wrong.
    """
    if "RANK" in os.environ:
        raise ValueError("precision attribute runs in one process; start it without a launcher")
    inputs = load_inputs(config, model_path)
    rows: list[Attribution] = []
    engines: list[Engine] = []
    try:
        with quiet():
            layout = parallel.initialize(config.policy, config.seed)
            for label, flow in variants(inputs.flow):
                policy = FrozenPolicy(inputs.spec, flow, config.policy, layout)
                reader = HFReader(model_path)
                policy.load(reader, list(reader))
                engine = build_engine(config, replace(inputs, flow=flow), layout)
                engines.append(engine)  # closing one would take vLLM's groups from the next
                engine.update_weights(stream_weights(policy, flow), 0)
                rows.append(_measure(config, inputs, policy, engine, label, num_prompts))
    finally:
        with quiet():
            for engine in engines[-1:]:
                engine.close()
            parallel.shutdown()
            inputs.rewards.close()
    return rows


def _measure(
    config: RunConfig,
    inputs: Inputs,
    policy: FrozenPolicy,
    engine: Engine,
    label: str,
    num_prompts: int,
) -> Attribution:
    prompts = [prompt.token_ids for prompt in inputs.train_prompts[:num_prompts]]
    sampling = Sampling(
        n=config.rollout.n,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_response_length_tokens,
        stop_token_ids=inputs.stop_token_ids,
        ignore_eos=config.rollout.ignore_eos,
        seed=derive_seed(config.seed, "attribution"),
    )
    completions = engine.generate(prompts, sampling)
    shape = len(completions), max(len(c.token_ids) for c in completions)
    rollout, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        rollout[row, :length] = torch.tensor(completion.logprobs)
        mask[row, :length] = True
    groups = prompt_groups(prompts, completions, range(len(completions)))
    scored = policy.score(groups, shape, temperature=sampling.temperature).logprobs
    metrics = mismatch_metrics(scored, rollout, mask)
    return Attribution(
        label=label,
        num_tokens=int(mask.sum()),
        mean=metrics["rollout_corr/logp_diff_abs_mean"],
        largest=metrics["rollout_corr/logp_diff_abs_max"],
        exact_share=metrics["rollout_corr/exact_share"],
    )
