"""Rows of a file: what a JSONL line or a parquet record must hold to be a prompt.

The format is the one users of verl and its relatives have: ``prompt`` (text or chat messages),
ground truth as ``reward_model.ground_truth`` or a flat ``ground_truth``, ``answer`` or ``label``,
and ``extra_info``. A row of verl's ``ability: math`` is verified as mathematics.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.data.plain import plain
from megatron_rl.data.types import PromptRow

logger = logging.getLogger(__name__)

GROUND_TRUTH_KEYS = ("ground_truth", "answer", "label")


def read_rows(path: Path, data_source: str, limit: int) -> list[PromptRow]:
    """Reads at most ``limit`` rows.

    Raises:
        ValueError: The file is missing, of another kind, empty, or a row is unreadable; the message
            names the file and the row.
    """
    rows: list[PromptRow] = []
    for number, record in _records(path):
        if len(rows) == limit:
            logger.warning(
                "%s has more than the %d rows that data.*.size allows; the rest is not read",
                path,
                limit,
            )
            break
        place = f"{path}, row {number}"
        rows.append(_row(record, len(rows), data_source, place))
    if not rows:
        raise ValueError(f"data file {path} holds no rows; add some, or remove the data source")
    return rows


def read_prompts(path: Path) -> list[str | tuple[dict[str, str], ...]]:
    """Reads prompts alone: of every JSONL or parquet row, text or chat messages.

    Raises:
        ValueError: As for :func:`read_rows`; a row needs no ground truth.
    """
    prompts = []
    for number, record in _records(path):
        place = f"{path}, row {number}"
        if not isinstance(record, Mapping):
            raise ValueError(f"{place} is a {type(record).__name__}, not an object with a prompt")
        prompts.append(_prompt(record.get("prompt", record.get("question")), place))
    if not prompts:
        raise ValueError(f"data file {path} holds no rows; add some")
    return prompts


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist; correct its path")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"data file {path} is neither .jsonl nor .parquet; convert it")
    return readers[path.suffix](path)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, row {number} is not UTF-8 text: {error}") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, row {number} is not JSON: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file (after row {number}): {error}"
        ) from error


def _row(record: Any, index: int, data_source: str, place: str) -> PromptRow:
    if not isinstance(record, Mapping):
        raise ValueError(f"{place} is a {type(record).__name__}, not an object with a prompt")
    prompt = _prompt(record.get("prompt", record.get("question")), place)
    ground_truth = _ground_truth(record)
    if ground_truth is None:
        raise ValueError(
            f"{place} has no ground truth; it needs reward_model.ground_truth or one of "
            f"{', '.join(GROUND_TRUTH_KEYS)}"
        )
    given = record.get("extra_info") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{place}: extra_info is a {type(given).__name__}, not an object")
    extra = plain(given)
    if not isinstance(extra.get("question"), str):
        extra["question"] = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if record.get("ability") == "math":
        extra.setdefault("verifier", "math")
    return PromptRow(
        index=index,
        data_source=str(record.get("data_source") or data_source),
        prompt=prompt,
        ground_truth=_text(ground_truth),
        extra_info=extra,
    )


def _prompt(prompt: Any, place: str) -> str | tuple[dict[str, str], ...]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt:
        messages = []
        for message in prompt:
            fields = message if isinstance(message, Mapping) else {}
            role, content = fields.get("role"), fields.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ValueError(f"{place}: a chat message needs text `role` and `content`")
            messages.append({"role": role, "content": content})
        return tuple(messages)
    raise ValueError(f"{place}: `prompt` must be text or a list of chat messages, not {prompt!r}")


def _ground_truth(record: Mapping[str, Any]) -> Any:
    reward_model = record.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((record[k] for k in GROUND_TRUTH_KEYS if record.get(k) is not None), None)


def _text(ground_truth: Any) -> str:
    """Text and numbers as they stand; lists and objects as JSON."""
    value = plain(ground_truth)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
