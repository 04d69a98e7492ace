"""The contract: rollout is contained in training, or one sentence says where it is not."""

import subprocess
import sys

import pytest

from megatron_rl.precision import LinearShape, flow_names, plan_linears, resolve_flow
from megatron_rl.precision.contract import contract, mismatch_statement, refusal
from megatron_rl.precision.graph import LINEARS, SIDES, Node, describe_graph, graph

CONTAINED = ("bf16", "fp16", "fp32", "fp8")
BLOCK_ROLES = {
    "linear_weight": "e4m3 128x128",
    "linear_input": "e4m3 1x128",
    "output_gradient": "e4m3 1x128",
}


def shape(name, rows, columns, unit, tp_axis):
    return LinearShape(
        name=f"decoder.layers.0.{name}",
        hf_modules=tuple(f"model.layers.0.{name}.{i}" for i in range(len(rows))),
        part_rows=rows,
        columns=columns,
        row_unit=unit,
        tp_axis=tp_axis,
        layer=0,
    )


@pytest.fixture
def plan():
    """A layer of 1024 with heads of 128 and a feed-forward width of 768 = 6 x 128."""
    shapes = [
        shape("linear_qkv", (1024, 512, 512), 1024, 128, 0),
        shape("linear_proj", (1024,), 1024, 1024, 1),
        shape("linear_fc1", (768, 768), 1024, 768, 0),
        shape("linear_fc2", (1024,), 768, 1024, 1),
    ]
    return plan_linears(shapes, num_layers=1)


def kinds(violations):
    return [violation.kind for violation in violations]


@pytest.mark.parametrize("name", CONTAINED)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_one_flow_for_both_sides_is_contained(name, platform, plan):
    flow = resolve_flow(name)
    found = contract(flow, plan, train_tp=2, rollout_tp=2, platform=platform)
    assert found == []
    assert refusal(flow, found, allow_mismatch=False) is None
    assert mismatch_statement(found) is None


def test_every_rollout_node_has_a_twin_in_training():
    for name in flow_names():
        nodes = graph(resolve_flow(name))
        assert {node.side for node in nodes} == set(SIDES)
        rollout = {(n.module, n.operator, n.operand) for n in nodes if n.side == "rollout"}
        forward = {(n.module, n.operator, n.operand) for n in nodes if n.side == "training forward"}
        assert rollout == forward and len(rollout) == 2 * len(LINEARS) + 10


def test_the_graph_shows_the_flow():
    nodes = graph(resolve_flow("fp8"))
    product = Node(side="rollout", module="linear_fc1", operator="product", operand="weight")
    assert nodes[product] == "e4m3 128x128 pow2"
    assert any("blocks along the tokens" in text for text in nodes.values())
    text = describe_graph(resolve_flow("fp8_rollout"))
    training, _, rollout = text.partition("rollout:")
    assert "e4m3" not in training and rollout.count("e4m3") == 2


def test_formats_that_differ_are_named_on_both_sides_and_need_consent():
    flow = resolve_flow("fp8_rollout")
    found = contract(flow)
    assert kinds(found) == ["format", "format"]
    assert (
        found[0].sentence
        == "the weight of the linear layers is e4m3 128x128 pow2 in rollout and bf16 in training"
    )
    message = refusal(flow, found, allow_mismatch=False)
    assert found[1].sentence in message and "precision.allow_mismatch=true" in message
    assert "\n" not in message and ". " not in message
    assert refusal(flow, found, allow_mismatch=True) is None
    assert mismatch_statement(found).startswith("MISMATCHED: the weight of the linear layers is")


def test_another_rollout_input_alone_is_a_mismatch():
    flow = resolve_flow({"base": "fp8", "rollout_linear_input": "e4m3 1x128 fp32"})
    found = contract(flow)
    assert kinds(found) == ["format", "stated"]
    assert "the input of the linear layers is e4m3 1x128 fp32 in rollout" in found[0].sentence


def test_a_layer_that_cannot_be_cut_is_never_allowed(plan):
    flow = resolve_flow("fp8")
    for sizes, side in (({"train_tp": 4}, "training TP 4"), ({"rollout_tp": 4}, "rollout TP 4")):
        found = contract(flow, plan, **sizes)
        assert set(kinds(found)) == {"partition"}
        message = refusal(flow, found, allow_mismatch=True)
        assert side in message and "linear_fc1 [1536 x 1024]" in message
        assert "TP sizes that work for this model: 1, 2" in message
    assert contract(resolve_flow("bf16"), plan_linears([], num_layers=0), train_tp=4) == []


def test_only_the_side_that_quantises_is_cut_in_blocks(plan):
    flow = resolve_flow("fp8_rollout")
    assert "partition" not in kinds(contract(flow, plan, train_tp=4))
    found = contract(flow, plan, train_tp=4, rollout_tp=4)
    sentences = [v.sentence for v in found if v.kind == "partition"]
    assert sentences and all("rollout TP 4" in text for text in sentences)
    # Consent to other formats is no consent to what cannot be computed.
    assert "cannot be run here" in refusal(flow, found, allow_mismatch=True)


@pytest.mark.parametrize(
    "choice, platform, message",
    [
        ("mxfp8", "cpu", "training and rollout would multiply mx-e4m3 1x32 e8m0 weights"),
        ({"base": "bf16", "rollout_linear_weight": "mx-e4m3"}, "cuda", "MX formats"),
        ({"base": "bf16", "linear_weight": "e4m3 128x128"}, "cpu", "both operands or neither"),
        ({"base": "fp8", "rollout_linear_weight": "bf16"}, "cpu", "codes that training made"),
        ({"base": "fp16", **BLOCK_ROLES}, "cuda", "on CUDA take and give bf16"),
    ],
)
def test_what_no_engine_computes_is_never_allowed(choice, platform, message):
    flow = resolve_flow(choice)
    found = contract(flow, platform=platform)
    assert "unsupported" in kinds(found)
    assert message in refusal(flow, found, allow_mismatch=True)


def test_fp16_around_fp8_is_a_matter_of_the_platform():
    assert contract(resolve_flow({"base": "fp16", **BLOCK_ROLES}), platform="cpu") == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_fp32_scales_are_stated_and_stop_nothing(platform):
    flow = resolve_flow({"base": "fp8", "linear_weight": "e4m3 128x128 fp32"})
    found = contract(flow, platform=platform)
    assert kinds(found) == ["stated"] and "pow2" in found[0].sentence
    assert refusal(flow, found, allow_mismatch=False) is None


def test_the_contract_needs_no_torch():
    code = (
        "import sys\n"
        "from megatron_rl.precision import bounds, contract, exactness, graph, resolve_flow\n"
        "assert contract.contract(resolve_flow('fp8_rollout'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
