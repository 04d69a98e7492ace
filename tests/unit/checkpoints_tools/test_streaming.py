"""A conversion holds a few tensors, whatever the size of the model."""

import subprocess
import sys

import pytest
import torch

from checkpoints_tools import cli

# Prints the largest anonymous memory of this process, in bytes; pages of mapped files are not it.
MEASURED = """
import re, sys, threading, time
from checkpoints_tools import cli

peak, done = 0, threading.Event()
def sample():
    global peak
    while not done.is_set():
        status = open("/proc/self/status").read()
        peak = max(peak, 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]))
        time.sleep(0.001)
thread = threading.Thread(target=sample)
thread.start()
code = cli.main(sys.argv[1:])
done.set()
thread.join()
print(peak)
sys.exit(code)
"""
SIZES = {"hidden_size": 512, "num_attention_heads": 4, "ffn_hidden_size": 2048}
SIZES |= {"dtype": torch.bfloat16}
FEW, MANY = 4, 20
LARGEST_BYTES = 2 * 2048 * 512 * 2  # gate and up, as Megatron holds them
LAYER_BYTES = 2 * (4 * 512 * 512 + 3 * 512 * 2048)


def peak_bytes(*arguments):
    command = [sys.executable, "-c", MEASURED, *map(str, arguments), "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", ["import", "quantize", "export", "export-fp8", "dequantize"])
def test_memory_does_not_grow_with_the_model(tmp_path, tiny_model_dir, command, workers):
    peaks = []
    for layers in (FEW, MANY):
        model = tiny_model_dir("llama", num_layers=layers, num_query_groups=4, **SIZES)
        folder = tmp_path / str(layers)
        folder.mkdir()
        source, options = model, []
        if command == "dequantize":
            source = folder / "fp8"
            assert cli.main(["quantize", str(model), str(source), "--quiet"]) == 0
        elif command.startswith("export"):
            source = folder / "megatron"
            assert cli.main(["import", str(model), str(source), "--quiet"]) == 0
            options = ["--format", "vllm-fp8"] if command == "export-fp8" else []
        name = command.removesuffix("-fp8")
        options += ["--workers", workers, "--max-shard-size", "20MB"]
        peaks.append(peak_bytes(name, source, folder / "target", *options))
    grown = peaks[1] - peaks[0]
    model_grew = (MANY - FEW) * LAYER_BYTES
    assert grown < 2 * workers * LARGEST_BYTES < model_grew / 5, (grown, model_grew)
