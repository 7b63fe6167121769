"""Random groups of finished answers, and the batch that the learner gets of them with every advantage estimator."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.golden import seams
from tests.golden.net import Part, digest, sums

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUM_SETS = 200
ESTIMATORS = (
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo", "remax",
    "gae", "zero",
)  # fmt: skip
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
EXACT = ("cu_seqlens", "token_ids", "loss_mask", "versions", "cov_selected", "answers")
"""Arrays of a micro-batch whose every bit counts; of the others it is sums."""


def cases() -> Mapping[str, Any]:
    return {f"set {seed}": seed for seed in range(NUM_SETS)}


def play(seed: int, _folder: Path) -> Any:
    rng = random.Random(seed)
    step = rng.randint(2, 5)
    groups = random_groups(rng, step=step)
    limits = {
        "num_ranks": rng.randint(1, 4),
        "max_tokens_per_micro_batch": rng.choice([80, 120, 400]),
        "max_response_tokens": 24,
    }
    record = {"groups": seams.group_stats(groups, step=step)}
    for number, estimator in enumerate(ESTIMATORS):
        algorithm = random_algorithm(rng, estimator, aggregation=AGGREGATIONS[(seed + number) % len(AGGREGATIONS)])
        record[estimator] = _summed(partial(seams.built_batch, groups, step, algorithm, limits))
    return record


def random_algorithm(rng: random.Random, estimator: str, *, aggregation: str) -> dict[str, Any]:
    loss = rng.choice(["ppo_clip", "ppo_clip", "clip_cov", "kl_cov"])
    changes: dict[str, Any] = {
        "advantage_estimator": estimator,
        "loss_aggregation": aggregation,
        "loss": loss,
        "normalize_by_std": rng.random() < 0.7,
        "mask_truncated": rng.random() < 0.3,
        "gpg_scale": rng.choice(["nonzero_rewards", "valid_groups"]),
    }
    if rng.random() < 0.3:
        changes |= {"overlong_buffer_tokens": 8, "overlong_penalty": 0.5}
    if rng.random() < 0.3:
        changes["loss_norm_tokens"] = 17
    if loss != "ppo_clip":
        changes |= {"cov_frac": 0.2, "cov_min": -0.1, "cov_max": 0.5}
    if rng.random() < 0.2:
        changes["kl"] = {"coef": 0.1, "apply_to": "reward"}
    if rng.random() < 0.5:
        changes["gdpo_weights"] = {"format": 0.5, "right": 2.0}
    return changes


def random_groups(rng: random.Random, *, step: int) -> list[dict[str, Any]]:
    """Of sizes, turns and sequences as they come; now and then one breaks the contract."""
    size = rng.randint(1, 5)
    groups = []
    for number in range(rng.randint(1, 5)):
        prompt = [rng.randint(3, 60) for _ in range(rng.randint(1, 6))]
        start = rng.randint(0, step)
        draw = partial(random_answer, rng, prompt, versions=(start, step), is_broken=rng.random() < 0.02)
        answers = [draw(sample) for sample in range(size)]
        has_baseline = rng.random() < 0.95
        groups.append(
            {
                "group_id": 10 * step + number,
                "start_version": start,
                "prompt": prompt,
                "answers": answers,
                "baseline": random_answer(rng, prompt, 99, versions=(start, step)) if has_baseline else None,
            }
        )
        if groups[-1]["baseline"] is not None:
            groups[-1]["baseline"] |= {"status": "completed", "reward": rng.choice([0.0, 1.0])}
    return groups


def random_answer(
    rng: random.Random, prompt: list[int], sample: int, *, versions: tuple[int, int], is_broken: bool = False
) -> dict[str, Any]:
    turns = [random_turn(rng, prompt, versions=versions)]
    for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
        begins_anew = rng.random() < 0.3
        turns.append(random_turn(rng, prompt if begins_anew else [7], versions=versions, begins_anew=begins_anew))
    status = rng.choices(["completed", "truncated", "failed"], [0.75, 0.15, 0.1])[0]
    right, form = rng.choice([0.0, 1.0]), rng.choice([0.0, 0.5, 1.0])
    parts = {"right": right, "format": form, **({"odd": 1.0} if is_broken and sample == 1 else {})}
    reward = float("nan") if status == "failed" else rng.choice([right, right + form / 2, right - 0.25])
    return {"sample": sample, "status": status, "reward": reward, "parts": parts, "turns": turns}


def random_turn(
    rng: random.Random, context: list[int], *, versions: tuple[int, int], begins_anew: bool = False
) -> dict[str, Any]:
    """Context tokens, then generated ones in segments of one version each; sometimes none is generated."""
    first = rng.randint(*versions)
    segments = [[first, rng.randint(1, 9)]]
    if rng.random() < 0.4 and first < versions[1]:
        segments.append([rng.randint(first + 1, versions[1]), rng.randint(1, 5)])
    if rng.random() < 0.08:
        segments = []
    num_generated = sum(count for _, count in segments)
    return {
        "context": context,
        "generated": [rng.randint(3, 60) for _ in range(num_generated)],
        "logprobs": [-rng.random() * 3 for _ in range(num_generated)],
        "segments": segments,
        "reward": rng.choice([0.0, 0.0, 0.3, -0.2]) if num_generated else 0.0,
        "begins_anew": begins_anew,
    }


def _summed(build: Any) -> Any:
    """Small enough to keep."""
    try:
        batch = build()
    except ValueError as error:
        return f"refused: {error}"
    micro_batches = [micro_batch for rank in batch.pop("micro_batches") for micro_batch in rank]
    exact = [micro_batch[name] for micro_batch in micro_batches for name in EXACT if name in micro_batch]
    exact += [micro_batch.pop("behavior_logprobs").view(np.int32) for micro_batch in micro_batches]  # a copy
    names = [name for name in micro_batches[0] if name not in EXACT]
    of_floats = {name: sums(*(micro_batch[name] for micro_batch in micro_batches)) for name in names}
    rewards = [values for one in batch.pop("group_rewards") for values in one.values()]
    of_groups = {"group_rewards": sums(*rewards)} if rewards else {}
    return {**batch, "exact": digest(*exact), **of_floats, **of_groups}


BATCHES = Part(name="batches", cases=cases, play=play, tolerance=1e-5)
