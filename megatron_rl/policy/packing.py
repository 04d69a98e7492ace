"""Packs prompt groups into one stream of tokens, each prompt once.

GRPO samples ``n`` responses to each prompt. Under causal attention the prompt's hidden states are
the same for all of them, so the prompt is computed once and every response attends to it:

    prompt | response 0 | response 1 | ... | response n-1        one group
    0..P-1 | P..P+R0-1  | P..P+R1-1  | ... |                     positions (RoPE)

The last prompt token predicts the first token of every response. Values and gradients are those of
``n`` separate sequences up to the rounding of sums; the work is ``P + sum(R)`` tokens instead of
``n*P + sum(R)``. The last token of a response predicts nothing and is left out.

Shapes: ``T`` tokens in the stream, ``R`` predicted (response) tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Response:
    """A sampled response and its row in the rollout batch."""

    row: int
    """Row ``b`` of the batch's ``[B, S]`` tensors."""
    token_ids: Sequence[int]
    """Sampled tokens, EOS included."""


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """A prompt and the responses of it that are computed together."""

    prompt_ids: Sequence[int]
    responses: Sequence[Response]

    @property
    def num_tokens(self) -> int:
        """Tokens of this group in the stream."""
        return len(self.prompt_ids) + sum(len(r.token_ids) - 1 for r in self.responses)


@dataclass(frozen=True, kw_only=True)
class GroupSpan:
    """Where a group lies in the stream."""

    start: int
    prompt_length: int
    response_lengths: tuple[int, ...]
    """Tokens of each response that are in the stream (one less than were sampled)."""

    @property
    def length(self) -> int:
        """Tokens of the group."""
        return self.prompt_length + sum(self.response_lengths)


@dataclass(frozen=True, kw_only=True)
class PackedGroups:
    """One micro-batch: a stream of ``T`` tokens with ``R`` predictions."""

    input_ids: torch.Tensor
    """``[1, T]`` int64."""
    position_ids: torch.Tensor
    """``[1, T]`` int64; restarts at the prompt's length for every response."""
    spans: tuple[GroupSpan, ...]
    """The groups, in stream order."""
    predict_index: torch.Tensor
    """``[R]`` int64: stream position whose hidden state predicts each response token."""
    target_ids: torch.Tensor
    """``[R]`` int64: the response tokens."""
    rows: torch.Tensor
    """``[R]`` int64: batch row of each response token."""
    columns: torch.Tensor
    """``[R]`` int64: position of each token in its response."""

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> "PackedGroups":
        """The same on a device."""
        tensors = ("input_ids", "position_ids", "predict_index", "target_ids", "rows", "columns")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def split_groups(groups: Sequence[PromptGroup], *, share_prefix: bool) -> list[PromptGroup]:
    """The groups themselves, or one group a response when prompts are not shared."""
    if share_prefix:
        return list(groups)
    return [
        PromptGroup(prompt_ids=group.prompt_ids, responses=(response,))
        for group in groups
        for response in group.responses
    ]


def pack_groups(groups: Sequence[PromptGroup], *, pad_to_multiple: int = 1) -> PackedGroups:
    """Packs groups into one stream.

    Args:
        groups: The groups; none makes a stream of padding, for a rank that has nothing to compute.
        pad_to_multiple: Tokens are added until ``T`` is a multiple (sequence parallelism splits the
            stream evenly). They form a group of their own and predict nothing.

    Raises:
        ValueError: A prompt or a response is empty.
    """
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    spans: list[GroupSpan] = []
    for group in groups:
        prompt_length = len(group.prompt_ids)
        if not prompt_length or any(not len(r.token_ids) for r in group.responses):
            raise ValueError("a prompt and each of its responses need at least one token")
        start = len(tokens)
        tokens.extend(group.prompt_ids)
        positions.extend(range(prompt_length))
        for response in group.responses:
            length = len(response.token_ids)
            first = len(tokens)
            predict.append(start + prompt_length - 1)
            predict.extend(range(first, first + length - 1))
            tokens.extend(response.token_ids[:-1])
            positions.extend(range(prompt_length, prompt_length + length - 1))
            targets.extend(response.token_ids)
            rows.extend([response.row] * length)
            columns.extend(range(length))
        spans.append(
            GroupSpan(
                start=start,
                prompt_length=prompt_length,
                response_lengths=tuple(len(r.token_ids) - 1 for r in group.responses),
            )
        )
    padding = -len(tokens) % pad_to_multiple or (0 if tokens else pad_to_multiple)
    if padding:
        spans.append(GroupSpan(start=len(tokens), prompt_length=padding, response_lengths=()))
        tokens.extend([0] * padding)
        positions.extend(range(padding))
    return PackedGroups(
        input_ids=torch.tensor([tokens], dtype=torch.int64),
        position_ids=torch.tensor([positions], dtype=torch.int64),
        spans=tuple(spans),
        predict_index=torch.tensor(predict, dtype=torch.int64),
        target_ids=torch.tensor(targets, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        columns=torch.tensor(columns, dtype=torch.int64),
    )
