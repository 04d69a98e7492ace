"""A step of a run becomes a Hugging Face directory: the weights that the run itself exported."""

import json

import pytest
import torch

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from megatron_rl.models.layout import same_bits
from support.tiny_run import train, write_recipe


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, tiny_model_dir):
    model = tiny_model_dir("qwen3", head_dim=32, tie_word_embeddings=True)
    changes = {"precision.flow": "bf16", "trainer.total_steps": 1}
    return train(write_recipe(tmp_path_factory.mktemp("export"), model, **changes), "name=run")


def test_a_step_of_a_run_is_exported(tmp_path, run_dir, capsys):
    (step,) = (run_dir / "checkpoints").glob("global_step_*")
    target = tmp_path / "hf"
    assert cli.main(["export", str(step), str(target), "--quiet"]) == 0
    ours, theirs = HFReader(target), HFReader(next(iter(run_dir.glob("**/config.json"))).parent)
    assert set(ours) == set(theirs)
    for name in theirs:
        assert same_bits(ours[name].to(theirs.dtype(name)), theirs[name]), name
    assert (target / "tokenizer.json").is_file()
    assert json.loads((target / "config.json").read_text())["model_type"] == "qwen3"
    assert {ours.dtype(name) for name in ours} == {torch.bfloat16}
    # The whole directory of checkpoints will do: its tracker names the last step.
    capsys.readouterr()
    assert cli.main(["verify", str(step.parent), str(target)]) == 0
    assert "bit for bit" in capsys.readouterr().out
