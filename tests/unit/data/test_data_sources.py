"""Rows from files and from generated tasks; what is wrong with a row is said by name."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import DataConfig, DataSourceConfig
from megatron_rl.data.prompts import load_prompts, tokenize_rows
from megatron_rl.data.sources import drop_overlap, load_rows
from megatron_rl.data.tokenizer import load_tokenizer

ADDITION = {
    "name": "sums",
    "kind": "reasoning_gym",
    "task": "basic_arithmetic",
    "task_config": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "size": 40,
    "num_shots": 3,
    "shot_template": "{expression} = {answer}\n",
    "prompt_template": "{shots}{expression} =",
}


def file_source(path, **changes):
    return DataSourceConfig(name="file", kind="file", path=str(path), **changes)


def addition(**changes):
    return DataSourceConfig(**(ADDITION | changes))


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "truth",
    [{"reward_model": {"style": "rule", "ground_truth": "7"}}, {"answer": 7}, {"label": "7"}],
)
def test_every_spelling_of_the_ground_truth(tmp_path, truth):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "3+4=", **truth})
    (row,) = load_rows(file_source(path))
    assert (row.ground_truth, row.prompt, row.data_source) == ("7", "3+4=", "file")


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path):
    records = [
        {
            "data_source": "s",
            "prompt": CHAT,
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"index": 4},
        },
        {
            "data_source": "s",
            "prompt": CHAT * 2,
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": 5},
        },
    ]
    jsonl = write_jsonl(tmp_path / "a.jsonl", *records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    rows = load_rows(file_source(jsonl))
    assert rows == load_rows(file_source(tmp_path / "a.parquet"))
    assert rows[1].prompt == tuple(CHAT * 2) and rows[1].extra_info["index"] == 5
    assert load_rows(file_source(jsonl, size=1)) == rows[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 2 is not JSON"),
        ("[1]", "row 2 is a list"),
        ('{"answer": "1"}', "row 2: `prompt` must be text"),
        ('{"prompt": "", "answer": "1"}', "row 2: `prompt` must be text"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "row 2: a chat message needs"),
        ('{"prompt": "a"}', "row 2 has no ground truth"),
        ('{"prompt": "a", "answer": 1, "extra_info": 3}', "row 2: extra_info is a int"),
    ],
)
def test_an_unreadable_row_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"rows.jsonl, {message}"):
        load_rows(file_source(path))


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_rows(file_source(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match="neither .jsonl nor .parquet"):
        load_rows(file_source(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match="not a readable parquet"):
        load_rows(file_source(tmp_path / "a.parquet"))
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        load_rows(file_source(tmp_path / "e.jsonl"))


def test_generated_rows_are_solved_sums_before_an_unsolved_one():
    rows = load_rows(addition())
    assert len(rows) == 40
    for row in rows:
        *shots, last = row.prompt.split("\n")
        assert len(shots) == 3
        for shot in shots:
            left, right = shot.split(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)
        expression = last.removesuffix(" =")
        assert sum(map(int, expression.split(" + "))) == int(row.ground_truth)
        assert expression not in [shot.split(" = ")[0] for shot in shots]


def test_generated_rows_depend_on_the_seed_alone():
    assert load_rows(addition()) == load_rows(addition())
    assert load_rows(addition(seed=1)) != load_rows(addition())
    assert load_rows(addition(size=10)) == load_rows(addition())[:10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"task_config": {"min_term": 2}}, "did you mean 'min_terms'"),
        ({"task_config": {"seed": 2}}, "has no option 'seed' here"),
        ({"task_config": {"min_terms": 9, "max_terms": 2}}, "refuses"),
        ({"prompt_template": "{expresion}"}, "names 'expresion'.*expression"),
    ],
)
def test_bad_tasks_and_templates_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        load_rows(addition(**changes))


def test_held_out_questions_are_not_trained_on():
    train, val = load_rows(addition(size=200)), load_rows(addition(seed=9))
    kept = drop_overlap(train, val)
    questions = {row.extra_info["question"] for row in val}
    assert 0 < len(kept) < len(train)
    assert not [row for row in kept if row.extra_info["question"] in questions]
    with pytest.raises(ValueError, match="every training question"):
        drop_overlap(train, train)


def test_prompts_over_the_limit(tmp_path, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    rows = load_rows(
        file_source(
            write_jsonl(
                tmp_path / "a.jsonl",
                {"prompt": "abc", "answer": 1},
                {"prompt": "abcdefgh", "answer": 1},
            )
        )
    )
    with pytest.raises(ValueError, match="row 1 of 'file' has a prompt of 8 tokens.*=4"):
        tokenize_rows(rows, tokenizer, max_length_tokens=4)
    kept = tokenize_rows(rows, tokenizer, max_length_tokens=4, drop_overlong=True)
    assert [p.text for p in kept] == ["abc"]
    with pytest.raises(ValueError, match="no prompt has at most"):
        tokenize_rows(rows, tokenizer, max_length_tokens=2, drop_overlong=True)


def test_chats_go_through_the_template_and_text_does_not(tmp_path, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    path = write_jsonl(
        tmp_path / "a.jsonl", {"prompt": "hi", "answer": 1}, {"prompt": CHAT, "answer": 1}
    )
    text, chat = load_rows(file_source(path))
    assert tokenizer.decode(tokenizer.encode_prompt(text, False)) == "hi"
    rendered = tokenizer.decode(tokenizer.encode_prompt(chat, False), skip_special_tokens=False)
    assert rendered.startswith("<|im_start|>user\nhi") and rendered.endswith("assistant\n")
    assert tokenizer.encode_prompt(text, True) == tokenizer.encode_prompt(chat, False)


def test_a_stop_string_must_be_one_token(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    (token,) = tokenizer.stop_token_ids(["\n"])
    assert tokenizer.decode([token]) == "\n"
    with pytest.raises(ValueError, match="'ab' is 2 tokens"):
        tokenizer.stop_token_ids(["ab"])


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


def test_load_prompts_joins_sources(tmp_path, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "abc", "answer": 1})
    config = DataConfig(
        train=(file_source(path), addition(size=5)), val=(addition(seed=3, size=2),)
    )
    train, val = load_prompts(config, tokenizer)
    assert {p.row.data_source for p in train} == {"file", "sums"} and len(val) == 2
