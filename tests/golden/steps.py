"""One optimizer step of the learner on a tiny model: every policy loss with every correction, and both with every place
of the KL and of the critic; a few on two ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tests.golden import seams
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"loss": "ppo_clip", "dual_clip": 1.5},
    "reinforce": {"loss": "reinforce"},
    "importance_sampling": {"loss": "importance_sampling"},
    "gspo": {"loss": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "gmpo": {"loss": "gmpo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": "kl_cov"},
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_kl": {"loss": "dppo_kl", "dppo_threshold": 0.05},
    "dro": {"loss": "dro"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"clamp": {"upper": 1.2}},
    "tis of sequences": {"level": "sequence_mean", "clamp": {"lower": 0.95, "upper": 1.05}},
    "mis": {"level": "sequence", "mask": {"upper": 2.0}},
    "icepop": {"mask": {"lower": 0.8, "upper": 1.3}},
    "reject": {"reject": {"level": "sequence_mean", "metric": "k3", "upper": 0.04}},
    "decoupled": {"objective": "decoupled", "mask": {"upper": 1.5}},
    "loglinear": {"objective": "loglinear", "clamp": {"upper": 1.4}},
}
PLACES: dict[str, dict[str, Any]] = {
    "alone": {},
    "entropy": {"entropy_coef": 0.01},
    "kl in loss": {"kl": {"coef": 0.1, "estimator": "k3"}},
    "kl in reward": {"kl": {"coef": 0.1, "estimator": "k1", "apply_to": "reward"}},
    "kl in advantage": {"kl": {"coef": 0.1, "estimator": "k1", "apply_to": "advantage"}},
    "critic": {"advantage_estimator": "gae", "gae_lambda": 0.9},
    "shared critic": {"advantage_estimator": "gae", "shared_backbone": True, "whiten_advantages": False},
    "critic, kl in reward": {
        "advantage_estimator": "gae",
        "gae_gamma": 0.98,
        "kl": {"coef": 0.1, "apply_to": "reward"},
    },
}
ESTIMATORS = ("k2", "k1_straight_through", "k3_straight_through")
ON_RANKS = (
    ("ppo_clip", "none", "alone"), ("gspo", "tis of sequences", "kl in loss"), ("cispo", "mis", "critic"),
    ("clip_cov", "icepop", "shared critic"), ("importance_sampling", "decoupled", "kl in reward"),
    ("kl_cov", "loglinear", "critic, kl in reward"),
)  # fmt: skip


def cases() -> Mapping[str, Any]:
    """Every loss with every correction that works in another way, and with what is added to a loss; and one loss with
    every correction in every place."""
    triples = [
        *itertools.product(LOSSES, ["none", "tis", "mis", "decoupled", "loglinear"], ["alone"]),
        *itertools.product(LOSSES, ["none"], ["kl in loss", "shared critic"]),
        *itertools.product(["ppo_clip"], CORRECTIONS, ["alone", "kl in loss", "kl in reward", "critic"]),
        *itertools.product(["ppo_clip"], ["none"], PLACES),
    ]
    one = {" + ".join(triple): algorithm(*triple) for triple in dict.fromkeys(triples)}
    kl = {f"kl in loss, {name}": {"kl": {"coef": 0.1, "estimator": name}} for name in ESTIMATORS}
    return {**one, **kl}


def algorithm(loss: str, correction: str, place: str) -> dict[str, Any]:
    return {**LOSSES[loss], **PLACES[place], "correction": CORRECTIONS[correction]}


def play(given: Mapping[str, Any], _folder: Path) -> Any:
    return seams.learner_steps(given)


def cases_on_ranks() -> Mapping[str, Any]:
    return {"two ranks": [algorithm(*triple) for triple in ON_RANKS]}


def play_on_ranks(given: list[Mapping[str, Any]], folder: Path) -> Any:
    """All of them in the same two processes, whose start costs most."""
    names = [" + ".join(triple) for triple in ON_RANKS]
    return dict(zip(names, seams.learner_steps_on_ranks(given, folder, world_size=2), strict=True))


STEPS = Part(name="steps", cases=cases, play=play, tolerance=2e-4)
RANKS = Part(name="ranks", cases=cases_on_ranks, play=play_on_ranks, tolerance=2e-4)
