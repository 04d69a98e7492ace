"""The rollout's CPU linear: rows that do not depend on their number, in the dtype of the flow."""

import pytest
import torch

from megatron_rl.rollout.shared_operators import _GuardedLinear


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_bias_in_fp32_leaves_the_dtype_of_the_product(rows):
    """vLLM widens the bias beside a matrix that it packed for AMX."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 64), (48, 64), 48)
    )
    given = []

    def product(x, weight, bias):
        given.append((len(x), bias))
        return torch.nn.functional.linear(x, weight, bias)

    linear = _GuardedLinear(product)
    output = linear(x, weight, bias.float())
    assert output.dtype == torch.bfloat16 and output.shape == (rows, 48)
    assert torch.equal(output, linear(x, weight, bias))
    assert torch.equal(output, torch.nn.functional.linear(x.repeat(2, 1), weight)[:rows] + bias)
    assert given == [(max(rows, 2), None)] * 2
