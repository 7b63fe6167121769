"""Combinations of values around the number of requests an engine gets, and their moves. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.algorithm import LOSSES_WITHOUT_RATIO, UNBOUNDED_LOSSES
from trainer.config.conflicts import conflict, ineffective
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig
    from trainer.errors import Problem


def concurrency_problems(config: RunConfig) -> Iterator[Problem]:
    """Bounds that are empty, or too tight to be shared out; moves between engines that cannot be."""
    rollout = config.rollout
    if rollout.concurrency == "fixed":
        why = "rollout.concurrency=fixed does not adapt"
        yield from ineffective(config, "rollout.min_concurrency", why, "rollout.concurrency")
    highest = rollout.max_num_seqs if rollout.max_concurrency is None else rollout.max_concurrency
    key = "max_num_seqs" if rollout.max_concurrency is None else "max_concurrency"
    if rollout.concurrency == "adaptive" and rollout.min_concurrency >= highest:
        allowed = f"must be below rollout.{key}={highest}"
        do = "lower it, or use rollout.concurrency=fixed"
        yield conflict(config, "rollout.min_concurrency", allowed, do, f"rollout.{key}", "rollout.concurrency")
    if rollout.concurrency == "adaptive" and highest > rollout.max_num_seqs:
        allowed = f"must be at most rollout.max_num_seqs={rollout.max_num_seqs}: more would wait inside the engine"
        also = "rollout.max_num_seqs", "rollout.concurrency"
        yield conflict(config, "rollout.max_concurrency", allowed, "lower it, or use null", *also)
    if rollout.max_concurrency is not None and rollout.max_concurrency < rollout.num_workers:
        allowed = f"must be at least rollout.num_workers={rollout.num_workers}: each of them needs its share"
        yield conflict(config, "rollout.max_concurrency", allowed, "raise it", "rollout.num_workers")
    yield from _repacking_problems(config)


def stop_problems(config: RunConfig) -> Iterator[Problem]:
    """Stops that can end nothing. Whether the tokenizer has the tokens is known when it is loaded."""
    if not all(config.rollout.stop):
        yield conflict(config, "rollout.stop", "must hold no empty text: it would end every answer", "leave it out")
    if any(token_id < 0 for token_id in config.rollout.stop_token_ids):
        yield conflict(config, "rollout.stop_token_ids", "must be ids of tokens, from 0", "use [] for none")


def truncation_problems(config: RunConfig) -> Iterator[Problem]:
    """Sampling from a part of the vocabulary, beside something that acts on the ratio of learner and engine.

    Engines give the log-prob of a token among those that `top_p` and `top_k` left, the learner that among all. Equal
    weights then have a ratio below 1: the right weight of the token, and not one that a bound may cut.
    """
    rollout, acts = config.rollout, _acts_on_ratio(config)
    if acts is None:
        return
    does = "has none" if config.algorithm.loss in LOSSES_WITHOUT_RATIO else "acts on that"
    why = f"among fewer tokens equal weights have a ratio of learner to engine below 1, and {acts} {does}"
    other = "or algorithm.loss=importance_sampling with no bounds on the ratio but upper ones"
    if rollout.top_p < 1:
        yield conflict(config, "rollout.top_p", f"must be 1: {why}", f"use 1, {other}", acts.partition("=")[0])
    if rollout.top_k > 0:
        yield conflict(config, "rollout.top_k", f"must be 0: {why}", f"use 0, {other}", acts.partition("=")[0])


def _acts_on_ratio(config: RunConfig) -> str | None:
    """The first key under which a ratio below 1 for equal weights is taken for a policy that has moved."""
    algorithm, correction, prefix = config.algorithm, config.algorithm.correction, "algorithm.correction"
    if not is_own(algorithm.loss) and algorithm.loss not in UNBOUNDED_LOSSES:
        return f"algorithm.loss={algorithm.loss}"
    if algorithm.kl.in_reward or algorithm.kl.in_advantage:
        return f"algorithm.kl.placement={algorithm.kl.placement}"
    if correction.objective == "loglinear":
        return f"{prefix}.objective=loglinear"
    cuts = {
        "clamp.lower": correction.clamp.lower is not None,
        "mask.lower": correction.mask.lower is not None,
        "mask.metric": correction.mask.is_active and correction.mask.metric != "ratio",
        "reject": correction.reject.is_active,
    }
    return next((f"{prefix}.{key}" for key, is_set in cuts.items() if is_set), None)


def _repacking_problems(config: RunConfig) -> Iterator[Problem]:
    """Moves that nothing can come of, or that break what another key promises."""
    rollout, key = config.rollout, "rollout.repack_below"
    if rollout.num_replicas == 1:
        yield from ineffective(config, key, "one engine has none to move requests to", "rollout.num_replicas")
    if config.mode.shares_devices:
        why = f"with mode.name={config.mode.name} all engines leave their devices at the same moment"
        yield from ineffective(config, key, why, "mode.name")
    elif rollout.repack_below is not None and _is_seeded(config):
        allowed = "must be null with seeded requests: what moves goes on with another seed, and timing says what moves"
        also = "mode.max_staleness" if rollout.seed_requests is None else "rollout.seed_requests"
        yield conflict(config, key, allowed, "leave it at null, or use rollout.seed_requests=false", also)


def _is_seeded(config: RunConfig) -> bool:
    seed_requests = config.rollout.seed_requests
    return config.mode.max_staleness == 0 if seed_requests is None else seed_requests
