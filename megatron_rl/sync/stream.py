"""The stream of weights from policy to rollout: names, order and dtypes that both sides agree on.

The wire format follows from the precision flow; for ``bf16`` and ``fp32`` it is the parameter
itself. Tensors share the policy's memory where the layout allows, so they must be consumed before
the next optimizer step.
"""

from collections.abc import Iterator

import torch

from megatron_rl.policy.policy import FrozenPolicy
from megatron_rl.precision import PrecisionFlow, torch_dtype


def stream_weights(policy: FrozenPolicy, flow: PrecisionFlow) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the policy as (Hugging Face name, tensor), layer by layer, in the flow's dtype.

    Raises:
        ValueError: The policy's parameters are not in the flow's format.
    """
    expected = torch_dtype(flow.compute_dtype)
    for name, tensor in policy.named_tensors():
        if tensor.dtype != expected:
            raise ValueError(
                f"{name} is {tensor.dtype} in the policy, and flow {flow.name!r} serves "
                f"{expected}; policy and rollout were built from different flows"
            )
        yield name, tensor
