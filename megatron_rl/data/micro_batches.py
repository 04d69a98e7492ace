"""Cuts a batch into micro-batches of a token budget, and shares them out over data-parallel ranks.

Deterministic, and every index appears exactly once. Ranks always run the same number of
micro-batches, since collectives of a step must match.
"""

from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs items into micro-batches of at most ``max_tokens`` (first fit decreasing).

    Args:
        lengths: Tokens of each item; each at least 1.
        max_tokens: Budget of a micro-batch; a longer item runs alone.

    Returns:
        Indices of each micro-batch, ascending within it.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        for number, load in enumerate(loads):
            if load + length <= max_tokens:
                bins[number].append(index)
                loads[number] += length
                break
        else:
            bins.append([index])
            loads.append(length)
    return [sorted(micro_batch) for micro_batch in bins]


def plan_for_ranks(
    lengths: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Shares items out over ranks by tokens, then packs each rank's share.

    Args:
        lengths: Tokens of each item.
        num_ranks: Data-parallel ranks.
        max_tokens: Budget of a micro-batch.

    Returns:
        ``[rank][micro-batch][index]``; every rank has as many micro-batches as any other, of which
        some are empty where a rank has too few items.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plans = [
        [[share[i] for i in micro_batch] for micro_batch in _plan(share, lengths, max_tokens)]
        for share in map(sorted, shares)
    ]
    count = max(len(plan) for plan in plans)
    return [_split_to(plan, count, lengths) for plan in plans]


def _plan(share: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    return plan_micro_batches([lengths[i] for i in share], max_tokens)


def _split_to(plan: list[list[int]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Splits the largest micro-batches until there are ``count``, where items allow it."""
    plan = [list(micro_batch) for micro_batch in plan]
    while len(plan) < count:
        splittable = [m for m in plan if len(m) > 1]
        if not splittable:
            plan.append([])
            continue
        largest = max(splittable, key=lambda m: sum(lengths[i] for i in m))
        half = len(largest) // 2
        plan.append(largest[half:])
        del largest[half:]
    return plan
