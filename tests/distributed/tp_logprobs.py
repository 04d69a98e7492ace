"""Run by test_vocab_parallel: the log-prob head on a sharded vocabulary equals the whole one."""

import torch
import torch.distributed as dist

from megatron_rl.policy.logprobs import token_logprobs, vocab_shard


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    vocab, rows_per_rank = 101, 51
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(29, 16, generator=generator)
    weight = torch.zeros(size * rows_per_rank, 16)
    weight[:vocab] = torch.randn(vocab, 16, generator=generator) * 0.5
    targets = torch.randint(0, vocab, (29,), generator=generator)
    a, b = torch.randn(2, 29, generator=generator)

    def run(w, shard):
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        logprob, entropy = token_logprobs(
            h, w, targets, shard=shard, temperature=0.7, chunk_tokens=8
        )
        ((a * logprob).sum() + (b * entropy).sum()).backward()
        return logprob.detach(), entropy.detach(), h.grad, w.grad

    whole = run(weight, vocab_shard(vocab, len(weight), None))
    part = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    ours = run(weight[part], vocab_shard(vocab, rows_per_rank, group))
    expected = (*whole[:3], whole[3][part])
    for name, x, y in zip(("logprob", "entropy", "dh", "dw"), ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    print(f"rank {rank} of {size}: equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
