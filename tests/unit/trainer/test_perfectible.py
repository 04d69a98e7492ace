"""The perfectible set: what is kept, that it is kept, and what is refused."""

import json
from types import SimpleNamespace

import pytest

from megatron_rl.config import ConfigError, validate
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.types import PromptRow, TokenizedPrompt
from megatron_rl.rewards.interface import RewardResult
from megatron_rl.rollout import Completion, Sampling
from megatron_rl.trainer import perfectible
from megatron_rl.trainer.components import Components
from megatron_rl.trainer.perfectible import FILE_NAME, with_perfectible_prompts

NUM_SAMPLES = 10
NUM_PROMPTS = 11
"""Prompt i is answered rightly i times in NUM_SAMPLES."""


class Engine:
    """Answers with the number of right answers so far, below the prompt's token; counts calls."""

    def __init__(self):
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []

    def generate(self, prompts, sampling, prompt_indices):
        self.calls.append((tuple(prompt_indices), sampling))
        return [
            Completion(
                prompt_index=number,
                sample_index=sample,
                token_ids=(1 if sample < prompt[0] else 0,),
                logprobs=(-0.5,),
                finish_reason="stop",
            )
            for number, prompt in zip(prompt_indices, prompts, strict=True)
            for sample in range(sampling.n)
        ]


def result(request, says_accuracy):
    right = float(request.response == "1")
    return RewardResult(score=right, accuracy=right if says_accuracy else None)


@pytest.fixture
def parts(monkeypatch):
    """Builds the parts of a run from its changes of ``data``, with stand-ins for what is heavy."""
    monkeypatch.setattr(perfectible, "sync", lambda parts, version: None)

    def make(*, rank=0, says_accuracy=True, seed=3, **data):
        source = {"name": "a", "kind": "file", "path": "a.jsonl"}
        settings = {"num_samples": NUM_SAMPLES, **data.pop("perfectible", {})}
        data = {"train": [source], "train_batch_size": 4, "perfectible": settings} | data
        config = validate({"seed": seed, "model": {"path": "m"}, "data": data})
        row = PromptRow(index=0, data_source="a", prompt="p", ground_truth="1")
        prompts = [
            TokenizedPrompt(row=row, token_ids=(i,), text=str(i)) for i in range(NUM_PROMPTS)
        ]
        rewards = SimpleNamespace(score=lambda rs: [result(r, says_accuracy) for r in rs])
        tokenizer = SimpleNamespace(decode=lambda ids: str(ids[0]))
        inputs = SimpleNamespace(
            train_prompts=prompts, rewards=rewards, tokenizer=tokenizer, stop_token_ids=(7,)
        )
        policy = SimpleNamespace(layout=SimpleNamespace(rank=rank))
        return Components(
            config=config,
            inputs=inputs,
            loader=PromptLoader(prompts, 4, seed, True),
            policy=policy,
            reference=None,
            engine=Engine(),
        )

    return make


def kept(parts):
    """Prompts that the loader yields in one epoch, in the data's order."""
    size = parts.loader.state_dict()["num_prompts"]
    batches = [parts.loader.next_batch() for _ in range(-(-size // 4))]
    return sorted([p.token_ids[0] for batch in batches for p in batch][:size])


def choose(parts, run_dir, *, is_resumed=False):
    lines: list[str] = []
    chosen = with_perfectible_prompts(parts, run_dir, is_resumed=is_resumed, tell=lines.append)
    return chosen, lines


@pytest.mark.parametrize("limits", [(0.2, 0.8), (0.0, 1.0), (0.3, 0.6)])
def test_the_closed_range_is_kept_and_the_set_is_written(parts, tmp_path, limits):
    low, high = limits
    chosen, lines = choose(parts(perfectible={"min_accuracy": low, "max_accuracy": high}), tmp_path)
    wanted = list(range(round(10 * low), round(10 * high) + 1))
    assert kept(chosen) == wanted
    saved = json.loads((tmp_path / FILE_NAME).read_text())
    assert saved["kept"] == wanted
    assert saved["accuracies"] == [i / 10 for i in range(NUM_PROMPTS)]
    assert len(lines) == 1 and f"{len(wanted)} of 11 training prompts" in lines[0]


def test_every_prompt_is_sampled_once_in_portions_of_a_batch(parts, tmp_path):
    # A training batch is 4 x 8 responses: three prompts of ten samples each.
    run = parts()
    chosen, _ = choose(run, tmp_path)
    assert [len(numbers) for numbers, _ in run.engine.calls] == [3, 3, 3, 2]
    assert [i for numbers, _ in run.engine.calls for i in numbers] == list(range(NUM_PROMPTS))
    (sampling,) = {sampling for _, sampling in run.engine.calls}
    assert sampling.n == NUM_SAMPLES and sampling.temperature == 1.0 and sampling.seed is not None
    assert sampling.stop_token_ids == (7,)
    assert kept(chosen) == list(range(2, 9))


def test_a_resumed_run_takes_the_set_that_is_there(parts, tmp_path):
    choose(parts(), tmp_path)
    saved = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(saved | {"kept": [1, 2, 3, 5]}))
    resumed = parts()
    chosen, lines = choose(resumed, tmp_path, is_resumed=True)
    assert kept(chosen) == [1, 2, 3, 5] and resumed.engine.calls == []
    assert "4 of 11" in lines[0]
    # Another run of the same name that starts afresh chooses anew.
    chosen, _ = choose(parts(), tmp_path)
    assert kept(chosen) == list(range(2, 9))


def test_a_continuation_with_another_range_or_seed_is_refused(parts, tmp_path):
    choose(parts(), tmp_path)
    with pytest.raises(ValueError, match="max_accuracy=0.8 and it is 0.9 now"):
        choose(parts(perfectible={"max_accuracy": 0.9}), tmp_path, is_resumed=True)
    with pytest.raises(ValueError, match="seed=3 and it is 4 now"):
        choose(parts(seed=4), tmp_path, is_resumed=True)


def test_other_ranks_choose_the_same_and_write_nothing(parts, tmp_path):
    chosen, lines = choose(parts(rank=1), tmp_path)
    assert kept(chosen) == list(range(2, 9))
    assert lines == [] and list(tmp_path.iterdir()) == []


def test_without_the_option_a_run_is_left_alone(parts, tmp_path):
    run = parts()
    data = run.config.data.model_copy(update={"perfectible": None})
    run = Components(**{**vars(run), "config": run.config.model_copy(update={"data": data})})
    chosen, lines = choose(run, tmp_path)
    assert chosen is run and lines == [] and run.engine.calls == []


def test_what_is_refused(parts, tmp_path):
    with pytest.raises(ValueError, match=r"keeps 3 of 11 .*4 are below, 4 above.*batch_size=4"):
        choose(parts(perfectible={"min_accuracy": 0.4, "max_accuracy": 0.6}), tmp_path)
    assert not (tmp_path / FILE_NAME).exists()
    with pytest.raises(ValueError, match="returns no `acc`"):
        choose(parts(says_accuracy=False), tmp_path)
    with pytest.raises(ConfigError, match="min_accuracy=0.9 is above max_accuracy=0.8"):
        parts(perfectible={"min_accuracy": 0.9})
