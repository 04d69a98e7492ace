"""Prompt text from a template: the question, and solved examples in front of it.

One account of the templates for files and generated tasks alike. Knows nothing of tokens or chats.
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config import DataSourceConfig

Fields = Mapping[str, Any]


def template_fields(question: str, answer: str | None, metadata: Mapping[str, Any]) -> Fields:
    """What a template may name: question, answer, metadata, and metadata's own plain values."""
    plain = {k: v for k, v in metadata.items() if isinstance(v, str | int | float)}
    return plain | {"question": question, "answer": answer, "metadata": dict(metadata)}


def render_prompts(
    source: DataSourceConfig, rows: Sequence[Fields], solved: Sequence[Fields], *, offset: int = 0
) -> list[str]:
    """Prompt texts of ``rows``.

    Args:
        source: Holds the templates and the number of solved examples.
        rows: Fields of each row, from :func:`template_fields`.
        solved: Where solved examples come from. Row ``i`` takes those from place
            ``i * num_shots + offset`` on, but never its own question, nor one question twice.
        offset: First place for the first row.

    Raises:
        ValueError: A template names what the rows do not offer, or ``solved`` has too few
            different questions, or one without an answer.
    """
    template = source.prompt_template or "{question}"
    if source.num_shots and "{shots}" not in template:
        template = "{shots}" + template
    prompts = []
    for index, fields in enumerate(rows):
        chosen = _choose(source, solved, fields["question"], index * source.num_shots + offset)
        shots = "".join(
            _format(source, "shot_template", source.shot_template, shot) for shot in chosen
        )
        prompts.append(_format(source, "prompt_template", template, {**fields, "shots": shots}))
    return prompts


def _choose(
    source: DataSourceConfig, solved: Sequence[Fields], question: str, start: int
) -> list[Fields]:
    chosen: list[Fields] = []
    taken = {question}
    for step in range(len(solved)):
        if len(chosen) == source.num_shots:
            break
        candidate = solved[(start + step) % len(solved)]
        if candidate["question"] in taken:
            continue
        if candidate["answer"] is None:
            raise ValueError(
                f"data source {source.name!r}: num_shots={source.num_shots} needs solved examples, "
                f"and {candidate['question']!r} has no single answer; set num_shots to 0"
            )
        chosen.append(candidate)
        taken.add(candidate["question"])
    if len(chosen) < source.num_shots:
        raise ValueError(
            f"data source {source.name!r}: num_shots={source.num_shots}, but there are only "
            f"{len(chosen)} other questions to show solved; lower num_shots or add rows"
        )
    return chosen


def _format(source: DataSourceConfig, name: str, template: str, fields: Fields) -> str:
    try:
        return string.Formatter().vformat(template, (), fields)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"data source {source.name!r}: {name}={template!r} does not fit "
            f"({type(error).__name__}: {error}); the rows offer {', '.join(sorted(fields))}"
        ) from error
