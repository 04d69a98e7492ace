"""Checkpoints of real Transformer Engine tensors, read where TE is not installed.

TE's tensor classes, their pickling and megatron-core's writer are the real ones; the codes are made
by the emulation of `support.te_stand_in`. Nothing here ran on a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools import cli
from checkpoints_tools.hf import HFReader
from megatron_rl.models.layout import same_bits
from support.launch import run_distributed

SCRIPT = Path(__file__).with_name("te_checkpoint.py")
# 768 / 2 / 128 = 3 columns of scales a rank, which TE rounds up to 4 on each.
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 128, "ffn_hidden_size": 768}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("tp", [1, 2])
def test_codes_of_real_te_tensors_are_kept_byte_for_byte(
    capsys, tmp_path, te_environment, tiny_model_dir, tp
):
    model = tiny_model_dir("qwen3", **SIZES, dtype=torch.bfloat16)
    arguments = [str(model), str(tmp_path), str(tp)]
    run_distributed(SCRIPT, tp, arguments, timeout_s=600, env=te_environment)
    assert "transformer_engine" not in sys.modules

    def export(source, target, *options):
        command = ["export", tmp_path / source, tmp_path / target, "--hf-config", model, "--quiet"]
        return cli.main([str(argument) for argument in [*command, *options]])

    served = load_file(tmp_path / "served.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in served.values()) == 14
    assert export("ranks", "fp8", "--format", "vllm-fp8") == 0
    reader = HFReader(tmp_path / "fp8")
    assert set(reader) == set(served)
    for name, tensor in served.items():
        assert same_bits(reader[name], tensor), name
    # torch_dist has the same codes, but values for gate and up.
    assert export("torch_dist", "fp8-of-torch-dist", "--format", "vllm-fp8") == 0
    reader = HFReader(tmp_path / "fp8-of-torch-dist")
    assert set(reader) == set(served)
    kept = [name for name in served if "gate_proj" not in name and "up_proj" not in name]
    assert all(same_bits(reader[name], served[name]) for name in kept)
    assert export("ranks", "values") == 0
    assert export("torch_dist", "values-of-torch-dist") == 0
    command = ["dequantize", tmp_path / "fp8-of-torch-dist", tmp_path / "values-of-codes"]
    assert cli.main([*map(str, command), "--quiet"]) == 0
    a = HFReader(tmp_path / "values")
    for same in ("values-of-torch-dist", "values-of-codes"):
        b = HFReader(tmp_path / same)
        assert set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a), same
    # One scale a tensor.
    assert export("same", "one-scale", "--format", "vllm-fp8") == 0
    reader = HFReader(tmp_path / "one-scale")
    scales = [name for name in reader if name.endswith("weight_scale")]
    assert len(scales) == 14 and all(reader[n].item() == pytest.approx(0.001) for n in scales)
    capsys.readouterr()
    code = export("differ", "refused", "--format", "vllm-fp8")
    if tp == 1:
        assert code == 0
    else:
        assert code == 2 and "another scale on each of its 2" in capsys.readouterr().err
        assert export("differ", "anew", "--format", "vllm-fp8", "--requantize") == 0
