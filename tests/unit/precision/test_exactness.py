"""Where exactness is claimed, why it is not elsewhere, and the bounds that follow."""

import pytest

from megatron_rl.precision import flow_names, resolve_flow
from megatron_rl.precision.bounds import flow_bound
from megatron_rl.precision.exactness import exactness

PLACE = {
    "platform": "cpu",
    "train_tp": 1,
    "rollout_tp": 1,
    "sequence_parallel": False,
    "cpu_isa": "avx512_bf16",
}


@pytest.mark.parametrize("choice", ["bf16", "fp16", "fp8"])
def test_claimed_on_the_tested_cpu_with_one_rank_a_layer(choice):
    found = exactness(resolve_flow(choice), **PLACE)
    assert found.claimed and found.shared and found.reason == ""
    assert found.statement() == "exactly on-policy: log-probs are reproduced bit for bit"


@pytest.mark.parametrize(
    "choice, change, reason",
    [
        ("bf16", {"platform": "cuda", "cpu_isa": None}, "on CUDA"),
        ("bf16", {"rollout_tp": 2}, "rollout sums over 2 tensor-parallel ranks"),
        ("bf16", {"train_tp": 4}, "training sums over 4 tensor-parallel ranks"),
        ("fp8", {"train_tp": 2, "sequence_parallel": True}, "sums and splits norms over 2"),
        ("bf16", {"cpu_isa": "amx"}, "this processor (amx) were not compared"),
        ("bf16", {"cpu_isa": "avx512"}, "this processor (avx512)"),
        ("bf16", {"cpu_isa": "avx2"}, "this processor (avx2)"),
        ("bf16", {"cpu_isa": None}, "this processor (unknown)"),
        ("fp32", {}, "in fp32"),
        ("fp8_rollout", {}, "other formats than training"),
        ("mxfp8", {}, "mx-e4m3 1x32 e8m0 operands"),
        ({"base": "fp8", "linear_weight": "e4m3 128x128 fp32"}, {}, "e4m3 128x128 fp32 operands"),
        ({"base": "bf16", "shared_operators": ["norm", "rope"]}, {}, "share no attention"),
        ({"base": "bf16", "shared_operators": []}, {}, "precision.exact=false"),
        ({"base": "bf16", "lm_head": "fp32"}, {}, "output layer computes in fp32"),
    ],
)
def test_each_condition_alone_ends_the_claim_with_its_reason(choice, change, reason):
    found = exactness(resolve_flow(choice), **(PLACE | change))
    assert not found.claimed and reason in found.reason
    assert found.statement() == f"not claimed: {found.reason}"
    assert "\n" not in found.reason and ". " not in found.reason


def test_on_cuda_nothing_is_shared():
    for name in flow_names():
        assert not exactness(resolve_flow(name), **(PLACE | {"platform": "cuda"})).shared
    # Operators are still shared where exactness cannot be promised.
    assert exactness(resolve_flow("bf16"), **(PLACE | {"rollout_tp": 2})).shared
    assert not exactness(resolve_flow("fp32"), **PLACE).shared


def test_bounds_are_zero_where_exact_and_grow_with_the_coarseness_of_the_flow():
    for name in flow_names():
        assert flow_bound(resolve_flow(name), exact=True) == 0
    order = ("fp32", "fp16", "bf16", "fp8", "fp8_rollout")
    bounds = [flow_bound(resolve_flow(name), exact=False) for name in order]
    assert bounds == sorted(set(bounds)) == [1e-4, 0.02, 0.1, 0.15, 0.3]
