"""Policy losses, KL estimates and the critic's loss: closed forms, a slow reference, gradients, and keys that matter.

The order and split of sequences, extreme ratios and empty micro-batches are in the contract of a loss, which the tests
of `trainer.tools.loss_contract` run on every built-in one.

Shape legend: `L` loss tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.unit.trainer.config.test_rules import keys_refused
from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import LossInputs, kl_penalty, policy_loss, value_loss
from trainer.config.algorithm import LOSSES as LOSS_TRAITS
from trainer.config.algorithm import SELECTING_LOSSES, AlgorithmConfig, CorrectionConfig, LossName, Objective

LOSSES = get_args(LossName)
SELECTION_KEYS = {"cov_frac", "cov_min", "cov_max"}
"""Read by trainer.algorithms.token_weights, before there is a loss."""
ESTIMATORS = ("k1", "k2", "k3", "k1_straight_through", "k3_straight_through")
SHARED = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "cov_kl_coef": 0.7, "dppo_threshold": 0.05, "dro_beta": 0.3}
PPO_CASES = [(0.5, 1.0, -1.28), (-0.5, 1.0, -0.6065307), (0.5, -1.0, 1.6487213), (-0.5, -1.0, 0.8), (3.0, -1.0, 10.0)]


def config_for(loss: str, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{**SHARED, "loss": loss, **keys})


def inputs_of(
    log_ratios: list[float], advantages: list[float], *, lengths: list[int] | None = None, old: float = -2.0
) -> LossInputs:
    """One sequence unless `lengths` says otherwise; float64, so that closed forms are exact."""
    lengths = [len(log_ratios)] if lengths is None else lengths
    old_L = torch.full((len(log_ratios),), old, dtype=torch.float64)
    return LossInputs(
        logprobs_L=(old_L + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_(),
        old_logprobs_L=old_L,
        advantages_L=torch.tensor(advantages, dtype=torch.float64),
        sequence_L=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        selected_L=torch.zeros(len(log_ratios), dtype=torch.bool),
    )


def in_float32(inputs: LossInputs) -> LossInputs:
    names = ("logprobs_L", "old_logprobs_L", "advantages_L")
    return replace(inputs, **{name: getattr(inputs, name).detach().float() for name in names})


def random_inputs(seed: int, *, lengths: tuple[int, ...] = (3, 1, 0, 7, 5), per_turn: bool = False) -> LossInputs:
    """Ragged, with advantages of one value per sequence, or per token with `per_turn`."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    per_sequence = np.repeat(rng.normal(size=len(lengths)), lengths)
    old = -rng.exponential(1.5, num_tokens) - 0.02
    new = np.minimum(old + rng.normal(0, 0.4, num_tokens), -0.001)
    return LossInputs(
        logprobs_L=torch.from_numpy(new).requires_grad_(),
        old_logprobs_L=torch.from_numpy(old),
        advantages_L=torch.from_numpy(rng.normal(size=num_tokens) if per_turn else per_sequence),
        sequence_L=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        num_sequences=len(lengths),
        selected_L=torch.from_numpy(rng.random(num_tokens) < 0.3),
    )


def value_and_grad(inputs: LossInputs, config: AlgorithmConfig) -> tuple[np.ndarray, np.ndarray]:
    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    loss_L, _ = policy_loss(replace(inputs, logprobs_L=leaf_L), config=config)
    (grad_L,) = torch.autograd.grad(loss_L.sum(), leaf_L)
    return loss_L.detach().numpy(), grad_L.numpy()


def slow(inputs: LossInputs, config: AlgorithmConfig) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient by the formulas of the papers, one token at a time."""
    new, old, adv = (x.detach().tolist() for x in (inputs.logprobs_L, inputs.old_logprobs_L, inputs.advantages_L))
    sequence, selected = inputs.sequence_L.tolist(), inputs.selected_L.tolist()
    out = []
    for t in range(len(new)):
        mates = [u for u in range(len(new)) if sequence[u] == sequence[t]]
        out.append(slow_token(config, new, old, adv, t=t, mates=mates, selected=selected[t]))
    return np.array([v for v, _ in out]), np.array([g for _, g in out])


def slow_token(config: AlgorithmConfig, new, old, adv, *, t: int, mates: list[int], selected: bool):
    a, logp, r = adv[t], new[t], math.exp(new[t] - old[t])
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high

    def clip(ratio: float) -> tuple[float, float]:
        if a >= 0:
            return (-a * ratio, -a * ratio) if ratio <= high else (-a * high, 0.0)
        return (-a * ratio, -a * ratio) if ratio >= low else (-a * low, 0.0)

    if config.loss == "ppo_clip":
        value, grad = clip(r)
        if config.dual_clip is not None and a < 0 and value > -a * config.dual_clip:
            return -a * config.dual_clip, 0.0
        return value, grad
    if config.loss == "reinforce":
        return -a * logp, -a
    if config.loss == "importance_sampling":
        return -a * r, -a * r
    if config.loss == "gspo":
        return clip(math.prod(math.exp(new[u] - old[u]) for u in mates) ** (1 / len(mates)))
    if config.loss == "gmpo":
        product, is_open = 1.0, True
        for u in mates:
            ratio = math.exp(new[u] - old[u])
            bounded = (
                min(ratio, math.exp(config.clip_ratio_high))
                if adv[u] >= 0
                else max(ratio, math.exp(-config.clip_ratio_low))
            )
            product *= bounded
            is_open = is_open if u != t else bounded == ratio
        value = -a * product ** (1 / len(mates))
        return value, value if is_open else 0.0
    if config.loss == "cispo":
        weight = min(max(r, low), high)
        return -weight * a * logp, -weight * a
    if config.loss == "sapo":
        tau = config.sapo_tau_positive if a > 0 else config.sapo_tau_negative
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r
    if config.loss == "clip_cov":
        return (0.0, 0.0) if selected else clip(r)
    if config.loss == "kl_cov":
        sign = math.copysign(1, new[t] - old[t])
        penalty = config.cov_kl_coef if selected else 0.0
        return -a * r + penalty * abs(new[t] - old[t]), -a * r + penalty * sign
    if config.loss in {"dppo_tv", "dppo_kl"}:
        p, q = math.exp(old[t]), math.exp(new[t])
        tv, kl = abs(p - q), p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        is_far = (tv if config.loss == "dppo_tv" else kl) > config.dppo_threshold
        moves_away = (a > 0 and r > 1) or (a < 0 and r < 1)
        return (0.0, 0.0) if is_far and moves_away else (-a * r, -a * r)
    assert config.loss == "dro"
    return -a * logp + config.dro_beta / 2 * (new[t] - old[t]) ** 2, -a + config.dro_beta * (new[t] - old[t])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("per_turn", [False, True])
def test_value_and_gradient_equal_the_slow_reference(loss: str, per_turn: bool) -> None:
    config = config_for(loss, dual_clip=1.5) if loss == "ppo_clip" else config_for(loss)
    for seed in range(8):
        inputs = random_inputs(seed, per_turn=per_turn)
        for got, expected in zip(value_and_grad(inputs, config), slow(inputs, config), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "keys", "old", "log_ratios", "advantages", "expected"),
    [
        ("ppo_clip", {"dual_clip": 10.0}, -2, *map(list, zip(*PPO_CASES, strict=True))),
        ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, -2, [0.3, -0.1, 0.2], [1, 1, 1], [-1.0004] * 3),
        ("cispo", {}, -1.5, [0.5], [1], [1.28]),
        ("cispo", {}, -1, [-0.5], [1], [1.20]),
        ("sapo", {}, -2, [0.5, 0.5], [1, -1], [-2.6268890, 2.5295122]),
        ("gmpo", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, -2, [0.9, -0.9], [1, 1], [-math.exp(-0.25)] * 2),
        ("reinforce", {}, -2, [0.5], [3], [4.5]),
        ("dro", {"dro_beta": 0.2}, -2, [0.5], [1], [1.525]),
    ],
)
def test_loss_equals_the_closed_form(loss: str, keys: dict, old: float, log_ratios, advantages, expected) -> None:
    loss_L, _ = policy_loss(inputs_of(log_ratios, advantages, old=old), config=config_for(loss, **keys))
    np.testing.assert_allclose(loss_L.detach().numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "threshold", "cut"),
    # Old probabilities .001, .5, .5, .5; new ones .01 (ratio 10), .7, .7, .3
    [("dppo_tv", 0.15, [0, 1, 0, 1]), ("dppo_tv", 0.25, [0, 0, 0, 0]), ("dppo_kl", 0.05, [0, 1, 0, 1])],
)
def test_trust_region_masks_probability_that_moves_not_ratios(loss: str, threshold: float, cut: list[int]) -> None:
    new, old = torch.tensor([0.01, 0.7, 0.7, 0.3]).log(), torch.tensor([0.001, 0.5, 0.5, 0.5]).log()
    inputs = replace(
        inputs_of([0.0] * 4, [1, 1, -1, -1]),
        logprobs_L=new.requires_grad_(),
        old_logprobs_L=old,
        advantages_L=torch.tensor([1.0, 1, -1, -1]),
    )
    loss_L, stats = policy_loss(inputs, config=config_for(loss, dppo_threshold=threshold))
    assert (loss_L == 0).int().tolist() == cut
    assert (stats.clipped_low.item(), stats.clipped_high.item()) == (cut[3], cut[1])


def test_divergence_is_finite_where_a_token_was_certain() -> None:
    inputs = inputs_of([0.0, -1.0], [1, -1], old=0.0)
    for loss in ("dppo_tv", "dppo_kl"):
        loss_L, _ = policy_loss(in_float32(inputs), config=config_for(loss))
        assert torch.isfinite(loss_L).all() and loss_L[1] == 0 and loss_L[0] == -1


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_on_policy_is_the_policy_gradient(loss: str) -> None:
    inputs = random_inputs(3)
    inputs = replace(inputs, old_logprobs_L=inputs.logprobs_L.detach(), selected_L=torch.zeros(16, dtype=torch.bool))
    _, grad = value_and_grad(inputs, config_for(loss))
    np.testing.assert_allclose(grad, -inputs.advantages_L.numpy(), rtol=1e-12)


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_mean_over_own_tokens_has_the_gradient_of_the_sequence_objective(loss: str) -> None:
    """The per-token form against the objective of the papers, differentiated numerically."""
    config, inputs = config_for(loss, clip_ratio_low=0.1, clip_ratio_high=0.1), random_inputs(11)
    lengths = torch.bincount(inputs.sequence_L, minlength=inputs.num_sequences)

    def objective(logprobs_L: torch.Tensor) -> torch.Tensor:
        loss_L, _ = policy_loss(replace(inputs, logprobs_L=logprobs_L), config=config)
        return sum(loss_L[inputs.sequence_L == i][0] for i in range(5) if lengths[i] > 0)  # pyright: ignore

    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    loss_L, _ = policy_loss(replace(inputs, logprobs_L=leaf_L), config=config)
    (loss_L / lengths[inputs.sequence_L]).sum().backward()
    for t in range(len(leaf_L)):
        step = torch.zeros_like(leaf_L)
        step[t] = 1e-6
        numeric = (objective(leaf_L.detach() + step) - objective(leaf_L.detach() - step)) / 2e-6
        assert leaf_L.grad is not None
        assert leaf_L.grad[t].item() == pytest.approx(numeric.item(), abs=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_compared_in_float32(loss: str) -> None:
    inputs = in_float32(inputs_of([0.01], [1.0], old=-10.01))
    inputs = replace(inputs, logprobs_L=torch.tensor([-10.0], dtype=torch.bfloat16))
    loss_L, stats = policy_loss(inputs, config=config_for(loss))
    assert loss_L.dtype == torch.float32
    assert stats.ratio_sum.item() == pytest.approx(math.exp(0.01), rel=1e-5)


def test_a_clipped_token_has_no_gradient_and_is_counted_once() -> None:
    inputs, config = (
        inputs_of([c[0] for c in PPO_CASES], [c[1] for c in PPO_CASES]),
        config_for("ppo_clip", dual_clip=10.0),
    )
    _, grad = value_and_grad(inputs, config)
    np.testing.assert_allclose(grad, [0.0, -math.exp(-0.5), math.exp(0.5), 0.0, 0.0], rtol=1e-12)
    _, stats = policy_loss(inputs, config=config)
    assert (stats.clipped_low.item(), stats.clipped_high.item(), stats.clipped_dual.item()) == (1, 1, 1)
    ratios = [math.exp(c[0]) for c in PPO_CASES]
    assert stats.ratio_sum.item() == pytest.approx(sum(ratios))
    assert stats.ratio_max.item() == pytest.approx(max(ratios))


@pytest.mark.parametrize("loss", SELECTING_LOSSES)
def test_covariance_losses_refuse_to_run_without_a_selection(loss: str) -> None:
    with pytest.raises(ValueError, match="selected_L is None"):
        policy_loss(replace(inputs_of([0.0], [1.0]), selected_L=None), config=config_for(loss))


def corrected_gradient(inputs: LossInputs, ages: torch.Tensor, objective: Objective, config: Any) -> np.ndarray:
    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    corrected, weight_L, *_ = correct(
        replace(inputs, logprobs_L=leaf_L), age_L=ages, config=CorrectionConfig(objective=objective)
    )
    loss_L, _ = policy_loss(corrected, config=config)
    (grad_L,) = torch.autograd.grad((loss_L * weight_L).sum(), leaf_L)
    return grad_L.numpy()


@pytest.mark.parametrize("objective", get_args(Objective))
def test_every_key_changes_the_gradient_under_every_objective_that_accepts_its_loss(objective: Objective) -> None:
    """Otherwise a key would be accepted, printed and without effect."""
    moved = {
        "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "dual_clip": 1.01, "dro_beta": 2.0, "dppo_threshold": 1e-6,
        "cov_kl_coef": 3.0, "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0,
    }  # fmt: skip
    inputs = random_inputs(1, lengths=(1, 2, 9, 1, 4, 8, 1, 3, 2, 1, 6, 2), per_turn=True)
    ages = torch.from_numpy(np.random.default_rng(0).integers(1, 4, len(inputs.logprobs_L)))
    accepted = []
    for loss in LOSSES:
        if loss == "reinforce" or keys_refused(f"a.loss={loss} c.objective={objective} mode.max_staleness=3"):
            continue
        accepted.append(loss)
        plain = corrected_gradient(inputs, ages, objective, config_for(loss))
        for key in set(LOSS_TRAITS[loss].keys) - SELECTION_KEYS:
            changed = corrected_gradient(inputs, ages, objective, config_for(loss, **{key: moved[key]}))
            assert not np.array_equal(plain, changed), (loss, key)
    if objective == "decoupled":
        assert accepted == ["importance_sampling"]
    else:
        assert len(accepted) > 8


# KL estimates and the critic's loss


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_gradient_is_that_of_the_exact_kl(estimator: str) -> None:
    """Expectation over the vocabulary with the policy's own probabilities: value and gradient of KL(pi || ref)."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), reference.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (logp.exp().detach() * kl_penalty(logp, ref, f"{estimator}_straight_through")).sum()  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(estimate, logits)
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-9)
    torch.testing.assert_close(got, expected)


def test_kl_is_finite_where_the_policies_are_far_apart() -> None:
    for estimator in ESTIMATORS:
        leaf_L = torch.tensor([-500.0, 0.0], requires_grad=True)
        kl_L = kl_penalty(leaf_L, torch.tensor([0.0, -500.0]), estimator)  # type: ignore[arg-type]
        kl_L.sum().backward()
        assert torch.isfinite(kl_L).all() and torch.isfinite(leaf_L.grad).all(), estimator  # pyright: ignore


def test_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="must be k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_kl_estimates_of_random_tokens_equal_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, reference = rng.normal(-2, 1, (2, 37))
    d = ours - reference
    k3, squares = np.exp(-d) - 1 + d, d**2 / 2
    expected = {"k1": (d, 1 + 0 * d), "k2": (squares, d), "k3": (k3, 1 - np.exp(-d))}
    expected |= {"k1_straight_through": (d, d), "k3_straight_through": (k3, d)}
    for estimator in ESTIMATORS:
        leaf_L = torch.from_numpy(ours).requires_grad_()
        kl_L = kl_penalty(leaf_L, torch.from_numpy(reference), estimator)  # type: ignore[arg-type]
        (grad_L,) = torch.autograd.grad(kl_L.sum(), leaf_L)
        np.testing.assert_allclose(kl_L.detach().numpy(), expected[estimator][0], atol=1e-12)
        np.testing.assert_allclose(grad_L.numpy(), expected[estimator][1], atol=1e-12)


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4])
def test_k3_of_policies_that_hardly_differ_is_half_the_square_in_float32(scale: float) -> None:
    ours_L = scale * torch.linspace(-1, 1, 1001)
    kl_L = kl_penalty(ours_L, torch.zeros_like(ours_L), "k3")
    assert (kl_L >= 0).all()
    assert kl_L.double().mean().item() == pytest.approx(scale**2 / 6, rel=0.01)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_value_losses_of_random_tokens_equal_numpy(seed: int, clip: float | None) -> None:
    values, old, returns = np.random.default_rng(seed).normal(size=(3, 37))
    near = values if clip is None else old + np.clip(values - old, -clip, clip)
    plain, clipped = (values - returns) ** 2 / 2, (near - returns) ** 2 / 2
    leaf_L = torch.from_numpy(values).requires_grad_()
    loss_L, cut_L = value_loss(leaf_L, torch.from_numpy(old), torch.from_numpy(returns), clip=clip)
    (grad_L,) = torch.autograd.grad(loss_L.sum(), leaf_L)
    np.testing.assert_allclose(loss_L.detach().numpy(), np.maximum(plain, clipped), atol=1e-12)
    np.testing.assert_array_equal(cut_L.numpy(), clipped > plain)
    np.testing.assert_allclose(grad_L.numpy(), np.where(clipped > plain, 0.0, values - returns), atol=1e-12)
    assert cut_L.any() == (clip is not None)
