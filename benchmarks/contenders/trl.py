"""TRL's ``GRPOTrainer`` in its own environment: one optimizer step a turn, generation included.

The same model, prompts, group size, response length and learning rate, no KL term, one pass over
the batch. A turn lasts from ``on_step_begin`` to ``on_step_end``: generation, rewards, forward,
backward and optimizer. Nothing here imports the product.
"""

import os
import tempfile
import time
from typing import Any

from benchmarks._common import Turns


def main() -> None:
    turns = Turns()
    job = turns.wait()
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.update(
        OMP_NUM_THREADS=threads,
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_OFFLINE="1",
    )
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Waits for the turn at the start of a step, and answers at its end."""

        start = 0.0

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            turns.wait()
            self.start = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            turns.answer({"stages": {"step": time.perf_counter() - self.start}})

        def on_train_begin(self, *arguments: Any, **named: Any) -> None:
            versions = {"trl": trl.__version__, "transformers": transformers.__version__}
            turns.answer(versions | {"torch": torch.__version__})

    samples = job["num_prompts"] * job["num_samples"]
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=min(job["micro_batch"], samples),
        gradient_accumulation_steps=max(1, samples // job["micro_batch"]),
        num_generations=job["num_samples"],
        max_completion_length=job["max_tokens"],
        generation_kwargs={"min_new_tokens": job["max_tokens"]},
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,  # recomputation would only slow it here
        bf16=job["autocast"],
        use_cpu=True,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        output_dir=tempfile.mkdtemp(prefix="megatron_rl_benchmark_trl_"),
        model_init_kwargs={"dtype": "float32" if job["autocast"] else job["dtype"]},
    )
    trainer = trl.GRPOTrainer(
        model=job["model_path"],
        reward_funcs=alternating,
        args=trl.GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": job["prompt_texts"]}),
        callbacks=[Clock()],
    )
    trainer.train()
    turns.wait()


def alternating(completions: list[Any], **_: Any) -> list[float]:
    """0, 1, 0, 1, ...: every group has a signal."""
    return [float(i % 2) for i in range(len(completions))]


if __name__ == "__main__":
    main()
