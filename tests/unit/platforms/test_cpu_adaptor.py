"""Every entry of the adaptor's closed list, and that nothing outside megatron changes."""

import importlib.metadata
import types

import pytest
import torch

from megatron_rl.config import PolicyConfig
from megatron_rl.platforms import cpu_megatron
from megatron_rl.policy.parallel import initialize

TESTED = {}


def patch(name):
    """Marks the test of one entry of PATCHES."""

    def mark(function):
        TESTED[name] = function
        return function

    return mark


@pytest.fixture(scope="module", autouse=True)
def adaptor():
    initialize(PolicyConfig(), seed=0)


@pytest.fixture
def megatron_torch():
    from megatron.core.optimizer import distrib_optimizer

    return distrib_optimizer.torch


def called_from_megatron(function):
    """The function, as if a module of megatron had defined it."""
    return types.FunctionType(function.__code__, {"__name__": "megatron.core.somewhere"})


@patch("torch.<factory>(device=, pin_memory=)")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)])
def test_factories_put_cuda_tensors_on_the_cpu(megatron_torch, device):
    assert megatron_torch.zeros(2, device=device).device.type == "cpu"
    assert megatron_torch.tensor([1.0], device=device).device.type == "cpu"
    assert not megatron_torch.empty(2, device=device, pin_memory=True).is_pinned()
    assert megatron_torch.ones(2, device="meta").device.type == "meta"
    for name in cpu_megatron.FACTORIES:
        assert getattr(megatron_torch, name) is not getattr(torch, name)


@patch("torch.cuda")
def test_cuda_answers_as_one_cpu_device(megatron_torch):
    cuda = megatron_torch.cuda
    assert cuda.current_device() == torch.device("cpu") and cuda.device_count() == 1
    stream, event = cuda.Stream(), cuda.Event()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        event.record()
    assert stream.record_event(event).query()
    assert cuda.memory_allocated() == 0
    cuda.synchronize(), cuda.nvtx.range_push("x"), cuda.nvtx.range_pop()
    cuda.manual_seed(3)
    state = cuda.get_rng_state()
    expected = torch.rand(2)
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2), expected)
    assert cuda.HalfTensor is torch.cuda.HalfTensor  # what is not listed is torch's own


@patch("Tensor.type")
def test_tensor_type_names_cuda_to_megatron_only():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    inside = called_from_megatron(lambda tensor: tensor.type())
    assert inside(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert inside(torch.zeros(1).bfloat16()) == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


@patch("Tensor.cuda")
def test_tensor_cuda_is_a_no_op_for_megatron_only():
    tensor = torch.zeros(1)
    assert called_from_megatron(lambda t: t.cuda())(tensor) is tensor
    with pytest.raises((AssertionError, RuntimeError)):
        tensor.cuda()


@patch("tensor_parallel.random.{_get,_set}_cuda_rng_state")
def test_the_rng_tracker_forks_the_cpu_generator():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(3)
    assert not torch.equal(first, second)


@patch("DistributedOptimizer.{_get,_set}_main_param_and_optimizer_states")
def test_adam_step_is_no_sharded_state(tiny_policy):
    policy = tiny_policy()
    from support.groups import random_groups, shape_of

    groups = random_groups()
    policy.update(groups, shape_of(groups), lambda lp, e, r, c: lp.mean(), temperature=1.0)
    optimizer = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])[0]
    parameter = next(iter(optimizer.model_param_group_index_map))
    states = optimizer._get_main_param_and_optimizer_states(parameter)
    assert set(states) == {"param", "exp_avg", "exp_avg_sq"}
    changed = {name: torch.full_like(value, 0.5) for name, value in states.items()}
    optimizer._set_main_param_and_optimizer_states(parameter, changed)
    after = optimizer._get_main_param_and_optimizer_states(parameter)
    assert all((value == 0.5).all() for value in after.values())


def test_every_patch_has_a_test():
    assert set(TESTED) == set(cpu_megatron.PATCHES)


def test_outside_megatron_torch_is_untouched():
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.cuda.Stream.__module__.startswith("torch.cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_install_is_idempotent():
    method = torch.Tensor.type
    count = cpu_megatron.install()
    assert cpu_megatron.install() == count > 50
    assert torch.Tensor.type is method


def test_another_version_or_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.17.0")
    with pytest.raises(RuntimeError, match=r"0\.16\.1, and 0\.17\.0 is installed"):
        cpu_megatron.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="for machines without CUDA"):
        cpu_megatron.install()
