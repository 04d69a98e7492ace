"""Starting the policy changes nothing of torch but the two Tensor methods that the adaptor lists.

In a process of its own: only there is torch still as it was imported.
"""

import subprocess
import sys

CODE = """
import torch
import torch._dynamo  # wraps torch.manual_seed, whoever imports it

WATCHED = {"torch": torch, "torch.cuda": torch.cuda, "Tensor": torch.Tensor}
before = {name: dict(vars(thing)) for name, thing in WATCHED.items()}
originals = torch.Tensor.type, torch.Tensor.cuda

from megatron_rl.config import PolicyConfig
from megatron_rl.policy.parallel import initialize

initialize(PolicyConfig(), seed=0)

changed = {
    f"{name}.{key}"
    for name, thing in WATCHED.items()
    for key, value in before[name].items()
    # Names with an underscore are torch's own state, which its functions rebind.
    if not key.startswith("_") and vars(thing).get(key) is not value
}
changed |= {
    f"Tensor.{name}" for name in ("type", "cuda", "to", "pin_memory", "record_stream", "is_cuda")
    if getattr(torch.Tensor, name) is not getattr(torch._C.TensorBase, name, None)
    and name not in before["Tensor"]
}
assert changed == {"Tensor.type", "Tensor.cuda"}, changed
assert (torch.Tensor.type.__wrapped__, torch.Tensor.cuda.__wrapped__) == originals
assert torch.Tensor.type.__doc__ == originals[0].__doc__

for make in (torch.zeros, torch.ones, torch.empty):
    try:
        make(1, device="cuda")
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("a cuda tensor was made outside megatron")
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
assert torch.zeros(1, dtype=torch.int64).type() == "torch.LongTensor"
print("untouched")
"""


def test_starting_the_policy_leaves_torch_as_it_was():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("untouched\n"), result.stderr[-2000:]
