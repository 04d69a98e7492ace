"""The stream of weights from policy to rollout: names, order and formats that both sides agree on.

The wire format follows from the precision flow. A tensor that is not quantised is the parameter
itself; a quantised one is the codes and scales that training multiplied by (or, where only rollout
is quantised, that the flow makes of the parameter). Tensors share the policy's memory where the
layout allows, so they must be consumed before the next optimizer step.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from megatron_rl.policy.policy import FrozenPolicy
from megatron_rl.precision import LinearPlan, PrecisionFlow, torch_dtype
from megatron_rl.precision.wire import SCALE_SUFFIX, encode, is_quantised_weight


def stream_weights(policy: FrozenPolicy, flow: PrecisionFlow) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the policy as (Hugging Face name, tensor), layer by layer, in the flow's formats.

    Raises:
        ValueError: The policy's tensors are not in the flow's formats.
    """
    if policy.flow != flow:
        raise ValueError(
            f"the policy was built for flow {policy.flow.name!r} and rollout for {flow.name!r}; "
            "policy and rollout must have one flow"
        )
    plain = torch_dtype(flow.compute_dtype)
    for name, tensor in policy.served_tensors():
        is_scale = name.endswith(SCALE_SUFFIX)
        expected = torch.float32 if is_scale else plain
        if is_quantised_weight(name, policy.plan):
            expected = torch.float8_e4m3fn
        if tensor.dtype != expected:
            raise ValueError(
                f"{name} is {tensor.dtype} in the policy, and flow {flow.name!r} serves "
                f"{expected}; policy and rollout were built from different flows"
            )
        yield name, tensor


def stream_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    names: Iterable[str],
    flow: PrecisionFlow,
    plan: LinearPlan,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields an unquantised checkpoint as a policy of its weights would be served.

    Args:
        tensors: Lazy mapping from Hugging Face name to tensor.
        names: The model's tensors, in map order.
        flow: The flow.
        plan: Which linears it quantises.
    """
    dtype = torch_dtype(flow.compute_dtype)
    for name in names:
        yield from encode(name, tensors[name].to(dtype), flow, plan)
