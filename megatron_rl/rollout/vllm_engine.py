"""vLLM in the trainer's process, behind :class:`rollout.Engine`.

Colocated: trainer and engine take turns on the same device, and new weights pass as tensors,
without a file or a copy on the way. Everything that would make the sampled distribution differ from
the trained one (the checkpoint's ``generation_config``, top-p, penalties, raw log-probs) is pinned
here.
"""

import difflib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.platforms import current_platform
from megatron_rl.platforms.cpu_attention import BLOCK_SIZE_TOKENS
from megatron_rl.precision import LinearPlan, PrecisionFlow, vllm_precision
from megatron_rl.precision.audit import ModelReport
from megatron_rl.precision.wire import served_names
from megatron_rl.rollout.seeds import derive_seed, preserve_host_rng
from megatron_rl.rollout.time_limit import run_requests
from megatron_rl.rollout.types import Completion, Engine, Sampling

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "megatron_rl.rollout.worker.WorkerExtension"
# A small KV-cache block lets the prompt of a group be cached, not computed n times.


def engine_arguments(
    model_path: Path,
    flow: PrecisionFlow,
    plan: LinearPlan,
    config: RolloutConfig,
    max_model_len: int,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: what follows from the run, then the user's ``rollout.vllm``.

    Raises:
        ValueError: ``rollout.vllm`` names an unknown argument or one that the run decides.
    """
    derived: dict[str, Any] = dict(
        model=str(model_path),
        skip_tokenizer_init=True,  # token in, token out
        generation_config="vllm",  # the checkpoint's sampling defaults never apply
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        # A seeded request whose prefill is split into chunks crashes vLLM's CPU runner.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(max_model_len, 8192),
        seed=0,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=_executor(config.tensor_parallel_size),
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
        block_size=BLOCK_SIZE_TOKENS,
        **vllm_precision(flow, plan, platform=current_platform().name),
    )
    defaults: dict[str, Any] = dict(enable_prefix_caching=True)
    from vllm.engine.arg_utils import EngineArgs

    known = set(EngineArgs.__dataclass_fields__)
    for name in config.vllm:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "see vLLM's engine arguments"
            raise ValueError(f"rollout.vllm.{name} is no engine argument of vLLM; {hint}")
        if name in derived:
            raise ValueError(
                f"rollout.vllm.{name} follows from the precision flow or another rollout option "
                "and cannot be set here; remove it"
            )
    return derived | defaults | config.vllm


def _executor(tp_size: int) -> str:
    """Under a launcher each rank builds its own worker; "uni" would put all on one CUDA device."""
    many_devices = current_platform().name == "cuda" and "RANK" in os.environ
    return "external_launcher" if tp_size > 1 or many_devices else "uni"


class VLLMEngine(Engine):
    """One vLLM engine in this process."""

    def __init__(
        self,
        model_path: Path,
        flow: PrecisionFlow,
        config: RolloutConfig,
        *,
        plan: LinearPlan,
        max_model_len: int,
        parameter_names: Iterable[str],
        eos_token_ids: Iterable[int],
    ) -> None:
        """Starts the engine with the weights of ``model_path``.

        Args:
            model_path: Hugging Face directory.
            flow: Sets the engine's dtypes.
            config: Sampling limits and vLLM's own options.
            plan: Which linear layers the flow quantises. If any, the engine holds no weights until
                the first update.
            max_model_len: Longest prompt plus response, in tokens.
            parameter_names: Hugging Face names of the model's tensors.
            eos_token_ids: Every token that ends a response.
        """
        from vllm import LLM

        arguments = engine_arguments(model_path, flow, plan, config, max_model_len)
        with preserve_host_rng():
            self._llm = LLM(**arguments)
            self._llm.collective_rpc("rl_share_operators")
        self._expected = frozenset(served_names(parameter_names, plan))
        self._eos = tuple(eos_token_ids)
        self._max_model_len = max_model_len
        self._tp_size = config.tensor_parallel_size
        self._timeout_s = config.timeout_s
        self._version = -1
        self._broken: str | None = None
        if flow.serves_quantised:
            self._broken = f"flow {flow.name!r} brings the weights with the first update"
        self._cache_is_empty = False

    @property
    def version(self) -> int:
        """Version of the weights in force; -1 for those the engine was started with."""
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """See :meth:`Engine.generate`."""
        if self._broken:
            raise RuntimeError(f"the rollout engine holds no complete policy: {self._broken}")
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= self._max_model_len - sampling.max_tokens:
                room = self._max_model_len - sampling.max_tokens
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; with responses of "
                    f"{sampling.max_tokens} the engine takes 1 to {room}"
                )
        # What one call caches must not change the bits of the next: the result depends on the
        # arguments and the weights alone, also after a resume.
        self._reset_prefix_cache()
        numbers = range(len(prompts)) if prompt_indices is None else prompt_indices
        requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(sampling.n)]
        params = [
            self._sampling_params(sampling, prompt, sample)
            for prompt in numbers
            for sample in range(sampling.n)
        ]
        self._cache_is_empty = False
        with preserve_host_rng():
            request_ids = self._llm.enqueue(requests, params, use_tqdm=False)
            outputs = run_requests(self._llm, request_ids, self._timeout_s, self._group())
        return [
            _completion(output, numbers[index // sampling.n], index % sampling.n)
            for index, output in enumerate(outputs)
        ]

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See :meth:`Engine.update_weights`."""
        self._broken = "a weight update did not complete"
        try:
            with torch.no_grad():
                self._llm.collective_rpc("rl_update_weights", args=(stream, self._expected))
        except Exception as error:
            self._broken = str(error)
            raise
        # Cached prompt keys and values belong to the old policy.
        self._reset_prefix_cache()
        self._broken = None
        self._version = version

    def report(self) -> ModelReport:
        """See :meth:`Engine.report`."""
        with torch.no_grad():
            report: ModelReport = self._llm.collective_rpc("rl_report")[0]
        return report

    def close(self) -> None:
        """Shuts the engine's core down."""
        self._llm.llm_engine.engine_core.shutdown()

    def _group(self) -> torch.distributed.ProcessGroup | None:
        if self._tp_size == 1:
            return None
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    def _reset_prefix_cache(self) -> None:
        # vLLM visits every block of the cache: a large cache of a small model has many.
        if self._cache_is_empty:
            return
        if not self._llm.reset_prefix_cache():
            self._broken = "the prefix cache could not be reset"
            raise RuntimeError(f"{self._broken}; are requests of an earlier call still running?")
        self._cache_is_empty = True

    def _sampling_params(self, sampling: Sampling, prompt: int, sample: int) -> Any:
        from vllm import SamplingParams

        seed = None if sampling.seed is None else derive_seed(sampling.seed, prompt, sample)
        stop = () if sampling.ignore_eos else (*self._eos, *sampling.stop_token_ids)
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=seed if sampling.temperature > 0 else None,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,  # EOS tokens are stop tokens like any other, all of them
            stop_token_ids=list(stop),
        )


def _completion(output: Any, prompt_index: int, sample_index: int) -> Completion:
    result = output.outputs[0]
    token_ids = tuple(result.token_ids)
    logprobs = tuple(
        step[token].logprob for token, step in zip(token_ids, result.logprobs, strict=True)
    )
    assert result.finish_reason in ("stop", "length"), result.finish_reason
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=result.finish_reason,
    )
