"""Rows of a file: what a JSONL line or a parquet record must hold to be a prompt.

The format is the one users of verl and its relatives have: ``prompt`` (text or chat messages),
ground truth as ``reward_model.ground_truth`` or a flat ``ground_truth``, ``answer`` or ``label``,
and ``extra_info``.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.data.types import PromptRow

GROUND_TRUTH_KEYS = ("ground_truth", "answer", "label")


def read_rows(path: Path, data_source: str, limit: int) -> list[PromptRow]:
    """Reads at most ``limit`` rows.

    Raises:
        ValueError: The file is missing, of another kind, empty, or a row is unreadable; the message
            names the file and the row.
    """
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist; correct data.*.path")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"data file {path} is neither .jsonl nor .parquet; convert it")
    rows = []
    for number, record in readers[path.suffix](path):
        if len(rows) == limit:
            break
        place = f"{path}, row {number}"
        rows.append(_row(record, len(rows), data_source, place))
    if not rows:
        raise ValueError(f"data file {path} holds no rows; add some, or remove the data source")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, row {number} is not JSON: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    number = 0
    for batch in file.iter_batches():
        for record in batch.to_pylist():
            number += 1
            yield number, record


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
    extra = record.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"{place}: extra_info is a {type(extra).__name__}, not an object")
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return PromptRow(
        index=index,
        data_source=str(record.get("data_source") or data_source),
        prompt=prompt,
        ground_truth=str(ground_truth),
        extra_info={"question": question, **extra},
    )


def _prompt(prompt: Any, place: str) -> str | tuple[dict[str, str], ...]:
    if isinstance(prompt, str) and prompt:
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
