"""Optimiser groups, learning-rate schedules, gradient clipping."""

import math
from dataclasses import replace

import pytest
import torch

from fastcollab.config import CoRLConfig, TrainConfig
from fastcollab.optim import clip_grad_norm, make_optimizer, make_schedule

CFG = TrainConfig(learning_rate=0.1, weight_decay=0.5)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


def test_only_trainable_parameters_and_decay_on_matrices_alone():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = make_optimizer(net.named_parameters(), CFG)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert decayed == {id(net[2].weight)}
    assert held == {id(p) for p in net.parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in net.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if name == "2.weight" else before[name]
        torch.testing.assert_close(p.detach(), expected)
    with pytest.raises(ValueError, match="trainable parameters: got 0, need >= 1"):
        make_optimizer([net[0].weight], CFG)


def test_settings_reach_adamw():
    optimizer = make_optimizer(model().parameters(), replace(CFG, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3))
    assert all(g["betas"] == (0.8, 0.9) and g["eps"] == 1e-3 and g["lr"] == 0.1 for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("constant", lambda x: 1.0),
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
    ],
)
def test_schedules(kind, after):
    optimizer = make_optimizer(model().parameters(), CFG)
    schedule = make_schedule(optimizer, replace(CFG, lr_scheduler_type=kind, warmup_steps=4), total_steps=10)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    expected = [0.025, 0.05, 0.075, 0.1] + [0.1 * after(i / 6) for i in range(6)]
    assert rates == pytest.approx(expected) and min(rates) > 0
    assert schedule.get_last_lr()[0] == pytest.approx(0.1 * after(1.0))


def test_schedule_resumes():
    cfg = replace(CFG, lr_scheduler_type="cosine", warmup_steps=2)
    whole, first, second = (make_schedule(make_optimizer(model().parameters(), cfg), cfg, 9) for _ in range(3))
    for schedule, steps in ((whole, 5), (first, 3)):
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for _ in range(2):
        second.optimizer.step()
        second.step()
    assert second.get_last_lr() == whole.get_last_lr()
    with pytest.raises(ValueError, match="total_steps: got 0"):
        make_schedule(whole.optimizer, cfg, 0)


def graded(scale):
    net = model()
    for i, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, scale * (i + 1))
    return net


def test_clip_returns_the_norm_before():
    net = graded(1.0)
    before = [p.grad.clone() for p in net.parameters()]
    want = math.sqrt(sum(float(g.square().sum()) for g in before))
    assert clip_grad_norm(net.parameters(), 0.0, step=1) == pytest.approx(want)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
    assert clip_grad_norm(net.parameters(), 0.5, step=1) == pytest.approx(want)
    assert clip_grad_norm(net.named_parameters(), 10.0, step=2) == pytest.approx(0.5, rel=1e-5)
    assert clip_grad_norm(model().parameters(), 1.0, step=3) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_norm_raises_and_touches_nothing(bad):
    net = graded(1.0)
    net[1].weight.grad[2] = bad
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(
        FloatingPointError, match=rf"step 17: got gradient norm {bad} \(first in 1.weight\), need a finite one"
    ):
        clip_grad_norm(net.named_parameters(), 1.0, step=17)
    with pytest.raises(FloatingPointError, match=f"step 17: got gradient norm {bad}, need"):
        clip_grad_norm(net.parameters(), 1.0, step=17)
    for p, g in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, g, equal_nan=True)


def test_a_warm_up_by_part_and_a_floor_of_the_rate():
    parameter = torch.nn.Parameter(torch.zeros(1))
    cfg = CoRLConfig(learning_rate=1.0)  # corl spec 2.9: 3 % warm-up, a cosine to 10 %
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = make_schedule(optimizer, cfg, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0]) and 0.1 < rates[-1] < 0.101
