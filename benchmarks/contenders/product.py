"""megatron_rl itself: ``trainer.loop.train`` on a recipe, one step a turn.

The loop runs as in ``megatron-rl train``; where it would record a step it ends the turn instead,
and waits for the next. Rewards are computed as the recipe says and then replaced by 0 and 1 in
turn, so that every group has a signal and no sample is skipped, whatever the model answers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._common import Turns
from megatron_rl.launch.environment import export_environment, run_environment
from megatron_rl.precision import resolve_flow


def main() -> None:
    turns = Turns()
    job = turns.wait()
    export_environment(run_environment(resolve_flow("bf16")))

    from benchmarks.contenders._recipe import load_recipe
    from megatron_rl.policy import parallel
    from megatron_rl.rollout import derive_seed
    from megatron_rl.trainer.batch import RolloutBatch
    from megatron_rl.trainer.components import build_components, load_inputs
    from megatron_rl.trainer.loop import TrainerState, train, training_sampling

    config, model_path = load_recipe(job)
    inputs = load_inputs(config, model_path)
    inputs = replace(inputs, rewards=AlternatingRewards(inputs.rewards))
    layout = parallel.initialize(config.policy, config.seed)
    parts = build_components(config, inputs, layout)

    class TurnRecorder:
        """Ends a turn where a run would record a step."""

        def step(
            self, step: int, metrics: dict[str, float], batch: RolloutBatch, texts: list[str]
        ) -> None:
            seed = training_sampling(parts, step).seed
            n = config.rollout.n
            turns.answer(
                {
                    "stages": {
                        name.removeprefix("timing_s/"): value
                        for name, value in metrics.items()
                        if name.startswith("timing_s/")
                    },
                    "skipped": metrics["rollout/skipped_samples_share"],
                    "update_tokens": metrics["perf/update_num_tokens"],
                    "response_tokens": int(batch.lengths.sum()),
                    "prompts": [list(p.token_ids) for p in batch.prompts],
                    "seeds": [
                        [derive_seed(seed, i, k) for k in range(n)]
                        for i in range(len(batch.prompts))
                    ],
                    "responses": [list(c.token_ids) for c in batch.completions],
                    "logprobs": [list(c.logprobs) for c in batch.completions],
                }
            )
            turns.wait()

        def gate(self, finding: object) -> None: ...

        def evaluation(self, step: int, evaluation: Any) -> None:
            raise AssertionError("the recipe has no held-out prompts")

        def save(self, step: int) -> None:
            """Never due: the recipe saves no checkpoint."""

    wanted = job["steps"] * config.data.train_batch_size
    turns.answer(
        {
            "model_path": str(Path(model_path).resolve()),
            "prompt_texts": [p.text for p in inputs.train_prompts[:wanted]],
            "max_model_len": config.max_sequence_length_tokens,
            "dtype": inputs.flow.compute_dtype,
            "max_tokens": config.rollout.max_response_length_tokens,
            "num_prompts": config.data.train_batch_size,
            "num_samples": config.rollout.n,
            "lr": config.policy.optimizer.lr,
        }
    )
    turns.wait()
    train(parts, TrainerState(), TurnRecorder())


class AlternatingRewards:
    """Scores with the recipe's reward function, then replaces the scores by 0, 1, 0, 1, ..."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def score(self, requests: Sequence[Any]) -> list[Any]:
        results = self._inner.score(requests)
        return [replace(result, score=float(i % 2)) for i, result in enumerate(results)]

    def close(self) -> None:
        self._inner.close()


if __name__ == "__main__":
    main()
