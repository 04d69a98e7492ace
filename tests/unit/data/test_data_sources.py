"""Rows from files and from generated tasks; what is wrong with a row is said by name."""

import datetime
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import DataConfig, DataSourceConfig
from megatron_rl.data.generated import generator_request, rows_from_entries
from megatron_rl.data.generator import generate
from megatron_rl.data.prompts import load_prompts, tokenize_rows
from megatron_rl.data.sources import drop_overlap, load_rows, load_sources
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


def generated(**changes):
    """Rows of `addition` made in this process, which saves the start of another."""
    source = addition(**changes)
    return rows_from_entries(source, *generate(**generator_request(source)))


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
        ('{"prompt": " \\n", "answer": "1"}', "row 2: `prompt` must be text"),
        ('{"prompt": 3, "answer": "1"}', "row 2: `prompt` must be text"),
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


def test_a_row_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n\xff\xfe\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2 is not UTF-8"):
        load_rows(file_source(path))


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\n')
    assert load_rows(file_source(path))[0].prompt == "a"


def test_a_file_that_is_cut_at_size_says_so(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", *[{"prompt": "a", "answer": 1}] * 3)
    assert len(load_rows(file_source(path, size=3))) == 3 and not caplog.messages
    assert len(load_rows(file_source(path, size=2))) == 2
    assert "more than the 2 rows that data.*.size allows" in caplog.text


def test_rows_can_be_sent_to_another_process_whatever_the_file_holds(tmp_path):
    record = {
        "prompt": "a",
        "answer": ["x", "y"],
        "ability": "math",
        "extra_info": {"when": datetime.date(2026, 1, 2), "bytes": b"x", "question": None},
    }
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    (row,) = load_rows(file_source(tmp_path / "a.parquet"))
    assert row.ground_truth == '["x", "y"]'
    assert row.extra_info["question"] == "a" and row.extra_info["verifier"] == "math"
    assert row.extra_info["when"] == "2026-01-02"
    assert json.loads(json.dumps(row.extra_info)) == row.extra_info


def test_a_template_applies_to_the_rows_of_a_file(tmp_path):
    records = [{"question": f"{i}+1", "answer": i + 1} for i in range(4)]
    path = write_jsonl(tmp_path / "a.jsonl", *records)
    source = file_source(
        path,
        num_shots=2,
        shot_template="{question}={answer};",
        prompt_template="{shots}{question}=",
    )
    rows = load_rows(source)
    assert [row.prompt for row in rows] == [
        "1+1=2;2+1=3;0+1=",
        "3+1=4;0+1=1;1+1=",
        "1+1=2;3+1=4;2+1=",
        "0+1=1;1+1=2;3+1=",
    ]
    assert [row.extra_info["question"] for row in rows] == ["0+1", "1+1", "2+1", "3+1"]
    with pytest.raises(ValueError, match="only 3 other questions"):
        load_rows(source.model_copy(update={"num_shots": 4}))
    chat = write_jsonl(tmp_path / "c.jsonl", {"prompt": CHAT, "answer": 1})
    with pytest.raises(ValueError, match="apply to text only"):
        load_rows(file_source(chat, num_shots=1))


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
    rows = generated()
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
    assert generated(seed=1) != generated()
    assert generated(size=10) == generated()[:10]


def test_generated_rows_are_the_same_in_every_process():
    # These tasks iterate over sets of text, or draw from the global random generator.
    sources = [addition()] + [
        DataSourceConfig(name=task, kind="reasoning_gym", task=task, size=60)
        for task in ("ransom_note", "codeio", "list_functions")
    ]
    first = load_sources(sources)
    assert first == load_sources(sources)
    assert first[0] == generated()
    assert [len(rows) for rows in first] == [40, 60, 60, 60]


def test_what_generated_rows_hold_survives_json():
    for row in generated(size=3) + generated(
        size=3, task="arc_agi", task_config={}, num_shots=0, prompt_template=None
    ):
        assert json.loads(json.dumps(row.extra_info)) == row.extra_info


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"task_config": {"min_term": 2}}, "did you mean 'min_terms'"),
        ({"task_config": {"seed": 2}}, "has no option 'seed' here"),
        ({"task_config": {"min_terms": 9, "max_terms": 2}}, "refuses"),
        ({"prompt_template": "{expresion}"}, "KeyError: 'expresion'.*offer answer, expression"),
        ({"shot_template": "{metadata[expression][x]}"}, "shot_template.*TypeError"),
        ({"shot_template": "{shots}"}, "shot_template.*'shots'"),
        ({"prompt_template": "{question"}, "prompt_template.*ValueError"),
        ({"task": "rush_hour", "task_config": {}}, "has no single answer; set num_shots to 0"),
    ],
)
def test_bad_tasks_and_templates_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        generated(**({"size": 2} | changes))


def test_a_bad_task_is_refused_with_the_name_of_its_source():
    with pytest.raises(ValueError, match="data source 'sums': no reasoning-gym task 'chain_sums'"):
        load_rows(addition(task="chain_sums"))


def test_held_out_questions_are_not_trained_on():
    train, val = generated(size=200), generated(seed=9)
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


def test_a_chat_that_the_template_refuses_is_named(tmp_path, tiny_model_dir):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), model)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    (row,) = load_rows(
        file_source(write_jsonl(tmp_path / "a.jsonl", {"prompt": CHAT, "answer": 1}))
    )
    with pytest.raises(ValueError, match="row 0 of 'file'.*no system role"):
        load_tokenizer(model).encode_prompt(row, False)


def test_text_comes_back_to_the_letter(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    for text in ("a , b . c ' s  d", " x", "x \n", "1 = 2 ?"):
        assert tokenizer.decode(tokenizer.encode_response(text)) == text


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
