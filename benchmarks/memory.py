"""Memory of log-probs and their backward pass, against vocabulary size and number of tokens.

    python -m benchmarks.memory
    python -m benchmarks.memory --markdown docs/benchmarks/memory.md

Each figure is the peak resident memory of a fresh process, less what it held before the first
logit: hidden states, weight and libraries are not counted, gradients are. ``chunked`` is the
product's head (``megatron_rl.policy.logprobs``); ``plain`` is ``torch.log_softmax`` of all logits
with autograd. Both return log-probs, and both are run backward to hidden states and weight.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import ROOT, machine, markdown_table, write_markdown

METHODS = ("chunked", "plain")
MIB = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32_768, 65_536, 131_072])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=512, help="logprob_chunk_tokens")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--one", metavar="METHOD,V,T", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    sizes = arguments.hidden_size, arguments.chunk_tokens
    if arguments.one:
        method, vocab_size, tokens = arguments.one.split(",")
        print(json.dumps(measure(method, int(vocab_size), int(tokens), *sizes)))
        return
    points = {
        (method, vocab_size, tokens): _in_fresh_process(method, vocab_size, tokens, *sizes)
        for vocab_size in arguments.vocab_sizes
        for tokens in arguments.tokens
        for method in METHODS
    }
    write_markdown(_report(arguments, points), arguments.markdown)


def measure(
    method: str, vocab_size: int, tokens: int, hidden_size: int, chunk_tokens: int
) -> dict[str, float]:
    """Memory of one forward and backward pass in this process, in bytes.

    Args:
        method: ``chunked`` or ``plain``.
        vocab_size: Rows of the output weight.
        tokens: Tokens whose log-probs are computed.
        hidden_size: Width of the hidden states.
        chunk_tokens: Rows of logits alive at one time, for ``chunked``.
    """
    import torch

    from megatron_rl.policy.logprobs import token_logprobs, vocab_shard

    generator = torch.Generator().manual_seed(0)
    bf16 = {"dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(tokens, hidden_size, **bf16).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, **bf16) / hidden_size**0.5).requires_grad_()
    target = torch.randint(vocab_size, (tokens,), generator=generator)
    # Matrix products allocate workspaces on first use.
    (hidden[:8].detach() @ weight[:8].detach().t()).sum()
    before = _resident_bytes()
    _reset_peak()
    if method == "chunked":
        shard = vocab_shard(vocab_size, vocab_size, None)
        logprob, _ = token_logprobs(
            hidden, weight, target, shard=shard, temperature=1.0, chunk_tokens=chunk_tokens
        )
    else:
        logits = torch.nn.functional.linear(hidden, weight).float()
        logprob = torch.log_softmax(logits, dim=-1).gather(1, target[:, None])[:, 0]
        del logits
    logprob.mean().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "bytes": _peak_bytes() - before,
        "logprob": logprob.mean().item(),
        "grad": weight.grad.float().norm().item(),
    }


def _in_fresh_process(
    method: str, vocab_size: int, tokens: int, hidden_size: int, chunk_tokens: int
) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory"]
    command += ["--one", f"{method},{vocab_size},{tokens}"]
    command += ["--hidden-size", str(hidden_size), "--chunk-tokens", str(chunk_tokens)]
    # The allocator must return large blocks at once, or the peak would hold freed memory too.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": str(MIB),
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    point: dict[str, float] = json.loads(done.stdout)
    return point


def _report(
    arguments: argparse.Namespace, points: dict[tuple[str, int, int], dict[str, float]]
) -> str:
    rows = []
    for vocab_size in arguments.vocab_sizes:
        for tokens in arguments.tokens:
            chunked, plain = (points[method, vocab_size, tokens] for method in METHODS)
            _check_same_values(chunked, plain)
            rows.append(
                [
                    f"{vocab_size:,}",
                    f"{tokens:,}",
                    f"{vocab_size * tokens * 4 / MIB:,.0f}",
                    f"{chunked['bytes'] / MIB:,.0f}",
                    f"{plain['bytes'] / MIB:,.0f}",
                    f"{plain['bytes'] / chunked['bytes']:.1f}",
                ]
            )
    load = (
        f"Peak memory of log-probs and backward above what the process held before, in MiB. BF16 "
        f"weight and hidden states of width {arguments.hidden_size}, chunks of "
        f"{arguments.chunk_tokens} tokens. {machine()}."
    )
    header = ["vocabulary V", "tokens T", "V x T x 4 bytes", "chunked", "plain", "plain / chunked"]
    return f"{load}\n\n{markdown_table(header, rows)}"


def _check_same_values(chunked: dict[str, float], plain: dict[str, float]) -> None:
    for key in ("logprob", "grad"):
        if abs(chunked[key] - plain[key]) > 0.01 * abs(plain[key]):
            raise RuntimeError(f"{key} differs: chunked {chunked[key]}, plain {plain[key]}")


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _reset_peak() -> None:
    """Sets the process's peak to what it holds now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


if __name__ == "__main__":
    main()
