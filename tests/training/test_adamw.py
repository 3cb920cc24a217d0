"""AdamW is PyTorch's, bit by bit, without importing the compiler."""

import copy

import pytest
import torch
from torch import nn

from vitascope.training.optim.adamw import AdamW

SHAPES = [(5, 7), (3,), (2, 3, 4), ()]
BETAS = (0.8, 0.97)


def make_groups(params: list[nn.Parameter]) -> list[dict]:
    """Two groups with settings of their own; one parameter never gets a gradient."""
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0, "lr": 3e-3}]


@pytest.fixture
def pair() -> tuple[AdamW, torch.optim.AdamW]:
    """Ours and PyTorch's over equal weights."""
    ours = [nn.Parameter(torch.randn(shape)) for shape in [*SHAPES, (4, 4)]]
    theirs = copy.deepcopy(ours)
    return AdamW(make_groups(ours), 1e-2, BETAS), torch.optim.AdamW(make_groups(theirs), 1e-2, BETAS, fused=True)


def run_steps(pair, count: int = 3) -> None:
    for _ in range(count):
        for one, other in zip(*(params_of(optimizer)[: len(SHAPES)] for optimizer in pair), strict=True):
            one.grad = torch.randn_like(one) * 10 ** torch.randint(-6, 3, ()).item()
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()


def params_of(optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_equal(pair) -> None:
    ours, theirs = pair
    for one, other in zip(params_of(ours), params_of(theirs), strict=True):
        assert torch.equal(one, other)
        assert ours.state[one].keys() == theirs.state[other].keys()
        for name, tensor in ours.state[one].items():
            assert torch.equal(tensor, theirs.state[other][name]) and tensor.dtype == theirs.state[other][name].dtype


def test_every_step_is_pytorch_s_bit_by_bit(pair) -> None:
    for step in range(5):
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)  # a schedule
        run_steps(pair, 1)
        check_equal(pair)


def test_a_parameter_without_a_gradient_stays_and_has_no_state(pair) -> None:
    before = params_of(pair[0])[-1].detach().clone()
    run_steps(pair)
    assert torch.equal(params_of(pair[0])[-1], before) and not pair[0].state[params_of(pair[0])[-1]]


def test_state_dicts_are_exchanged_with_pytorch_s_both_ways(pair) -> None:
    run_steps(pair)
    ours, theirs = pair
    saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    assert [group["params"] for group in saved[0]["param_groups"]] == [
        group["params"] for group in saved[1]["param_groups"]
    ]
    run_steps(pair)
    ours.load_state_dict(saved[1])
    theirs.load_state_dict(theirs.state_dict() | {"state": saved[0]["state"]})
    check_equal(pair)
    run_steps(pair)
    check_equal(pair)


def test_a_loaded_state_is_a_copy(pair) -> None:
    run_steps(pair)
    saved = copy.deepcopy(pair[0].state_dict())
    pair[0].load_state_dict(saved)
    before = copy.deepcopy(saved)
    run_steps(pair)
    for number, state in saved["state"].items():
        assert all(torch.equal(tensor, before["state"][number][name]) for name, tensor in state.items())


def test_gradients_are_dropped_not_zeroed(pair) -> None:
    run_steps(pair)
    pair[0].zero_grad()
    assert all(param.grad is None for param in params_of(pair[0]))
