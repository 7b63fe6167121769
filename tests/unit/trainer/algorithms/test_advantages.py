"""Every estimator against its closed form and an independent reference made of loops; GAE and the reward-to-go.

What must not matter (order, other groups) is in the contract that the tests of `trainer.tools.plugin_contracts` run on
every built-in estimator.
"""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trainer.algorithms.advantages import GroupRewards, gae_advantages, reward_to_go, step_advantages
from trainer.config.algorithm import ESTIMATORS, AdvantageName, AlgorithmConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONFIGS = {
    "dr_grpo": AlgorithmConfig(advantage_estimator="grpo", normalize_by_std=False),
    "gpg_valid": AlgorithmConfig(advantage_estimator="gpg", gpg_scale="valid_groups"),
    "pass_at_k_plain": AlgorithmConfig(advantage_estimator="pass_at_k", normalize_by_std=False),
    "gdpo_weighted": AlgorithmConfig(advantage_estimator="gdpo", gdpo_weights={"format": 0.5, "correct": -0.2}),
} | {name: AlgorithmConfig(advantage_estimator=name) for name in ESTIMATORS if name != "gae"}
REFERENCED = [name for name in CONFIGS if name != "zero"]
REWARDS = [1.0, 0.0, 0.0, 1.0]
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])


def group(
    rewards: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    parts: Mapping[str, Sequence[float]] | None = None,
    baseline: float = 0.25,
) -> GroupRewards:
    return GroupRewards(
        rewards_G=np.array(rewards, np.float64),
        lengths_G=np.array([1] * len(rewards) if lengths is None else lengths, np.int64),
        parts_G={name: np.array(values, np.float64) for name, values in (parts or {}).items()},
        baseline=baseline,
    )


def advantages_of(*groups: GroupRewards, config: AlgorithmConfig) -> list[list[float]]:
    return [advantages.tolist() for advantages in step_advantages(groups, config=config)]


def close(got: object, wanted: object, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)  # type: ignore[arg-type]


# --- closed forms

BEST_OF_FOUR, SOLVED, SPLIT, UNSOLVED = [1.0, 0.5, 0.0, 0.0], group([1.0, 1.0]), group([1.0, 0.0]), group([0.0, 0.0])
QUARTER, FIVE_QUARTERS = math.sqrt(0.75 * 0.25), math.sqrt(1.25)


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("grpo", [group(REWARDS)], [0.8660239 * SIGNS]),
        ("dr_grpo", [group(REWARDS)], [0.5 * SIGNS]),
        ("rloo", [group(REWARDS)], [2 / 3 * SIGNS]),
        ("gpg", [group(REWARDS)], [SIGNS]),
        ("gpg_valid", [group(REWARDS)], [0.5 * SIGNS]),
        # Six responses: three have a reward; two are in a group that can teach.
        ("gpg", [SOLVED, SPLIT, UNSOLVED], [[0, 0], [1.0, -1.0], [0, 0]]),
        ("gpg_valid", [SOLVED, SPLIT, UNSOLVED], [[0, 0], [1.5, -1.5], [0, 0]]),
        ("gpg", [UNSOLVED], [[0, 0]]),
        ("gpg_valid", [SOLVED], [[0, 0]]),
        ("opo", [group(REWARDS, lengths=[2, 4, 6, 4])], [[0.625, -0.375, -0.375, 0.625]]),
        ("opo", [group([1.0, 0.0], lengths=[0, 0])], [[0.5, -0.5]]),
        ("pass_at_k", [group(BEST_OF_FOUR)], [[1.0444638, 0, 0, 0]]),
        ("pass_at_k_plain", [group(BEST_OF_FOUR)], [[0.5, 0, 0, 0]]),
        ("pass_at_k", [group([0.0, 1.0, 1.0])], [[0, 0, 0]]),
        ("reinforce", [group([0.25, 3.0])], [[0.25, 3.0]]),
        ("zero", [group([0.25, 3.0]), group([-1.0])], [[0, 0], [0]]),
        ("remax", [group([1.0, 0.0], baseline=1.0), group([1.0], baseline=-0.5)], [[0.0, -1.0], [1.5]]),
        # It knows no groups, and counts tokens: three of 1 and one of 0 have mean .75 and variance .75 x .25.
        ("reinforce_pp", [group([1.0]), group([0.0]), group([0.0, 1.0])], [[1.0], [-1.0], [-1.0, 1.0]]),
        ("reinforce_pp", [group([1.0, 0.0], lengths=[3, 1])], [[0.25 / QUARTER, -0.75 / QUARTER]]),
        ("reinforce_pp", [group([1.0, 0.0], lengths=[0, 0])], [[0, 0]]),
        # Centred in their groups: +-.5 and +-1.5, whose variance over the step is 1.25.
        (
            "reinforce_pp_baseline",
            [group([1.0, 0.0]), group([7.0, 10.0])],
            [[0.5 / FIVE_QUARTERS, -0.5 / FIVE_QUARTERS], [-1.5 / FIVE_QUARTERS, 1.5 / FIVE_QUARTERS]],
        ),
    ],
)
def test_an_estimator_equals_its_closed_form(
    name: str, groups: list[GroupRewards], expected: list[Sequence[float]]
) -> None:
    for got, wanted in zip(advantages_of(*groups, config=CONFIGS[name]), expected, strict=True):
        close(got, wanted, atol=1e-7)


def test_gdpo_tells_apart_what_grpo_values_alike() -> None:
    first = group([0.0, 1.0], parts={"correct": [0.0, 1.0], "format": [0.0, 0.0]})
    second = group([0.0, 2.0], parts={"correct": [0.0, 1.0], "format": [0.0, 1.0]})
    grpo = advantages_of(first, second, config=CONFIGS["grpo"])
    close(grpo[0], grpo[1], atol=1e-5)
    part = 0.5 / (math.sqrt(0.5) + 1e-6)
    spread = stdev([-part, part, -2 * part, 2 * part]) + 1e-6
    gdpo = advantages_of(first, second, config=CONFIGS["gdpo"])
    close(gdpo, [[-part / spread, part / spread], [-2 * part / spread, 2 * part / spread]])


# --- an independent reference


def reference(groups: Sequence[GroupRewards], config: AlgorithmConfig) -> list[list[float]]:
    """Loops over responses, written from the papers' formulas and not from the code."""
    rewards = [g.rewards_G.tolist() for g in groups]
    everything = [r for rs in rewards for r in rs]
    match config.advantage_estimator:
        case "grpo":
            return [[(r - fmean(rs)) / spread(rs, config) for r in rs] for rs in rewards]
        case "rloo":
            return [[r - fmean(rs[:i] + rs[i + 1 :]) for i, r in enumerate(rs)] for rs in rewards]
        case "reinforce":
            return rewards
        case "reinforce_pp":
            return over_tokens(rewards, groups)
        case "reinforce_pp_baseline":
            return over_tokens([[r - fmean(rs) for r in rs] for rs in rewards], groups)
        case "remax":
            return [[r - g.baseline for r in rs] for rs, g in zip(rewards, groups, strict=True)]
        case "opo":
            return [[r - token_mean(g) for r in g.rewards_G.tolist()] for g in groups]
        case "gpg":
            if config.gpg_scale == "nonzero_rewards":
                useful = sum(r != 0 for r in everything)
            else:
                useful = sum(len(rs) for rs in rewards if len(set(rs)) > 1)
            return [[len(everything) / max(useful, 1) * (r - fmean(rs)) for r in rs] for rs in rewards]
        case "pass_at_k":
            return [
                [(max(rs) - max(rs[:i] + rs[i + 1 :])) / spread(rs, config) for i in range(len(rs))] for rs in rewards
            ]
        case "gdpo":
            weights = config.gdpo_weights or dict.fromkeys(groups[0].parts_G, 1.0)
            sums = [[weighted(g, i, weights) for i in range(len(g.rewards_G))] for g in groups]
            joined = [s for ss in sums for s in ss]
            return [[(s - fmean(joined)) / (stdev(joined) + 1e-6) for s in ss] for ss in sums]


def over_tokens(values: Sequence[Sequence[float]], groups: Sequence[GroupRewards]) -> list[list[float]]:
    """Every token written down with the value of its response."""
    lengths = [g.lengths_G.tolist() for g in groups]
    tokens = [v for vs, ns in zip(values, lengths, strict=True) for v, n in zip(vs, ns, strict=True) for _ in range(n)]
    return [[(v - fmean(tokens)) / max(pstdev(tokens), 1e-4) for v in vs] for vs in values]


def spread(rewards: Sequence[float], config: AlgorithmConfig) -> float:
    return stdev(rewards) + 1e-6 if config.normalize_by_std else 1.0


def token_mean(responses: GroupRewards) -> float:
    """Mean over tokens, each of which carries the reward of its response."""
    return fmean([r for r, n in zip(responses.rewards_G, responses.lengths_G, strict=True) for _ in range(n)])


def weighted(responses: GroupRewards, index: int, weights: Mapping[str, float]) -> float:
    total = 0.0
    for name, weight in weights.items():
        values = responses.parts_G[name].tolist()
        total += weight * (values[index] - fmean(values)) / (stdev(values) + 1e-6)
    return total


def random_groups(seed: int, *, binary: bool) -> list[GroupRewards]:
    """Ragged groups, among them groups of equal rewards."""
    rng = np.random.Generator(np.random.PCG64(seed))
    draw: Callable[[int], np.ndarray] = (lambda n: rng.integers(0, 2, n)) if binary else (lambda n: rng.normal(2, 3, n))
    return [
        group(
            draw(n).tolist(),
            lengths=rng.integers(1, 40, n).tolist(),
            parts={"correct": draw(n).tolist(), "format": rng.integers(0, 2, n).tolist()},
        )
        for n in rng.integers(2, 9, 7).tolist()
    ]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REFERENCED)
def test_ragged_groups_agree_with_the_reference(name: str, seed: int, binary: bool) -> None:
    groups = random_groups(seed, binary=binary)
    got = advantages_of(*groups, config=CONFIGS[name])
    for advantages, wanted in zip(got, reference(groups, CONFIGS[name]), strict=True):
        close(advantages, wanted)


# --- what must not matter, and what must


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if ESTIMATORS[c.advantage_estimator].needs_peers])
def test_equal_rewards_teach_nothing_where_responses_are_compared(name: str) -> None:
    rewards = [0.7] * 5
    responses = group(rewards, lengths=[1, 2, 3, 4, 5], parts={"correct": rewards, "format": [0.0] * 5})
    close(advantages_of(responses, config=CONFIGS[name]), np.zeros((1, 5)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_one_response_or_of_none_gives_finite_numbers(name: str) -> None:
    assert step_advantages([], config=CONFIGS[name]) == []
    if not ESTIMATORS[CONFIGS[name].advantage_estimator].needs_peers:
        assert np.isfinite(advantages_of(group([3.0]), config=CONFIGS[name])).all()


# --- refusals


@pytest.mark.parametrize("name", [n for n, traits in ESTIMATORS.items() if traits.needs_peers])
def test_one_response_is_refused_with_the_key_to_change(name: AdvantageName) -> None:
    with pytest.raises(ValueError, match=r"at least 2, got 1; raise rollout\.group_size"):
        step_advantages([group(REWARDS), group([1.0])], config=AlgorithmConfig(advantage_estimator=name))


def test_remax_refuses_a_group_without_a_finite_baseline() -> None:
    bare = GroupRewards(rewards_G=np.zeros(2), lengths_G=np.ones(2, np.int64))
    with pytest.raises(ValueError, match="'remax' takes the reward of a greedy response off, got a group without one"):
        step_advantages([bare], config=CONFIGS["remax"])
    with pytest.raises(ValueError, match="baseline of a group must be finite, got nan"):
        group([1.0], baseline=math.nan)


def test_nan_and_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards of a group must be finite"):
        group([1.0, float("nan")])
    with pytest.raises(ValueError, match="format of a group must be finite"):
        group([1.0, 0.0], parts={"format": [1.0, float("inf")]})
    with pytest.raises(ValueError, match="must have shape"):
        group([])
    with pytest.raises(ValueError, match=r"lengths of a group must have the shape of its rewards, \(2,\), got \(3,\)"):
        group([1.0, 0.0], lengths=[1, 2, 3])


def test_gdpo_refuses_parts_that_no_response_has() -> None:
    with pytest.raises(ValueError, match=r"got none; let the reward function return a dict"):
        advantages_of(group(REWARDS), config=CONFIGS["gdpo"])
    one, other = group([0.0, 1.0], parts={"a": [0, 1]}), group([0.0, 1.0], parts={"b": [0, 1]})
    both = [group([0.0, 1.0], parts={"a": [0, 1], "b": [0, 0]}), group([0.0, 1.0], parts={"a": [0, 0], "b": [0, 1]})]
    close(advantages_of(one, other, config=CONFIGS["gdpo"]), advantages_of(*both, config=CONFIGS["gdpo"]))
    with pytest.raises(ValueError, match=r"names the parts \['format'\].* returns \['a'\]"):
        advantages_of(one, config=AlgorithmConfig(advantage_estimator="gdpo", gdpo_weights={"format": 1.0}))


# --- generalised advantage estimation

TURN_REWARDS, VALUES, ALL = [0.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4], [True] * 4
GAE = [0.799675, 0.7365, 0.67, 0.6]


def test_the_closed_form() -> None:
    advantages, returns = gae_advantages(TURN_REWARDS, VALUES, ALL, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages, GAE, atol=1e-9)
    np.testing.assert_allclose(returns, np.add(GAE, VALUES), atol=1e-9)


def written_out(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_t as the double sum over later deltas, quadratic in the length."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(tokens):
        for j in range(i, len(tokens)):
            follows = values[tokens[j + 1]] if j + 1 < len(tokens) else 0.0
            delta = rewards[tokens[j]] + gamma * follows - values[tokens[j]]
            advantages[t] += (gamma * lam) ** (j - i) * delta
    return advantages, [advantages[t] + values[t] if mask[t] else 0.0 for t in range(len(mask))]


@pytest.mark.parametrize("seed", range(8))
def test_ragged_turns_agree_with_the_double_sum_whatever_the_values_of_context(seed: int) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    size = int(rng.integers(1, 60))
    mask = rng.random(size) < 0.6
    rewards, values = rng.normal(size=size) * mask, np.where(mask, rng.normal(size=size), np.nan)
    gamma, lam = float(rng.uniform(0.8, 1)), float(rng.uniform(0, 1))
    got = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for array, wanted in zip(got, written_out(rewards, values, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(array, wanted, atol=1e-10)


def test_a_long_response_keeps_its_precision() -> None:
    size = 40_000
    advantages, _ = gae_advantages(np.eye(1, size, size - 1)[0], np.zeros(size), np.ones(size), gamma=1.0, lam=0.999)
    np.testing.assert_allclose(advantages[[0, -1]], [0.999 ** (size - 1), 1.0], rtol=1e-9)


def test_a_reward_on_context_a_value_of_nan_and_differing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token 1 is context and has reward 2\.0"):
        gae_advantages([0.0, 2.0], [0.0, 0.0], [True, False], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        gae_advantages([0.0, 2.0], [0.0, np.nan], [True, True], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"one shape \[T\], got \(2,\), \(1,\) and \(2,\)"):
        gae_advantages([0.0, 2.0], [0.0], [True, True], gamma=1.0, lam=1.0)


# --- reward to go


def test_the_reward_to_go_skips_context() -> None:
    assert reward_to_go([0, 2, 0, 0, 1], [True, True, False, True, True]).tolist() == [3, 3, 0, 1, 1]


def test_the_reward_to_go_is_the_return_of_gae_without_a_critic() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    mask_T = rng.random(40) < 0.6
    rewards_T = np.where(mask_T, rng.normal(size=40), 0.0)
    _, returns_T = gae_advantages(rewards_T, np.zeros(40), mask_T, gamma=1.0, lam=1.0)
    close(reward_to_go(rewards_T, mask_T), returns_T, atol=1e-12)
    for refused, words in (
        (([0, 1], [True] * 3), r"one shape \[T\], got \(2,\) and \(3,\)"),
        (([0, np.nan], [True] * 2), "must be finite"),
        (([1, 0], [False, True]), r"token 0 is context and has reward 1\.0"),
    ):
        with pytest.raises(ValueError, match=words):
            reward_to_go(*refused)
