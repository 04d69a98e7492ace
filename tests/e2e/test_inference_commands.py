"""The commands `eval` and `generate`: the answers of a run, from its checkpoint or its export."""

import io
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.launch.cli import main
from support.tiny_run import megatron_rl, metrics_of, train, write_recipe

TINY = ["trainer.total_steps=2", "evaluation.at_start=false"]
ROW_KEYS = {"prompt", "response", "token_ids", "logprobs", "finish_reason"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir("llama", tie_word_embeddings=True)
    return write_recipe(tmp_path_factory.mktemp("inference"), model)


@pytest.fixture(scope="module")
def run(recipe):
    return train(recipe, "name=trained", *TINY)


def succeed(*arguments):
    result = megatron_rl(*map(str, arguments))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def generate(*arguments):
    rows = [json.loads(line) for line in succeed("generate", *arguments).splitlines()]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert len(row["token_ids"]) == len(row["logprobs"]) > 0
        assert all(math.isfinite(value) and value <= 0 for value in row["logprobs"])
    return rows


def test_eval_repeats_the_last_evaluation_of_a_run(recipe, run, tmp_path):
    expected = {
        key: value
        for (step, key), value in metrics_of(run).items()
        if step == 2 and key.startswith("val-core/")
    }
    assert len(expected) >= 2
    before = sorted(path for path in run.rglob("*"))
    checkpoint = run / "checkpoints" / "global_step_2"
    # A recipe for many ranks; one process serves its checkpoint all the same.
    parallel = "policy.tensor_model_parallel_size=2"
    for source in (["--checkpoint", checkpoint, parallel], [f"model.path={run / 'hf'}"]):
        output = tmp_path / "result.json"
        table = succeed("eval", "--config", recipe, "--output", output, *source)
        result = json.loads(output.read_text())
        assert result["metrics"] == expected
        assert result["num_prompts"] == 4 and result["flow"] == "bf16"
        assert "letters" in table and "greedy" in table and "mean@2" in table
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.slow
def test_generate_samples_the_same_from_checkpoint_and_export(recipe, run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "b"}]
    prompts.write_text(f'{{"prompt": "a:"}}\n{{"prompt": {json.dumps(messages)}}}\n')
    common = ["--config", recipe, "--prompts", prompts, "--n", 2, "--max-tokens", 6, "--seed", 5]
    common.append("data.max_prompt_length_tokens=64")
    first = generate(*common, "--model", run / "hf")
    assert [row["prompt"] for row in first] == ["a:", "a:", messages, messages]
    assert first[0]["token_ids"] != first[1]["token_ids"]
    assert all(len(row["token_ids"]) <= 6 for row in first)
    output = tmp_path / "rows.jsonl"
    checkpoint = run / "checkpoints" / "global_step_2"
    succeed("generate", *common, "--checkpoint", checkpoint, "--output", output)
    assert [json.loads(line) for line in output.read_text().splitlines()] == first


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_are_those_of_transformers(recipe, run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    common = ["--config", recipe, "--temperature", 0, "precision.flow=fp32"]
    rows = generate(*common, "--model", run / "hf", "--prompt", "a:", "b + ", "--prompt", "c")
    assert [row["prompt"] for row in rows] == ["a:", "b + ", "c"]
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    for row in rows:
        start = tokenizer.encode(row["prompt"])
        with torch.no_grad():
            logits = model(torch.tensor([start + row["token_ids"]])).logits[0, len(start) - 1 : -1]
        assert logits.argmax(-1).tolist() == row["token_ids"]
        logprobs = torch.log_softmax(logits, -1).amax(-1)
        torch.testing.assert_close(torch.tensor(row["logprobs"]), logprobs, rtol=0, atol=1e-4)


def refused(capsys, *arguments):
    """What the command says of bad input that is refused before anything heavy is imported."""
    assert main([*map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-rl: error: ") and message.count("\n") == 1
    return message


def test_bad_arguments_are_refused_with_one_sentence(recipe, tmp_path, capsys):
    output = ["--output", tmp_path / "no" / "x.json"]
    assert "does not exist; make it" in refused(capsys, "eval", "--config", recipe, *output)
    generation = ["generate", "--config", recipe]
    some = [*generation, "--prompt", "a"]
    assert "--temperature is -1.0" in refused(capsys, *some, "--temperature=-1")
    assert "--n is 0" in refused(capsys, *some, "--n", 0)
    assert "--max-tokens is 0" in refused(capsys, *some, "--max-tokens", 0)
    assert "--prompt is empty" in refused(capsys, *generation, "--prompt", "")
    rows = tmp_path / "rows.jsonl"
    assert "does not exist" in refused(capsys, *generation, "--prompts", rows)
    rows.write_text('{"prompt": 3}\n')
    message = refused(capsys, *generation, "--prompts", rows)
    assert "row 1" in message and "must be text or a list" in message


def test_bad_input_is_refused_before_an_engine_starts(recipe, tmp_path):
    from megatron_rl.trainer.inference import (
        GenerationOptions,
        evaluate_model,
        generate_responses,
    )

    config = load_config(recipe)
    model = Path(config.model.path)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        evaluate_model(config, model, tmp_path, nullcontext)
    with pytest.raises(ValueError, match="set data.val"):
        evaluate_model(load_config(recipe, ["data.val=[]"]), model, None, nullcontext)
    silent = load_config(recipe, ["evaluation={greedy: false, num_samples: 0}"])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_model(silent, model, None, nullcontext)
    with pytest.raises(ValueError, match="50 tokens.*data.max_prompt_length_tokens"):
        generate_responses(config, model, None, ["x" * 50], GenerationOptions(), nullcontext)


def test_a_checkpoint_of_another_flow_ends_with_exit_code_2(recipe, run):
    checkpoint = run / "checkpoints" / "global_step_2"
    result = megatron_rl(
        *("eval", "--config", recipe, "--checkpoint", checkpoint, "precision.flow=fp32")
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("megatron-rl: error: ") and result.stderr.count("\n") == 1
    assert "precision flow 'bf16'" in result.stderr


@pytest.mark.slow
def test_a_sentencepiece_model_trains_and_generates(tmp_path):
    """No `tokenizer.json` anywhere: prompts, stop strings, rewards and the export go by pieces."""
    spm = pytest.importorskip("sentencepiece")
    from checkpoints_tools.tiny import write_tiny_model

    stream = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{a}: e {b}" for a in "abcdefghijklmnopq" for b in "xyz"]),
        model_writer=stream,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    size = spm.SentencePieceProcessor(model_proto=stream.getvalue()).get_piece_size()
    # Embeddings are padded in practice: a few ids have no piece.
    model = write_tiny_model(
        tmp_path / "model", tokenizer=None, vocab_size=size + 6, tie_word_embeddings=True
    )
    (model / "tokenizer.model").write_bytes(stream.getvalue())
    recipe = write_recipe(tmp_path, model, **{"rollout.stop": ["\n"]})
    run = train(recipe, *TINY)
    metrics = metrics_of(run)
    assert metrics[2, "actor/grad_norm"] > 0
    assert metrics[2, "rollout_corr/logp_diff_abs_mean"] < 0.05
    assert (run / "hf" / "tokenizer.model").read_bytes() == stream.getvalue()
    rows = generate("--config", recipe, "--model", run / "hf", "--n", 2, "--prompt", "a:")
    processor = spm.SentencePieceProcessor(model_proto=stream.getvalue())
    for row in rows:
        ids = [i for i in row["token_ids"] if i < size]
        assert row["response"] == processor.decode(ids)
