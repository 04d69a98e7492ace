"""Supervised fine-tuning: the loss is transformers' cross-entropy, and prompts carry none of it."""

import pytest
import torch

from megatron_rl.config import ConfigError, DataSourceConfig, apply_overrides, validate
from megatron_rl.config.sft import SFTConfig, SFTDataConfig
from megatron_rl.data.examples import Example, load_examples, response_text
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import PromptRow

EOS = 2
TREE = {
    "model": {"path": "m"},
    "data": {"train": [{"name": "a", "kind": "file", "path": "a.jsonl"}]},
}


def row(**changes):
    fields = {"index": 0, "data_source": "s", "prompt": "p", "ground_truth": "7"}
    return PromptRow(**(fields | changes))


def examples(seed=0, sizes=((5, 3), (2, 7), (9, 1), (5, 4))):
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())

    return [
        Example(row=row(), token_ids=tokens(prompt), text="", response_ids=tokens(response))
        for prompt, response in sizes
    ]


def transformers_loss(path, batch):
    """Token-mean cross-entropy by transformers' own `labels`, over one padded batch, and its model.

    -100 is the label that transformers leaves out: prompts and padding.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(len(e.token_ids) + len(e.response_ids) for e in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    attention = torch.zeros_like(ids)
    for place, example in enumerate(batch):
        sequence = [*example.token_ids, *example.response_ids]
        ids[place, : len(sequence)] = torch.tensor(sequence)
        attention[place, : len(sequence)] = 1
        labels[place, len(example.token_ids) : len(sequence)] = torch.tensor(example.response_ids)
    return model(input_ids=ids, attention_mask=attention, labels=labels).loss, model


@pytest.mark.parametrize("micro_batch_tokens", [8192, 12])
def test_loss_and_gradient_norm_are_those_of_transformers(
    tiny_policy, tiny_model_dir, micro_batch_tokens
):
    from megatron_rl.trainer.sft import learn

    policy = tiny_policy(micro_batch_tokens=micro_batch_tokens)
    loss, model = transformers_loss(tiny_model_dir("llama"), examples())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    metrics = learn(policy, examples())
    assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["sft/perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert metrics["perf/total_num_tokens"] == 5 + 3 + 2 + 7 + 9 + 1 + 5 + 4


def test_a_step_lowers_the_loss_of_its_batch(tiny_policy):
    from megatron_rl.trainer.sft import learn

    policy = tiny_policy(optimizer={"lr": 1e-3})
    losses = [learn(policy, examples())["sft/loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_the_objective_weighs_response_tokens_and_nothing_else():
    from megatron_rl.trainer.sft import CrossEntropy

    weights = torch.tensor([[0.5, 0.25], [0.25, 0.0]])
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    rows, columns = torch.tensor([1, 0, 0]), torch.tensor([0, 0, 1])
    loss = CrossEntropy(weights=weights)(logprobs, torch.zeros(3), rows, columns)
    loss.backward()
    assert loss.item() == 0.25 * 1 + 0.5 * 2 + 0.25 * 4
    assert logprobs.grad.tolist() == [-0.25, -0.5, -0.25]


@pytest.fixture
def source(tmp_path):
    def write(text, **options):
        path = tmp_path / f"{options.get('name', 'rows')}.jsonl"
        path.write_text(text)
        return DataSourceConfig(**({"name": "rows", "kind": "file", "path": str(path)} | options))

    return write


ROWS = '{"prompt": "1+1=", "answer": 2}\n{"prompt": "2+3=", "answer": 5}\n'


def test_examples_are_prompt_response_and_eos(source, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    config = SFTDataConfig(
        train=(source(ROWS),), response_template=" {ground_truth}\n", batch_size_sequences=2
    )
    found, val = load_examples(config, tokenizer, EOS, max_answer_length_tokens=4)
    assert val == [] and len(found) == 2
    for example, prompt, response in zip(found, ("1+1=", "2+3="), (" 2\n", " 5\n"), strict=True):
        assert tokenizer.decode(example.token_ids) == prompt
        assert tokenizer.decode(example.response_ids[:-1]) == response
        assert example.response_ids[-1] == EOS and EOS not in example.response_ids[:-1]


def test_held_out_questions_are_not_trained_on(source, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    held_out = source(ROWS.splitlines()[0] + "\n", name="val")
    config = SFTDataConfig(train=(source(ROWS),), val=(held_out,), batch_size_sequences=1)
    found, val = load_examples(config, tokenizer, EOS, max_answer_length_tokens=4)
    assert [e.text for e in found] == ["2+3="] and [p.text for p in val] == ["1+1="]


def test_overlong_rows_and_small_sets_are_refused(source, tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    rows = ROWS + '{"prompt": "1000+1000=", "answer": 2000}\n'

    def load(**options):
        config = SFTDataConfig(train=(source(rows),), **options)
        return load_examples(config, tokenizer, EOS, max_answer_length_tokens=4)

    fits = {"max_sequence_length_tokens": 6, "batch_size_sequences": 2}
    assert len(load(**fits, overlong_sequences="drop")[0]) == 2  # 4 + 1 + EOS is just six
    with pytest.raises(ValueError, match="row 2 of 'rows' has 15 tokens.*overlong_sequences=drop"):
        load(**fits)
    with pytest.raises(ValueError, match="batch_size_sequences=4 is more than the 3 training rows"):
        load(batch_size_sequences=4)
    with pytest.raises(ValueError, match="held-out row 0 of 'val'.*4 tokens.*max_response_length"):
        load(
            val=(source('{"prompt": "9+9=", "answer": 18}', name="val"),),
            max_sequence_length_tokens=7,
            batch_size_sequences=1,
            overlong_sequences="drop",
        )


def test_templates_name_ground_truth_answer_and_extra_info():
    assert response_text(row(), "{ground_truth}|{answer}") == "7|7"
    worked = row(extra_info={"answer": "3 + 4 = 7", "level": 2})
    assert response_text(worked, "{answer} -> {ground_truth} ({level})") == "3 + 4 = 7 -> 7 (2)"
    with pytest.raises(ValueError, match="response_template='{truth}'.*offers answer, ground_trut"):
        response_text(row(), "{truth}")
    with pytest.raises(ValueError, match="does not fit row 0"):
        response_text(row(), "{ground_truth")


def test_a_response_ends_with_the_eos_of_a_turn(tiny_model_dir):
    from megatron_rl.trainer.sft import response_end

    tokenizer = load_tokenizer(tiny_model_dir("llama"))
    assert response_end(tokenizer, (0, EOS)) == EOS
    assert response_end(tokenizer, (7, 8)) == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=3", "did you mean 'data.batch_size_sequences'"),
        ("rollout.n=3", "unknown config key 'rollout'"),
        ("algorithm.num_epochs=3", "unknown config key 'algorithm'"),
        ("trainer.resume_mode=path", "needs trainer.resume_path"),
    ],
)
def test_a_wrong_configuration_names_the_key(override, message):
    with pytest.raises(ConfigError, match=message):
        validate(apply_overrides(TREE, [override]), SFTConfig)


def test_an_answer_needs_room_only_where_there_is_one():
    short = ["data.max_sequence_length_tokens=32"]
    validate(apply_overrides(TREE, short), SFTConfig)
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        validate(apply_overrides(TREE, [*short, f"data.val={TREE['data']['train']}"]), SFTConfig)


@pytest.mark.parametrize(
    "section", [SFTConfig, SFTDataConfig, SFTConfig.model_fields["evaluation"].annotation]
)
def test_every_field_is_documented(section):
    assert not [name for name, field in section.model_fields.items() if not field.description]
