"""Optimizers against torch's own and against float64, schedules against closed forms, and sums of gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.fakes.learner import NEEDS_TORCHAO, gradients, make_learner, pack, run_config, sequences, weights
from trainer.config.schema import LearnerConfig, ParamGroupConfig
from trainer.errors import ModelError
from trainer.learner import optimizer as module
from trainer.learner.checkpoint import begin
from trainer.learner.optimizer import ShardedOptimizer, learning_rate, muon_matrices, quantized_block

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("one_rank")
CHOICES = {
    "adamw": {},
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "bfloat16 masters": {"master_dtype": "bfloat16"},
    "bfloat16 masters, 8-bit moments": {"master_dtype": "bfloat16", "optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "bfloat16 masters, muon": {"master_dtype": "bfloat16", "optimizer": "muon"},
}


@pytest.fixture(autouse=True)
def quantized_when_small() -> Any:
    with mock.patch.object(module, "MIN_QUANTIZED", 1):
        yield


def _config(directory: Path, choice: str) -> RunConfig:
    cfg = run_config(directory, **CHOICES[choice])
    half = cfg.learner.master_dtype == "bfloat16"
    return replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16")) if half else cfg


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8681981, 0.55, 0.2318019]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 0.55]),
    ],
)
def test_schedule_equals_the_closed_form(schedule: Any, expected: list[float]) -> None:
    last = {"decay_steps": 2} if schedule == "wsd" else {}
    config = LearnerConfig(lr=1.0, lr_schedule=schedule, warmup_steps=2, min_lr_ratio=0.1, **last)
    got = [learning_rate(step, config=config, total_steps=6) for step in range(6)]
    assert got == pytest.approx(expected)
    assert learning_rate(600, config=config, total_steps=6) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_wsd_falls_over_the_last_tenth_unless_told_otherwise() -> None:
    config = LearnerConfig(lr=1.0, lr_schedule="wsd")
    got = [learning_rate(step, config=config, total_steps=50) for step in (0, 45, 46, 49)]
    assert got == pytest.approx([1.0, 1.0, 0.8, 0.2])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96))


def _train(model: nn.Module, step: Any, *, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        rows = torch.randn(16, 64, generator=generator)
        (model(rows.to(next(model.parameters()).dtype)).float() - rows.mean(1, keepdim=True)).square().mean().backward()
        step()


def test_update_equals_plain_adamw_with_clipping_and_no_decay_on_vectors() -> None:
    config = LearnerConfig(lr=0.1, weight_decay=0.3, max_grad_norm=0.05, beta2=0.95, eps=1e-3)
    ours, plain = _model(), _model()
    optimizer = ShardedOptimizer(dict(ours.named_parameters()), config=config)
    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) is m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-3)
    norms: list[float] = []

    def step_plain() -> None:
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        reference.step()
        reference.zero_grad()

    def step_ours() -> None:
        norm = optimizer.grad_sq_sum().sqrt().item()
        assert norm == pytest.approx(norms.pop(0), rel=1e-5) and norm > 0.05
        optimizer.step(lr=0.1, grad_norm=norm)

    _train(plain, step_plain, num_steps=4)
    _train(ours, step_ours, num_steps=4)
    for got, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert optimizer.num_updates == 4


@pytest.mark.parametrize(
    ("optimizer", "tolerance"), [("adamw_bf16", 0.03), pytest.param("adamw_8bit", 0.06, marks=NEEDS_TORCHAO)]
)
def test_smaller_moments_stay_close_to_float32(optimizer: Any, tolerance: float) -> None:
    """Relative to the way that weights go in 40 steps."""
    first, exact, small = _model(), _model(), _model()
    for model, name in ((exact, "adamw"), (small, optimizer)):
        ours = ShardedOptimizer(dict(model.named_parameters()), config=LearnerConfig(lr=1e-3, optimizer=name))
        _train(model, lambda ours=ours: ours.step(lr=1e-3, grad_norm=0.0), num_steps=40)
    start, end, got = (nn.utils.parameters_to_vector(model.parameters()) for model in (first, exact, small))
    assert 0 < (got - end).norm() < tolerance * (end - start).norm()


def test_bfloat16_moves_by_the_mean_of_updates_that_are_too_small_for_it() -> None:
    """The second moment, too: rounded to nearest with beta2 = 0.999 it would never fall."""
    param = nn.Parameter(torch.ones(512, 64, dtype=torch.bfloat16))
    config = LearnerConfig(optimizer="adamw_bf16", weight_decay=0.0, beta1=0.0, max_grad_norm=1e9)
    optimizer = ShardedOptimizer({"w": param}, config=config)
    (slot,) = optimizer._slots
    slot.state["exp_avg_sq"].fill_(4.0)
    optimizer.set_num_updates(100_000)
    for _ in range(50):
        (param.float() * 0.5).sum().backward()
        optimizer.step(lr=1e-3, grad_norm=0.0)
    second = [4.0]
    for _ in range(50):
        second.append(second[-1] * 0.999 + 0.25 * 0.001)
    moved = sum(1e-3 * 0.5 / math.sqrt(one) for one in second[1:])
    assert (1 - param.float().mean().item()) == pytest.approx(moved, rel=0.03) and moved < 1 / 64
    assert slot.state["exp_avg_sq"].float().mean().item() == pytest.approx(second[-1], rel=2e-3)


def test_muon_equals_torchs_own_and_leaves_vectors_to_adamw() -> None:
    ours, plain = _model(), _model()
    config = LearnerConfig(optimizer="muon", lr=1e-2, weight_decay=0.1)
    optimizer = ShardedOptimizer(dict(ours.named_parameters()), config=config, matrices=["0.weight"])
    muon = torch.optim.Muon([plain[0].weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # type: ignore[index]
    rest = [param for param in plain.parameters() if param.ndim < 2]
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0, fused=True)

    def step_plain() -> None:
        for one in (muon, adamw):
            one.step()
            one.zero_grad()

    _train(plain, step_plain, num_steps=5)
    _train(ours, lambda: optimizer.step(lr=1e-2, grad_norm=0.0), num_steps=5)
    assert all(a.equal(b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_muon_moves_the_matrices_of_blocks_alone(tiny_dir: Path) -> None:
    learner = make_learner(_config(tiny_dir, "muon"))
    moved = muon_matrices(learner.model, learner._built.policy.trained())
    assert {name.rsplit(".", 2)[1] for name in moved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert len(moved) == 14


def test_parameter_groups_have_their_own_learning_rate_and_decay() -> None:
    groups = {
        "frozen": ParamGroupConfig(pattern="1.*", lr_ratio=1e-9),
        "rest": ParamGroupConfig(pattern="*", lr_ratio=0.5, weight_decay=0.0),
    }
    config = LearnerConfig(lr=0.1, weight_decay=0.5, param_groups=groups)
    half, plain = _model(), _model()
    ours = ShardedOptimizer(dict(half.named_parameters()), config=config)
    other = ShardedOptimizer(dict(plain.named_parameters()), config=LearnerConfig(lr=0.1, weight_decay=0.0))
    _train(half, lambda: ours.step(lr=0.1, grad_norm=0.0), num_steps=1)
    _train(plain, lambda: other.step(lr=0.05, grad_norm=0.0), num_steps=1)
    assert half.get_parameter("0.weight").equal(plain.get_parameter("0.weight"))
    assert half.get_parameter("1.weight").allclose(torch.ones(96))
    misnamed = replace(config, param_groups={"odd": ParamGroupConfig(pattern="lm_head*")})
    with pytest.raises(ModelError, match=r"learner\.param_groups\.odd\.pattern 'lm_head\*' fits none of the 4"):
        ShardedOptimizer(dict(half.named_parameters()), config=misnamed)


def test_blocks_of_8_bit_moments_divide_rows() -> None:
    with mock.patch.object(module, "MIN_QUANTIZED", 4096):
        shapes = [(151936, 896), (3584, 18944), (64, 2048, 768), (896,), (8, 896), (4096, 8), (1000, 257)]
        assert [quantized_block(shape) for shape in shapes] == [224, 256, 256, 0, 224, 0, 0]


@pytest.mark.parametrize("choice", ["adamw", "bfloat16 masters"])
def test_gradients_of_many_micro_batches_add_up_in_float32(choice: str, tiny_dir: Path) -> None:
    cfg, parts = _config(tiny_dir, choice), sequences(16)
    cfg = replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16"))
    learner = make_learner(cfg)
    exact = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in weights(learner).items()}
    for part in parts:
        for name, gradient in gradients(learner, [part]).items():
            exact[name] += gradient
    for name, gradient in gradients(learner, parts).items():
        assert gradient.dtype == torch.float32
        error = (gradient - exact[name]).norm() / exact[name].norm()
        assert error < 3e-7, f"{name}: {error}"


@pytest.mark.parametrize(
    "choice", [pytest.param(name, marks=[NEEDS_TORCHAO] if "8bit" in str(CHOICES[name]) else []) for name in CHOICES]
)
def test_a_resumed_run_goes_on_bit_for_bit(choice: str, tiny_dir: Path, tmp_path: Path) -> None:
    cfg, batch = _config(tiny_dir, choice), pack(sequences(6))
    learner = make_learner(cfg)
    for step in range(2):
        learner.train_step([batch], step=step)
    tmp = begin(tmp_path, 2)
    learner.save(tmp, step=2)
    torch.manual_seed(5)  # draws do not depend on it
    learner.train_step([batch], step=2)
    resumed = make_learner(cfg)
    assert resumed.load(tmp) == 2
    resumed.train_step([batch], step=2)
    expected = weights(learner)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())
    half = cfg.learner.master_dtype == "bfloat16"
    assert {one.dtype for one in expected.values()} == {torch.bfloat16 if half else torch.float32}
    before = weights(make_learner(cfg))
    assert not any(tensor.equal(before[name]) for name, tensor in expected.items() if tensor.ndim > 1)
