"""vLLM alone: ``LLM.generate`` on the requests of the product's last step, nothing around it.

The engine's settings are the fastest found for this load, given here in full; no code of the
product runs. The prefix cache is emptied between turns (new weights would do the same), outside the
measurement.
"""

import os
import time
from typing import Any

from benchmarks._common import Turns


def main() -> None:
    turns = Turns()
    job = turns.wait()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        TQDM_DISABLE="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),
    )
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        max_num_seqs=256,
        kv_cache_memory_bytes=2**30,
        enable_chunked_prefill=False,  # seeded requests need it off
        enable_prefix_caching=True,
        block_size=32,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
    )
    llm = LLM(
        job["model_path"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        **settings | job["settings"],
    )
    turns.answer({})
    while True:
        record = turns.wait()
        llm.reset_prefix_cache()
        prompts: list[Any] = [
            {"prompt_token_ids": prompt}
            for prompt, seeds in zip(record["prompts"], record["seeds"], strict=True)
            for _ in seeds
        ]
        params = [
            SamplingParams(
                max_tokens=job["max_tokens"],
                temperature=1.0,
                seed=seed,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
            )
            for seeds in record["seeds"]
            for seed in seeds
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        turns.answer({"stages": {"gen": seconds}, "response_tokens": tokens})


if __name__ == "__main__":
    main()
