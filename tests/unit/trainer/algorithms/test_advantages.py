"""Every estimator against its closed form, an independent reference made of loops, and what must not matter."""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.advantages import GroupRewards, step_advantages
from trainer.config.algorithm import ESTIMATORS, AdvantageName, AlgorithmConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GRPO = AlgorithmConfig(advantage_estimator="grpo")
DR_GRPO = AlgorithmConfig(advantage_estimator="grpo", normalize_by_std=False)
RLOO = AlgorithmConfig(advantage_estimator="rloo")
REINFORCE = AlgorithmConfig(advantage_estimator="reinforce")
REINFORCE_PP = AlgorithmConfig(advantage_estimator="reinforce_pp")
REINFORCE_PP_BASELINE = AlgorithmConfig(advantage_estimator="reinforce_pp_baseline")
OPO = AlgorithmConfig(advantage_estimator="opo")
GPG = AlgorithmConfig(advantage_estimator="gpg")
GPG_VALID = AlgorithmConfig(advantage_estimator="gpg", gpg_scale="valid_groups")
PASS_AT_K = AlgorithmConfig(advantage_estimator="pass_at_k")
PASS_AT_K_PLAIN = AlgorithmConfig(advantage_estimator="pass_at_k", normalize_by_std=False)
REMAX = AlgorithmConfig(advantage_estimator="remax")
GDPO = AlgorithmConfig(advantage_estimator="gdpo")
GDPO_WEIGHTED = AlgorithmConfig(advantage_estimator="gdpo", gdpo_weights={"format": 0.5})
CONFIGS = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "opo": OPO,
    "gpg": GPG,
    "gpg_valid": GPG_VALID,
    "pass_at_k": PASS_AT_K,
    "pass_at_k_plain": PASS_AT_K_PLAIN,
    "remax": REMAX,
    "gdpo": GDPO,
    "gdpo_weighted": GDPO_WEIGHTED,
}
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


@pytest.mark.parametrize(
    ("name", "size"),
    [("grpo", 0.8660239), ("dr_grpo", 0.5), ("rloo", 2 / 3), ("gpg", 1.0), ("gpg_valid", 0.5)],
)
def test_two_of_four_right_gives_the_closed_form(name: str, size: float) -> None:
    close(advantages_of(group(REWARDS), config=CONFIGS[name]), [size * SIGNS], atol=1e-7)


def test_opo_weighs_the_baseline_by_length() -> None:
    answers = group(REWARDS, lengths=[2, 4, 6, 4])
    close(advantages_of(answers, config=OPO), [[0.625, -0.375, -0.375, 0.625]])


def test_opo_without_any_token_uses_the_plain_mean() -> None:
    close(advantages_of(group([1.0, 0.0], lengths=[0, 0]), config=OPO), [[0.5, -0.5]])


def test_pass_at_k_raises_only_the_single_best_answer() -> None:
    best_of_four = group([1.0, 0.5, 0.0, 0.0])
    close(advantages_of(best_of_four, config=PASS_AT_K), [[1.0444638, 0, 0, 0]], atol=1e-7)
    close(advantages_of(best_of_four, config=PASS_AT_K_PLAIN), [[0.5, 0, 0, 0]])
    assert advantages_of(group([0.0, 1.0, 1.0]), config=PASS_AT_K) == [[0.0, 0.0, 0.0]]


def test_reinforce_is_the_reward_itself() -> None:
    assert advantages_of(group([0.25, 3.0]), config=REINFORCE) == [[0.25, 3.0]]


def test_zero_is_zero_whatever_the_rewards() -> None:
    zero = AlgorithmConfig(advantage_estimator="zero")
    assert advantages_of(group([0.25, 3.0]), group([-1.0]), config=zero) == [[0.0, 0.0], [0.0]]


def test_reinforce_pp_knows_no_groups() -> None:
    apart = advantages_of(group([1.0]), group([0.0]), group([0.0, 1.0]), config=REINFORCE_PP)
    close(np.concatenate(apart), SIGNS)


def test_reinforce_pp_counts_tokens_and_not_answers() -> None:
    # Three tokens of 1 and one of 0: mean .75, variance .75 x .25.
    size = math.sqrt(0.75 * 0.25)
    close(advantages_of(group([1.0, 0.0], lengths=[3, 1]), config=REINFORCE_PP), [[0.25 / size, -0.75 / size]])
    assert advantages_of(group([1.0, 0.0], lengths=[0, 0]), config=REINFORCE_PP) == [[0.0, 0.0]]


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_and_the_spread_of_the_step() -> None:
    # Centred: +-.5 and +-1.5, whose variance is 1.25.
    size = math.sqrt(1.25)
    got = advantages_of(group([1.0, 0.0]), group([7.0, 10.0]), config=REINFORCE_PP_BASELINE)
    close(got, [[0.5 / size, -0.5 / size], [-1.5 / size, 1.5 / size]])


def test_remax_takes_the_reward_of_the_greedy_answer_off_even_from_a_single_one() -> None:
    got = advantages_of(group([1.0, 0.0], baseline=1.0), group([1.0], baseline=-0.5), config=REMAX)
    assert got == [[0.0, -1.0], [1.5]]


def test_gpg_makes_up_for_answers_without_signal_in_the_whole_step() -> None:
    solved, split, failed = group([1.0, 1.0]), group([1.0, 0.0]), group([0.0, 0.0])
    # Six answers: three have a reward; two are in a group that can teach.
    close(advantages_of(solved, split, failed, config=GPG), [[0, 0], [1.0, -1.0], [0, 0]])
    close(advantages_of(solved, split, failed, config=GPG_VALID), [[0, 0], [1.5, -1.5], [0, 0]])
    assert advantages_of(failed, config=GPG) == advantages_of(solved, config=GPG_VALID) == [[0.0, 0.0]]


def test_gdpo_tells_apart_what_grpo_values_alike() -> None:
    first = group([0.0, 1.0], parts={"correct": [0.0, 1.0], "format": [0.0, 0.0]})
    second = group([0.0, 2.0], parts={"correct": [0.0, 1.0], "format": [0.0, 1.0]})
    grpo = advantages_of(first, second, config=GRPO)
    close(grpo[0], grpo[1], atol=1e-5)
    part = 0.5 / (math.sqrt(0.5) + 1e-6)
    spread = stdev([-part, part, -2 * part, 2 * part]) + 1e-6
    gdpo = advantages_of(first, second, config=GDPO)
    close(gdpo, [[-part / spread, part / spread], [-2 * part / spread, 2 * part / spread]])


def test_gdpo_weights_name_the_parts_that_count() -> None:
    parts = {"correct": [0.0, 1.0, 0.0], "format": [1.0, 0.0, 0.0]}
    got = advantages_of(group([9.0, 8.0, 7.0], parts=parts), config=GDPO_WEIGHTED)[0]
    assert got[0] > 0 > got[1]
    close(got[1], got[2])
    more = AlgorithmConfig(advantage_estimator="gdpo", gdpo_weights={"format": 1.0, "correct": 3.0})
    got = advantages_of(group([9.0, 8.0, 7.0], parts=parts), config=more)[0]
    assert got[1] > got[0] > got[2]


# --- an independent reference


def reference(groups: Sequence[GroupRewards], config: AlgorithmConfig) -> list[list[float]]:
    """Loops over answers, written from the papers' formulas and not from the code."""
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
    """Every token written down with the value of its answer."""
    lengths = [g.lengths_G.tolist() for g in groups]
    tokens = [v for vs, ns in zip(values, lengths, strict=True) for v, n in zip(vs, ns, strict=True) for _ in range(n)]
    return [[(v - fmean(tokens)) / max(pstdev(tokens), 1e-4) for v in vs] for vs in values]


def spread(rewards: Sequence[float], config: AlgorithmConfig) -> float:
    return stdev(rewards) + 1e-6 if config.normalize_by_std else 1.0


def token_mean(answers: GroupRewards) -> float:
    """Mean over tokens, each of which carries the reward of its answer."""
    return fmean([r for r, n in zip(answers.rewards_G, answers.lengths_G, strict=True) for _ in range(n)])


def weighted(answers: GroupRewards, index: int, weights: Mapping[str, float]) -> float:
    total = 0.0
    for name, weight in weights.items():
        values = answers.parts_G[name].tolist()
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
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_groups_agree_with_the_reference(name: str, seed: int, binary: bool) -> None:
    groups = random_groups(seed, binary=binary)
    got = advantages_of(*groups, config=CONFIGS[name])
    for advantages, wanted in zip(got, reference(groups, CONFIGS[name]), strict=True):
        close(advantages, wanted)


# --- what must not matter, and what must


@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_answers_and_of_groups_does_not_matter(name: str) -> None:
    groups = random_groups(11, binary=False)
    rng = np.random.Generator(np.random.PCG64(3))
    orders = [rng.permutation(g.rewards_G.size) for g in groups]
    shuffled = [
        GroupRewards(
            rewards_G=g.rewards_G[order],
            lengths_G=g.lengths_G[order],
            parts_G={n: v[order] for n, v in g.parts_G.items()},
            baseline=g.baseline,
        )
        for g, order in zip(groups, orders, strict=True)
    ]
    expected = step_advantages(groups, config=CONFIGS[name])
    got = step_advantages(shuffled[::-1], config=CONFIGS[name])[::-1]
    for advantages, wanted, order in zip(got, expected, orders, strict=True):
        close(advantages, wanted[order])


@pytest.mark.parametrize("name", CONFIGS)
def test_other_groups_matter_only_to_an_estimator_that_spans_the_step(name: str) -> None:
    failed = group([0.0, 0.0], parts={"correct": [0.0, 0.0], "format": [0.0, 0.0]})
    groups = [*random_groups(5, binary=False), failed]
    together = advantages_of(*groups, config=CONFIGS[name])[0]
    alone = advantages_of(groups[0], config=CONFIGS[name])[0]
    assert np.allclose(together, alone, atol=1e-9) != ESTIMATORS[CONFIGS[name].advantage_estimator].spans_step


@pytest.mark.parametrize("name", CONFIGS)
def test_the_best_answer_is_never_below_another(name: str) -> None:
    for answers in random_groups(6, binary=False):
        same = GroupRewards(
            rewards_G=answers.rewards_G,
            lengths_G=answers.lengths_G,
            parts_G={"format": answers.rewards_G, "correct": 2 * answers.rewards_G},
            baseline=answers.baseline,
        )
        (advantages,) = step_advantages([same], config=CONFIGS[name])
        assert advantages[answers.rewards_G.argmax()] == advantages.max() > advantages.min()


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if ESTIMATORS[c.advantage_estimator].needs_peers])
def test_equal_rewards_teach_nothing_where_answers_are_compared(name: str) -> None:
    rewards = [0.7] * 5
    answers = group(rewards, lengths=[1, 2, 3, 4, 5], parts={"correct": rewards, "format": [0.0] * 5})
    close(advantages_of(answers, config=CONFIGS[name]), np.zeros((1, 5)))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(-50, 50))
def test_baselines_do_not_see_a_constant_shift(rewards: list[float], shift: float) -> None:
    shifted = [r + shift for r in rewards]
    for config in (DR_GRPO, RLOO, OPO, PASS_AT_K_PLAIN):
        close(advantages_of(group(shifted), config=config), advantages_of(group(rewards), config=config))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_one_answer_or_of_none_gives_finite_numbers(name: str) -> None:
    assert step_advantages([], config=CONFIGS[name]) == []
    if not ESTIMATORS[CONFIGS[name].advantage_estimator].needs_peers:
        assert np.isfinite(advantages_of(group([3.0]), config=CONFIGS[name])).all()


# --- refusals


def test_the_table_lists_every_name_of_the_schema_and_the_dispatch_knows_them() -> None:
    apart = {"gae", "zero"}  # takes the values of a critic; leaves everything to a teacher
    assert set(ESTIMATORS) == set(get_args(AdvantageName)) == {c.advantage_estimator for c in CONFIGS.values()} | apart


@pytest.mark.parametrize("name", [n for n, traits in ESTIMATORS.items() if traits.needs_peers])
def test_one_answer_is_refused_with_the_key_to_change(name: AdvantageName) -> None:
    with pytest.raises(ValueError, match=r"at least 2, got 1; raise rollout\.group_size"):
        step_advantages([group(REWARDS), group([1.0])], config=AlgorithmConfig(advantage_estimator=name))


def test_remax_refuses_a_group_without_a_finite_baseline() -> None:
    bare = GroupRewards(rewards_G=np.zeros(2), lengths_G=np.ones(2, np.int64))
    with pytest.raises(ValueError, match="'remax' takes the reward of a greedy answer off, got a group without one"):
        step_advantages([bare], config=REMAX)
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


def test_gdpo_refuses_parts_that_are_missing_or_differ() -> None:
    with pytest.raises(ValueError, match=r"got none; let the reward function return a dict"):
        advantages_of(group(REWARDS), config=GDPO)
    one, other = group([0.0, 1.0], parts={"a": [0, 1]}), group([0.0, 1.0], parts={"b": [0, 1]})
    with pytest.raises(ValueError, match=r"same reward parts for every answer, got \['a'\] and \['b'\]"):
        advantages_of(one, other, config=GDPO)
    with pytest.raises(ValueError, match=r"names the parts \['format'\].* it returns \['a'\]"):
        advantages_of(one, config=GDPO_WEIGHTED)
