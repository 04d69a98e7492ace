"""Tokenizers of model directories that hold a SentencePiece ``tokenizer.model`` and nothing newer.

SentencePiece knows pieces; what a language model adds to them stands beside it and is read here:
whether a prompt begins with BOS (``add_bos_token``), further special tokens
(``added_tokens_decoder``, ``added_tokens.json``), and the chat template. The meaning of each
follows transformers' Llama tokenizer, so a directory tokenises alike on both paths.

Deliberately trains, converts and writes nothing.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.tokenizer import chat_messages, single_token_ids
from megatron_rl.data.types import PromptRow

MODEL_FILE = "tokenizer.model"


class SentencePieceTokenizer:
    """A ``tokenizer.model`` with the settings beside it."""

    def __init__(self, path: Path) -> None:
        """Loads the tokenizer of a model directory.

        Args:
            path: Directory with ``tokenizer.model`` and, optionally, ``tokenizer_config.json``,
                ``added_tokens.json`` and ``chat_template.jinja``.

        Raises:
            ValueError: A file is unreadable, or the package ``sentencepiece`` is missing.
        """
        settings = _read_json(path / "tokenizer_config.json")
        self._processor, self._continuation = _processors(path / MODEL_FILE)
        self._legacy = settings.get("legacy") is not False
        self._added = _added_tokens(path, settings)
        """Token ids of strings that SentencePiece does not parse from text."""
        size = self._processor.get_piece_size()
        controls = [i for i in range(size) if self._processor.is_control(i)]
        self._special = {*controls, *_special_ids(settings, set(self._added.values()))}
        for token_id in controls:
            self._added.setdefault(self._processor.id_to_piece(token_id), token_id)
        self._bos = self._named_token(settings, "bos_token", self._processor.bos_id())
        self._eos = self._named_token(settings, "eos_token", self._processor.eos_id())
        self._special |= {token for token in (self._bos, self._eos) if token is not None}
        self._contents = {token_id: content for content, token_id in self._added.items()}
        self._add_bos = self._bos is not None and bool(settings.get("add_bos_token", True))
        self._template = _chat_template(path, settings)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode_prompt(self, row: PromptRow, use_chat_template: bool) -> tuple[int, ...]:
        """Tokens of a row's prompt.

        Text begins with BOS unless ``add_bos_token`` is false. Messages go through the chat
        template with the generation prompt; a template writes its BOS itself.

        Raises:
            ValueError: The row needs a chat template and there is none, or it refuses the messages.
        """
        if isinstance(row.prompt, str) and not use_chat_template:
            bos = [self._bos] if self._add_bos else []
            return (*bos, *self._encode(row.prompt))  # type: ignore[arg-type]
        return tuple(self._encode(self._render(row)))

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Tokens of a response's text; it continues a prompt, so neither BOS nor a space is added.

        SentencePiece would put the space of a sentence's beginning in front.
        """
        return tuple(self._encode(text, is_continuation=True))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn."""
        return self._eos

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, without the space that SentencePiece puts before a sentence.

        Ids past the vocabulary (rows that pad an embedding) have no text.
        """
        parts: list[str] = []
        pieces: list[int] = []
        is_first = True
        for token_id in (*token_ids, None):
            if token_id is not None and token_id not in self._contents:
                if 0 <= token_id < self._processor.get_piece_size():
                    pieces.append(token_id)
                continue
            if pieces:
                starts = is_first or self._legacy
                parts.append((self._processor if starts else self._continuation).decode(pieces))
                pieces, is_first = [], False
            if token_id is not None and not (skip_special_tokens and token_id in self._special):
                parts.append(self._contents[token_id])
        return "".join(parts)

    def stop_token_ids(self, strings: Sequence[str]) -> tuple[int, ...]:
        """The token of each stop string.

        Raises:
            ValueError: A string is not exactly one token.
        """
        return single_token_ids(strings, self.encode_response)

    def _encode(self, text: str, *, is_continuation: bool = False) -> Iterator[int]:
        position = 0
        for match in self._splitter.finditer(text):
            yield from self._encode_span(text, position, match.start(), is_continuation)
            yield self._added[match[0]]
            position = match.end()
        yield from self._encode_span(text, position, len(text), is_continuation)

    def _encode_span(self, text: str, start: int, end: int, is_continuation: bool) -> list[int]:
        """Pieces of ``text[start:end]``, between special tokens.

        With ``legacy``, every such span of a prompt is a sentence of its own, with a space before
        it; without, only one at the beginning of the text is.
        """
        if start == end:
            return []
        is_sentence = not is_continuation and (start == 0 or self._legacy)
        processor = self._processor if is_sentence else self._continuation
        ids: list[int] = processor.encode(text[start:end])
        return ids

    def _render(self, row: PromptRow) -> str:
        if self._template is None:
            raise ValueError(
                f"row {row.index} of {row.data_source!r} is a chat, and the tokenizer has no chat "
                "template; put a chat_template.jinja into the model's directory"
            )
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"bos_token": self._bos, "eos_token": self._eos}
        tokens = {name: self._content(token) for name, token in names.items() if token is not None}
        try:
            rendered: Any = render_jinja_template(
                [chat_messages(row)],
                chat_template=self._template,
                add_generation_prompt=True,
                **tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template refuses row {row.index} of {row.data_source!r}: {error}; "
                "correct the row's messages or the template"
            ) from error
        return str(rendered[0][0])

    def _content(self, token_id: int) -> str:
        return self._contents.get(token_id) or str(self._processor.id_to_piece(token_id))

    def _named_token(self, settings: dict[str, Any], name: str, default: int) -> int | None:
        """The id of a token that ``tokenizer_config.json`` names, else SentencePiece's own."""
        named = settings.get(name)
        content = named.get("content") if isinstance(named, dict) else named
        if not content:
            return default if default >= 0 else None
        if content not in self._added:
            token_id = self._processor.piece_to_id(content)
            if self._processor.id_to_piece(token_id) != content:
                raise ValueError(
                    f"tokenizer_config.json names {name} {content!r}, which is no token of "
                    f"{MODEL_FILE}; correct it"
                )
            self._added[content] = token_id
        return self._added[content]


def _processors(path: Path) -> tuple[Any, Any]:
    """The SentencePiece model as it is, and one that adds no space before a text."""
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ValueError(
            f"{path} is a SentencePiece model, and reading it needs the packages sentencepiece and "
            "protobuf; install them with: pip install sentencepiece protobuf"
        ) from error
    from google.protobuf.message import DecodeError

    content = path.read_bytes()
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(content)
        whole = sentencepiece.SentencePieceProcessor(model_proto=content)
        proto.normalizer_spec.add_dummy_prefix = False
        plain = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    except (DecodeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no SentencePiece model; copy it anew (a Git LFS pointer looks like this)"
        ) from error
    return whole, plain


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; correct it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, not a {type(content).__name__}; correct it")
    return content


def _added_tokens(path: Path, settings: dict[str, Any]) -> dict[str, int]:
    tokens = {str(k): int(v) for k, v in _read_json(path / "added_tokens.json").items()}
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        tokens[token["content"]] = int(token_id)
    return tokens


def _special_ids(settings: dict[str, Any], added: set[int]) -> set[int]:
    """Added tokens that are no text: all, but those that the settings call not special."""
    described = settings.get("added_tokens_decoder", {})
    return added - {int(i) for i, token in described.items() if not token.get("special", False)}


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template
