from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.config.schema import LearnerConfig
from trainer.learner.fsdp import ShardedAdamW, learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8681981, 0.55, 0.2318019]),
    ],
)
def test_schedule_equals_the_closed_form(schedule: str, expected: list[float]) -> None:
    config = LearnerConfig(lr=1.0, lr_schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    got = [learning_rate(step, config=config, total_steps=6) for step in range(6)]
    assert got == pytest.approx(expected)
    assert learning_rate(600, config=config, total_steps=6) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def test_update_equals_plain_adamw_with_clipping_and_no_decay_on_vectors() -> None:
    config = LearnerConfig(lr=0.1, weight_decay=0.3, max_grad_norm=0.5, beta2=0.95)
    ours, plain = _model(), _model()
    optimizer = ShardedAdamW(dict(ours.named_parameters()), config=config)
    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) is m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    for _ in range(4):
        for model in (ours, plain):
            (model(torch.arange(8.0).view(2, 4)) ** 3).sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert optimizer.grad_sq_sum().sqrt().item() == pytest.approx(norm.item(), rel=1e-6)
        reference.step()
        reference.zero_grad()
        optimizer.step(lr=0.1, grad_norm=norm.item())
    for got, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert optimizer.num_updates == 4


def test_gradients_below_the_limit_are_left_alone() -> None:
    model = _model()
    optimizer = ShardedAdamW(
        dict(model.named_parameters()), config=LearnerConfig(lr=0.0001, max_grad_norm=100.0, beta1=0.0)
    )
    model(torch.ones(1, 4)).square().sum().backward()
    expected = model[0].weight.grad.clone()
    optimizer.step(lr=0.0001, grad_norm=optimizer.grad_sq_sum().sqrt().item())
    torch.testing.assert_close(optimizer.state()["exp_avg.0.weight"], expected)
