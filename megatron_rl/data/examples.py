"""Prompts with the responses to learn: rows of supervised fine-tuning as tokens.

Prompt and response are tokenised apart, as they are when a policy samples: the response begins at
a token border, so the tokens that are learned are those that sampling can produce.
"""

import logging
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.sft import SFTDataConfig
from megatron_rl.data.prompts import tokenize_rows
from megatron_rl.data.sources import drop_overlap, load_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import PromptRow, TokenizedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Example(TokenizedPrompt):
    """A prompt and the response to learn."""

    response_ids: tuple[int, ...]
    """Tokens of the response, EOS included."""


def load_examples(
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    eos_token_id: int,
    *,
    max_answer_length_tokens: int,
) -> tuple[list[Example], list[TokenizedPrompt]]:
    """Training examples and held-out prompts; no held-out question is among the training ones.

    Args:
        config: Sources, template and length limit.
        tokenizer: The model's.
        eos_token_id: Token that ends every response.
        max_answer_length_tokens: Room that a held-out prompt must leave for its answer.

    Raises:
        ValueError: A source or the template is unusable, a row is too long, or too few are left.
    """
    val = [(source, load_rows(source)) for source in config.val]
    held_out = [row for _, rows in val for row in rows]
    examples: list[Example] = []
    for source in config.train:
        rows = drop_overlap(load_rows(source), held_out)
        prompts = _prompts(rows, tokenizer, source.use_chat_template)
        examples += _examples(prompts, tokenizer, eos_token_id, config)
    if len(examples) < config.batch_size_sequences:
        raise ValueError(
            f"data.batch_size_sequences={config.batch_size_sequences} is more than the "
            f"{len(examples)} training rows; lower it or add rows"
        )
    val_prompts = []
    for source, rows in val:
        val_prompts += _prompts(rows, tokenizer, source.use_chat_template)
    _check_room(val_prompts, config.max_sequence_length_tokens, max_answer_length_tokens)
    return examples, val_prompts


def _prompts(
    rows: Sequence[PromptRow], tokenizer: Tokenizer, use_chat_template: bool
) -> list[TokenizedPrompt]:
    # Whole sequences are limited, not prompts.
    return tokenize_rows(
        rows, tokenizer, max_length_tokens=sys.maxsize, use_chat_template=use_chat_template
    )


def _examples(
    prompts: Sequence[TokenizedPrompt],
    tokenizer: Tokenizer,
    eos_token_id: int,
    config: SFTDataConfig,
) -> list[Example]:
    examples = []
    for prompt in prompts:
        row = prompt.row
        text = response_text(row, config.response_template)
        response_ids = (*tokenizer.encode_response(text), eos_token_id)
        length = len(prompt.token_ids) + len(response_ids)
        if length <= config.max_sequence_length_tokens:
            examples.append(
                Example(
                    row=row,
                    token_ids=prompt.token_ids,
                    text=prompt.text,
                    response_ids=response_ids,
                )
            )
        elif config.overlong_sequences == "error":
            raise ValueError(
                f"row {row.index} of {row.data_source!r} has {length} tokens with its response, "
                f"more than data.max_sequence_length_tokens={config.max_sequence_length_tokens}; "
                "raise the limit, shorten the row, or set data.overlong_sequences=drop"
            )
    if len(examples) < len(prompts):
        logger.warning("dropped %d overlong rows of %d", len(prompts) - len(examples), len(prompts))
    return examples


def response_text(row: PromptRow, template: str) -> str:
    """The response that a row teaches.

    Raises:
        ValueError: The template is malformed, or names what the row does not have.
    """
    plain = {k: v for k, v in row.extra_info.items() if isinstance(v, str | int | float)}
    fields = {"answer": row.ground_truth, **plain, "ground_truth": row.ground_truth}
    try:
        return string.Formatter().vformat(template, (), fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"data.response_template={template!r} does not fit row {row.index} of "
            f"{row.data_source!r} ({error}), which offers {', '.join(sorted(fields))}"
        ) from error


def _check_room(
    prompts: Sequence[TokenizedPrompt], max_length_tokens: int, max_answer_length_tokens: int
) -> None:
    for prompt in prompts:
        if len(prompt.token_ids) + max_answer_length_tokens > max_length_tokens:
            raise ValueError(
                f"held-out row {prompt.row.index} of {prompt.row.data_source!r} has a prompt of "
                f"{len(prompt.token_ids)} tokens, which with evaluation.max_response_length_tokens="
                f"{max_answer_length_tokens} is more than data.max_sequence_length_tokens="
                f"{max_length_tokens}; raise the limit or lower the response length"
            )
