"""Off-policy corrections against closed forms, a slow reference in float64, and what must never matter."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import LossInputs, policy_loss
from trainer.config.algorithm import AlgorithmConfig, ClampConfig, CorrectionConfig, MaskConfig, RejectConfig

OBJECTIVES = ("bypass", "decoupled", "loglinear")
LEVELS = ("token", "sequence", "sequence_mean")
METRICS = ("ratio", "k1", "k2", "k3", "tv")


def tokens(log_ratios: Any, lengths: Any = None, **others: Any) -> LossInputs:
    """Inputs whose current log-probs are `log_ratios` above the engine's."""
    log_ratio_L = torch.as_tensor(log_ratios, dtype=others.pop("dtype", torch.float64))
    engine_L = torch.linspace(-3.0, -1.0, len(log_ratio_L), dtype=log_ratio_L.dtype)
    lengths = [len(log_ratio_L)] if lengths is None else lengths
    return LossInputs(
        logprobs_L=engine_L + log_ratio_L,
        old_logprobs_L=engine_L,
        advantages_L=others.pop("advantages_L", torch.ones_like(log_ratio_L)),
        sequence_L=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        **others,
    )


def apply(inputs: LossInputs, config: CorrectionConfig, ages: Any = 0) -> Any:
    """With names for the parts of what `correct` returns."""
    age_L = torch.as_tensor(ages).expand(len(inputs.logprobs_L))
    names = ("inputs", "weight_L", "keep_L", "sums")
    return SimpleNamespace(**dict(zip(names, correct(inputs, age_L=age_L, config=config), strict=True)))


def gradient(inputs: LossInputs, config: CorrectionConfig, loss: str = "ppo_clip", ages: Any = 0) -> torch.Tensor:
    """Of the sum of corrected token losses, by the log-probs of the policy."""
    logprobs_L = inputs.logprobs_L.detach().requires_grad_()
    correction = apply(replace(inputs, logprobs_L=logprobs_L), config, ages)
    loss_L, _ = policy_loss(correction.inputs, config=AlgorithmConfig(loss=loss))  # type: ignore[arg-type]
    (loss_L * correction.weight_L).sum().backward()
    assert logprobs_L.grad is not None
    return logprobs_L.grad


def random_inputs(seed: int, *, spread: float = 0.7, num_sequences: int = 7) -> tuple[LossInputs, torch.Tensor]:
    """Ragged sequences, one of them without a loss token; and ages."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, num_sequences)
    lengths[num_sequences // 2] = 0
    num_tokens = int(lengths.sum())
    advantages_L = torch.from_numpy(rng.normal(size=num_tokens))
    inputs = tokens(rng.normal(0, spread, num_tokens), lengths.tolist(), advantages_L=advantages_L)
    return inputs, torch.from_numpy(rng.integers(0, 4, num_tokens))


# --- closed forms


def test_tis_without_a_cap_is_plain_importance_sampling() -> None:
    inputs, ages = random_inputs(0)
    plain = -inputs.advantages_L * (inputs.logprobs_L - inputs.old_logprobs_L).exp()
    no_cap = ClampConfig(upper=1e30)
    for config in (CorrectionConfig(clamp=no_cap), CorrectionConfig(objective="decoupled", clamp=no_cap)):
        torch.testing.assert_close(gradient(inputs, config, "importance_sampling", ages), plain)
    # A weighted -A log pi has the gradient of -A r.
    torch.testing.assert_close(gradient(inputs, CorrectionConfig(objective="decoupled"), "reinforce", ages), plain)


# --- a slow reference


def slow_value(log_ratios: list[float], metric: str, level: str, t: int, seq: list[int]) -> float:
    def one(x: float) -> float:
        r = math.exp(x)
        return {"k1": -x, "k2": x * x / 2, "k3": r - 1 - x, "tv": abs(r - 1) / 2}[metric]

    own = [x for x, s in zip(log_ratios, seq, strict=True) if s == seq[t]] if level != "token" else [log_ratios[t]]
    divisor = len(own) if level == "sequence_mean" else 1
    if metric == "ratio":
        return math.exp(sum(own) / divisor)
    return sum(one(x) for x in own) / divisor


def slow_weights(inputs: LossInputs, ages: list[int], config: CorrectionConfig) -> tuple[list[float], list[float]]:
    """(old log-probs, weights), token by token."""
    engine, current, seq = inputs.old_logprobs_L.tolist(), inputs.logprobs_L.tolist(), inputs.sequence_L.tolist()
    old = []
    for e, c, age in zip(engine, current, ages, strict=True):
        mixed = c if age == 0 else e / age + c * (age - 1) / age
        old.append({"bypass": e, "decoupled": c, "loglinear": mixed}[config.objective])
    top = current if config.objective == "bypass" else old
    x = [a - b for a, b in zip(top, engine, strict=True)]

    def is_out(bounds: Any, level: str, t: int) -> bool:
        value = slow_value(x, getattr(bounds, "metric", "ratio"), level, t, seq)
        too_low = bounds.lower is not None and value < bounds.lower
        return too_low or (bounds.upper is not None and value > bounds.upper)

    weights = []
    for t in range(len(x)):
        ratio = slow_value(x, "ratio", config.level, t, seq)
        weight = ratio if config.clamp.lower is None else max(ratio, config.clamp.lower)
        weight = weight if config.clamp.upper is None else min(weight, config.clamp.upper)
        if is_out(config.mask, config.level, t):
            weight = 0.0
        if any(is_out(config.reject, config.reject.level, u) for u in range(len(x)) if seq[u] == seq[t]):
            weight = 0.0
        weights.append(weight / ratio if config.objective == "bypass" else weight)
    return old, weights


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_equals_the_slow_reference(objective: Any, level: Any) -> None:
    clamps = [ClampConfig(), ClampConfig(upper=1.5), ClampConfig(lower=0.7, upper=1.3)]
    masks = [MaskConfig(), MaskConfig(lower=0.5, upper=2.0), *(MaskConfig(metric=m, upper=0.3) for m in METRICS[1:])]
    rejects = [RejectConfig(), *(RejectConfig(level=lv, metric="k3", upper=0.4) for lv in LEVELS)]
    for seed, (clamp, mask, reject) in enumerate(itertools.product(clamps, masks, rejects)):
        inputs, ages = random_inputs(seed)
        config = CorrectionConfig(objective=objective, level=level, clamp=clamp, mask=mask, reject=reject)
        got = apply(inputs, config, ages)
        old, weights = slow_weights(inputs, ages.tolist(), config)
        np.testing.assert_allclose(got.weight_L.numpy(), weights, rtol=1e-9, atol=1e-12, err_msg=str(config))
        np.testing.assert_allclose(got.inputs.old_logprobs_L.numpy(), old, rtol=1e-9)
        assert ((got.keep_L == 0) == (got.weight_L == 0)).all()


def test_statistics_are_those_of_the_weights() -> None:
    inputs, ages = random_inputs(3)
    config = CorrectionConfig(
        objective="decoupled", clamp=ClampConfig(upper=1.5), mask=MaskConfig(metric="k2", upper=0.4),
        reject=RejectConfig(upper=1.6),
    )  # fmt: skip
    sums, weight_L = apply(inputs, config, ages).sums, apply(inputs, config, ages).weight_L
    log_ratio = (inputs.logprobs_L - inputs.old_logprobs_L).numpy()
    assert sums["weight"].item() == pytest.approx(weight_L.sum().item())
    assert sums["weight_sq"].item() == pytest.approx((weight_L**2).sum().item())
    assert sums["weight_max"].item() == weight_L.max().item() <= 1.5
    assert sums["clamped"].item() == (log_ratio > math.log(1.5)).sum() > 0
    assert sums["masked"].item() == (log_ratio**2 / 2 > 0.4).sum() > 0
    assert 0 < sums["rejected"].item() < len(log_ratio)


# --- equivalences


@pytest.mark.parametrize("loss", ["ppo_clip", "importance_sampling", "gspo", "cispo", "reinforce"])
def test_no_correction_keeps_every_bit_of_the_loss(loss: Any) -> None:
    rng = np.random.default_rng(5)
    inputs = tokens(rng.normal(0, 2, 64), [30, 0, 34], dtype=torch.float32)
    correction = apply(inputs, CorrectionConfig(), ages=1)
    assert correction.inputs.old_logprobs_L is inputs.old_logprobs_L
    plain_L, _ = policy_loss(inputs, config=AlgorithmConfig(loss=loss))
    loss_L, _ = policy_loss(correction.inputs, config=AlgorithmConfig(loss=loss))
    assert (loss_L * correction.weight_L).equal(plain_L)


def test_loglinear_without_age_is_decoupled_and_at_age_one_it_is_the_plain_loss() -> None:
    inputs, _ = random_inputs(2)
    loglinear, decoupled = CorrectionConfig(objective="loglinear"), CorrectionConfig(objective="decoupled")
    assert gradient(inputs, loglinear, ages=0).equal(gradient(inputs, decoupled, ages=0))
    torch.testing.assert_close(gradient(inputs, loglinear, ages=1), gradient(inputs, CorrectionConfig(), ages=1))


# --- what must not matter

BUSY = CorrectionConfig(
    objective="loglinear", level="sequence_mean", clamp=ClampConfig(upper=1.4), mask=MaskConfig(lower=0.8),
    reject=RejectConfig(level="sequence", metric="k3", upper=1.0),
)  # fmt: skip


def by_sequence(inputs: LossInputs, ages: torch.Tensor, order: list[int]) -> tuple[LossInputs, torch.Tensor]:
    """The sequences in another order, or some of them."""
    at = [torch.nonzero(inputs.sequence_L == n)[:, 0] for n in order]
    index, lengths = torch.cat(at), torch.tensor([len(i) for i in at])
    chosen = {name: getattr(inputs, name)[index] for name in ("logprobs_L", "old_logprobs_L", "advantages_L")}
    sequence_L = torch.repeat_interleave(torch.arange(len(order)), lengths)
    return LossInputs(**chosen, sequence_L=sequence_L, num_sequences=len(order)), ages[index]


def test_neither_order_nor_split_of_the_responses_matters() -> None:
    inputs, ages = random_inputs(8)
    whole = apply(inputs, BUSY, ages)
    assert 0 < (whole.keep_L == 0).sum() < len(ages)
    for parts in ([[6, 2, 3, 0, 1, 5, 4]], [[0], [1, 2], [3], [4, 5, 6]], [[5, 0], [6, 4, 2, 3, 1]]):
        chosen = [by_sequence(inputs, ages, order) for order in parts]
        corrections = [apply(part, BUSY, part_ages) for part, part_ages in chosen]
        weight_L = torch.cat([c.weight_L for c in corrections])
        back = torch.cat([torch.nonzero(inputs.sequence_L == n)[:, 0] for order in parts for n in order])
        assert weight_L.equal(whole.weight_L[back])
        for name in ("weight", "weight_sq", "clamped", "masked", "rejected"):
            total = sum(c.sums[name].item() for c in corrections)
            assert total == pytest.approx(whole.sums[name].item(), rel=1e-12)


def test_a_micro_batch_without_loss_tokens_is_zero() -> None:
    inputs = tokens([], [0])
    for objective in OBJECTIVES:
        config = CorrectionConfig(
            objective=objective, level="sequence", clamp=ClampConfig(upper=2.0), reject=BUSY.reject
        )
        sums = apply(inputs, config, torch.zeros(0, dtype=torch.int64)).sums
        assert sums["weight"].item() == sums["weight_max"].item() == sums["fresh_tokens"].item() == 0


def test_an_impossible_token_stays_finite() -> None:
    inputs = tokens([500.0, -500.0, 0.0], dtype=torch.float32)
    for level in LEVELS:
        correction = apply(inputs, CorrectionConfig(objective="decoupled", level=level))
        assert torch.isfinite(correction.weight_L).all()
        assert torch.isfinite(correction.sums["fresh_kl"])


# --- causes of mismatch


def test_a_mismatch_is_attributed_by_the_age_of_its_tokens() -> None:
    log_ratio = np.array([0.3, 0.0, -0.2, 0.0])
    for ages, engine_abs, stale_abs in (([0, 1, 0, 2], 0.5, 0.0), ([1, 0, 2, 0], 0.0, 0.5), ([0, 0, 1, 1], 0.3, 0.2)):
        sums = apply(tokens(log_ratio), CorrectionConfig(), ages).sums
        assert sums["fresh_tokens"].item() == sums["stale_tokens"].item() == 2
        assert sums["fresh_abs"].item() == pytest.approx(engine_abs, abs=1e-9)
        assert sums["stale_abs"].item() == pytest.approx(stale_abs, abs=1e-9)
        kl = {0.3: math.exp(0.3) - 1.3, -0.2: math.exp(-0.2) - 0.8, 0.0: 0.0}
        for cause, is_fresh in (("fresh", True), ("stale", False)):
            expected = sum(kl[x] for x, age in zip(log_ratio.tolist(), ages, strict=True) if (age == 0) == is_fresh)
            assert sums[f"{cause}_kl"].item() == pytest.approx(expected, abs=1e-9)
