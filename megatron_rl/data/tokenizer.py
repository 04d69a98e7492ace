"""Tokenizers behind one small interface. Text becomes tokens once, here, and never again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.data.types import PromptRow


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    def encode_prompt(self, row: PromptRow, use_chat_template: bool) -> tuple[int, ...]:
        """Tokens of a row's prompt, ready for the model to continue."""
        ...

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Tokens of a response's text, with nothing added."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, for verifiers and people."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn; None when the tokenizer names none."""
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
                "or tokenizer.model there"
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
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"row {row.index} of {row.data_source!r} is a chat, and the tokenizer has no chat "
                "template"
            )
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(
                chat_messages(row), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(
                f"row {row.index} of {row.data_source!r}: the model's chat template refuses its "
                f"messages ({error}); change their roles"
            ) from error
        return tuple(ids)

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Tokens of a response's text; it continues a prompt, so no BOS is put in front."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, to the letter."""
        return str(
            self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def stop_token_ids(self, strings: Sequence[str]) -> tuple[int, ...]:
        """The token of each stop string.

        Raises:
            ValueError: A string is not exactly one token.
        """
        return single_token_ids(
            strings, lambda text: self._tokenizer.encode(text, add_special_tokens=False)
        )


def chat_messages(row: PromptRow) -> list[dict[str, str]]:
    """A row's prompt as chat messages; text is one message of the user."""
    if isinstance(row.prompt, str):
        return [{"role": "user", "content": row.prompt}]
    return list(row.prompt)


def single_token_ids(
    strings: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """The token of each stop string.

    Args:
        strings: Stop strings.
        encode: Tokens of a text within a response, with nothing added.

    Raises:
        ValueError: A string is not exactly one token.
    """
    ids = []
    for text in strings:
        tokens = encode(text)
        if len(tokens) != 1:
            raise ValueError(
                f"rollout.stop string {text!r} is {len(tokens)} tokens of this tokenizer and must "
                "be one; responses are cut by tokens, not by text"
            )
        ids.append(tokens[0])
    return tuple(ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory: ``tokenizer.json``, or else ``tokenizer.model``.

    Raises:
        ValueError: The directory has no tokenizer that can be loaded.
    """
    if (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file():
        from megatron_rl.data.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(path)
    return HuggingFaceTokenizer(path)
