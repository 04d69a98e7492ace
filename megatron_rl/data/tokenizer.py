"""Tokenizers behind one small interface. Text becomes tokens once, here, and never again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.data.types import PromptRow


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    def encode_prompt(self, row: PromptRow, use_chat_template: bool) -> tuple[int, ...]:
        """Tokens of a row's prompt, ready for the model to continue."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, for verifiers and people."""
        ...

    def stop_token_ids(self, strings: Sequence[str]) -> tuple[int, ...]:
        """The token of each stop string.

        Raises:
            ValueError: A string is not exactly one token.
        """
        ...


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` directory."""

    def __init__(self, path: Path) -> None:
        """Loads the tokenizer of a Hugging Face directory.

        Raises:
            ValueError: The directory has no tokenizer.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            detail = str(error).splitlines()[0]
            raise ValueError(
                f"{path} has no tokenizer that can be loaded ({detail}); put its tokenizer.json "
                "there"
            ) from error

    def encode_prompt(self, row: PromptRow, use_chat_template: bool) -> tuple[int, ...]:
        """Tokens of a row's prompt.

        Text is encoded as it stands, with the special tokens that the tokenizer itself adds (a BOS
        for the models that were trained with one). Messages go through the chat template with the
        generation prompt.

        Raises:
            ValueError: The row needs a chat template and the tokenizer has none.
        """
        if isinstance(row.prompt, str) and not use_chat_template:
            return tuple(self._tokenizer.encode(row.prompt))
        messages = (
            [{"role": "user", "content": row.prompt}]
            if isinstance(row.prompt, str)
            else list(row.prompt)
        )
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"row {row.index} of {row.data_source!r} is a chat, and the tokenizer has no chat "
                "template"
            )
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def stop_token_ids(self, strings: Sequence[str]) -> tuple[int, ...]:
        """The token of each stop string.

        Raises:
            ValueError: A string is not exactly one token.
        """
        ids = []
        for text in strings:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) != 1:
                raise ValueError(
                    f"rollout.stop string {text!r} is {len(tokens)} tokens of this tokenizer and "
                    "must "
                    "be one; responses are cut by tokens, not by text"
                )
            ids.append(tokens[0])
        return tuple(ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    return HuggingFaceTokenizer(path)
