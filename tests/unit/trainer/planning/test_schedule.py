"""What a dry run expects of generation and learning, against the runs of docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.unit.trainer.planning.conftest import config, planned
from trainer.tools.dry_run import in_words
from trainer.tools.memory_plan import Side, params_met, step_work

if TYPE_CHECKING:
    from trainer.tools.memory_plan import ModelShape, StepWork

ANSWERS, PROMPT_TOKENS = 32 * 8, 512
PROMPTS = ANSWERS * PROMPT_TOKENS
MEAN_W1 = 966


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of docs/benchmarks.md: seconds per step."""

    name: str
    ranks: int
    engines: int
    num_devices: int
    staleness: int
    step_s: float
    tokens_per_s: float
    """Per device."""
    generation_s: float
    full_s: float
    """Generation at the full rate."""
    learning_s: float

    def work(self, shape: ModelShape) -> StepWork:
        """With the lengths that this run had."""
        answers = round(self.tokens_per_s * self.num_devices * self.step_s) - PROMPTS
        return work(shape, self.ranks, self.engines, answers=answers)


def work(shape: ModelShape, ranks: int, engines: int, *, answers: float, prompts: float = PROMPTS) -> StepWork:
    """No activation checkpointing, KL or critic."""
    params = params_met(shape, recomputes=False)
    return step_work(
        Side(num_devices=ranks, params=params, tokens=prompts + answers),
        Side(num_devices=engines, params=shape.num_active_params, tokens=answers),
    )


def run(name: str, split: tuple[int, int, int], staleness: int, rate: tuple[float, float], *seconds: float) -> Run:
    """`split`: learner ranks, engine devices, devices; `rate`: step and tokens/s per device."""
    generation_s, full_s, learning_s = seconds
    return Run(
        name=name, ranks=split[0], engines=split[1], num_devices=split[2], staleness=staleness, step_s=rate[0],
        tokens_per_s=rate[1], generation_s=generation_s, full_s=full_s, learning_s=learning_s,
    )  # fmt: skip


RUNS = [
    run("w1, 7B, async:2+2", (2, 2, 4), 2, (20.47, 4704), 21.0, 8.2, 20.44),
    run("w1, 7B, sync:2+2", (2, 2, 4), 0, (41.5, 2138), 21.9, 7.2, 17.6),
    run("w1, 7B, colocated:4", (4, 4, 4), 0, (36.2, 2454), 16.2, 6.2, 10.2),
    run("w1, 3B, async:1+1", (1, 1, 2), 2, (15.51, 11771), 14.9, 8.1, 15.48),
    run("w1, 3B, async:1+1, the day before", (1, 1, 2), 2, (15.37, 11875), 14.7, 8.2, 15.34),
    run("w1, 3B, colocated:2", (2, 2, 2), 0, (25.23, 7035), 14.4, 5.0, 7.93),
    run("w1, 3B, sync:1+1", (1, 1, 2), 0, (33.80, 5251), 18.9, 7.9, 14.86),
    run("w1-heavy, 3B, async:1+1", (1, 1, 2), 6, (19.80, 10835), 22.6, 10.6, 19.77),
    run("w1-heavy, 3B, sync:1+1", (1, 1, 2), 0, (56.05, 3712), 38.1, 8.3, 19.43),
    run("uniform, 3B, async:1+1", (1, 1, 2), 1, (7.56, 13008), 3.2, 3.1, 7.54),
    run("uniform, 3B, colocated:2", (2, 2, 2), 0, (7.39, 13294), 1.6, 1.6, 3.99),
    run("uniform, 3B, sync:1+1", (1, 1, 2), 0, (10.16, 9671), 2.6, 2.6, 7.46),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_both_ends_of_the_range_are_as_near_to_what_was_measured_as_the_page_says(
    run: Run, shape_7b: ModelShape
) -> None:
    full, few = run.work(shape_7b).generation_over_learning
    assert full / 1.25 < run.full_s / run.learning_s < full * 1.75
    least, most = (0.75, 1.0) if run.staleness else (0.6, 1.75)  # a tail that nothing overlaps is slower still
    assert least * few < run.generation_s / run.learning_s < most * few


@pytest.mark.parametrize(
    ("ranks", "engines", "mean", "expected"),
    [
        (2, 2, MEAN_W1, "either"),  # 7B: the learner sets the pace once S = 2 overlaps the tails
        (1, 1, MEAN_W1, "either"),  # 3B, likewise
        (1, 1, 256, "learning"),  # uniform: the learner works for 7.5 s of 7.6
        (3, 1, MEAN_W1, "generation"),  # 7B: from the measured split, 16.4 s at the full rate against 13.6 s
        (1, 3, MEAN_W1, "learning"),
        (6, 2, 4096, "generation"),
    ],
)
def test_the_bottleneck_is_named_as_it_was_measured(
    shape_7b: ModelShape, ranks: int, engines: int, mean: float, expected: str
) -> None:
    assert work(shape_7b, ranks, engines, answers=ANSWERS * mean).bottleneck == expected


def test_the_ratio_follows_the_devices_of_both_sides(shape_7b: ModelShape) -> None:
    even = work(shape_7b, 4, 4, prompts=0, answers=1000)
    assert even.engine_flops / even.learner_flops == pytest.approx(1 / 3)
    more = work(shape_7b, 1, 7, prompts=0, answers=1000)
    expected = [ratio / 7 for ratio in even.generation_over_learning]  # 4/7 of the work here, 4 times as much there
    assert more.generation_over_learning == pytest.approx(expected)


def test_a_plan_is_made_for_the_mean_that_was_given(shape_7b: ModelShape) -> None:
    cfg = config(rollout={"max_response_tokens": 4096, "group_size": 8}, learner={"activation_checkpointing": False})
    plan = planned(cfg, shape_7b, prompt_tokens=512.0, response_tokens=966.0)
    assert list(plan.work) == [966.0]
    expected = 966 / (512 + 966) / 3
    assert plan.work[966.0].generation_over_learning == pytest.approx((expected / 0.45, expected / 0.2))
    text = in_words(plan, cfg)
    assert "966 tokens, on average" in text
    assert "either: generation takes 0.48 to 1.1 times the time of learning" in text
    assert "--response-tokens" not in text and "take turns" not in text


def test_without_a_mean_the_longest_and_a_quarter_of_it_are_told(shape_7b: ModelShape) -> None:
    cfg = config(rollout={"max_response_tokens": 4096}, mode={"max_staleness": 0})
    plan = planned(cfg, shape_7b)
    assert list(plan.work) == [4096, 1024]
    text = in_words(plan, cfg)
    for words in ("--response-tokens N", "4,096 tokens, the longest", "1,024 tokens, a quarter of it", "take turns"):
        assert words in text
