"""From data sources to tokenised prompts within the length limit."""

import logging
from collections.abc import Sequence

from megatron_rl.config import DataConfig, DataSourceConfig
from megatron_rl.data.sources import drop_overlap, load_sources
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import PromptRow, TokenizedPrompt

logger = logging.getLogger(__name__)


def load_prompts(
    config: DataConfig, tokenizer: Tokenizer
) -> tuple[list[TokenizedPrompt], list[TokenizedPrompt]]:
    """Training and held-out prompts; no held-out question is among the training ones.

    Raises:
        ValueError: A source is unusable, a prompt is too long, or nothing is left.
    """
    loaded = load_sources([*config.train, *config.val])
    train, val = loaded[: len(config.train)], loaded[len(config.train) :]
    held_out = [row for rows in val for row in rows]
    train = [drop_overlap(rows, held_out) for rows in train]
    return (
        _tokenize_all(config.train, train, tokenizer, config),
        _tokenize_all(config.val, val, tokenizer, config),
    )


def _tokenize_all(
    sources: Sequence[DataSourceConfig],
    loaded: Sequence[Sequence[PromptRow]],
    tokenizer: Tokenizer,
    config: DataConfig,
) -> list[TokenizedPrompt]:
    return [
        prompt
        for source, rows in zip(sources, loaded, strict=True)
        for prompt in tokenize_rows(
            rows,
            tokenizer,
            max_length_tokens=config.max_prompt_length_tokens,
            drop_overlong=config.overlong_prompts == "drop",
            use_chat_template=source.use_chat_template,
        )
    ]


def tokenize_rows(
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    *,
    max_length_tokens: int,
    drop_overlong: bool = False,
    use_chat_template: bool = False,
) -> list[TokenizedPrompt]:
    """Tokenises rows, in order.

    Raises:
        ValueError: A prompt is empty, or too long and not to be dropped; or none is left.
    """
    prompts = []
    for row in rows:
        token_ids = tokenizer.encode_prompt(row, use_chat_template)
        if not token_ids:
            raise ValueError(f"row {row.index} of {row.data_source!r} has an empty prompt")
        if len(token_ids) > max_length_tokens:
            if drop_overlong:
                continue
            raise ValueError(
                f"row {row.index} of {row.data_source!r} has a prompt of {len(token_ids)} tokens, "
                f"more than data.max_prompt_length_tokens={max_length_tokens}; raise the limit, "
                "shorten the prompt, or set data.overlong_prompts=drop"
            )
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        prompts.append(TokenizedPrompt(row=row, token_ids=token_ids, text=text))
    if len(prompts) < len(rows):
        logger.warning("dropped %d overlong prompts of %d", len(rows) - len(prompts), len(rows))
    if not prompts:
        raise ValueError(
            f"no prompt has at most data.max_prompt_length_tokens={max_length_tokens} tokens; "
            "raise it"
        )
    return prompts
