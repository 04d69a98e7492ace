"""Prompt groups of random tokens, and their plain one-sequence-a-response form."""

import torch


def random_groups(seed=0, sizes=((5, (3, 1, 6)), (9, (4,)), (2, (2, 2))), vocab=250):
    """Groups of (prompt length, response lengths); rows count up."""
    from megatron_rl.policy.packing import PromptGroup, Response

    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(3, vocab, (n,), generator=generator).tolist()

    groups, row = [], 0
    for prompt, responses in sizes:
        members = []
        for length in responses:
            members.append(Response(row=row, token_ids=tokens(length)))
            row += 1
        groups.append(PromptGroup(prompt_ids=tokens(prompt), responses=tuple(members)))
    return groups


def shape_of(groups):
    responses = [r for g in groups for r in g.responses]
    return len(responses), max(len(r.token_ids) for r in responses)


def reference_logprobs(hf_model, groups, temperature=1.0):
    """[B, S] log-probs and entropies by a plain forward of each sequence; differentiable."""
    rows, columns = shape_of(groups)
    logprobs, entropy = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for group in groups:
        for response in group.responses:
            ids = torch.tensor([[*group.prompt_ids, *response.token_ids]])
            logits = hf_model(ids).logits[0, len(group.prompt_ids) - 1 : -1].float() / temperature
            logp = logits.log_softmax(-1)
            targets = torch.tensor(response.token_ids)[:, None]
            place = response.row, slice(0, len(response.token_ids))
            logprobs[place] = logp.gather(1, targets)[:, 0]
            entropy[place] = -(logp.exp() * logp).sum(-1)
    return logprobs, entropy
