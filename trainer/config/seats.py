"""How many sequences an engine generates at once: what `rollout.max_num_seqs=auto` becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainer.config.algorithm import traits_of

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Batches for which vLLM captures graphs by default; a larger one runs without, which is slower for small models."""
MEAN_SHARE = 0.25
"""Of the longest response, in the cache per sequence: responses of half the length, of which half is generated."""


class Seats(NamedTuple):
    """Of one engine."""

    number: int
    why: str
    """Empty if it was given."""

    def __str__(self) -> str:
        return f"{self.number} sequences at once per engine" + (f" (auto: {self.why})" if self.why else "")


def num_in_flight(cfg: RunConfig) -> int:
    """Responses of training, at most, with those of greedy baselines."""
    group_size = cfg.rollout.group_size + traits_of(cfg.algorithm).greedy_baseline
    return (cfg.mode.max_staleness + 1) * cfg.trainer.groups_per_step * group_size


def engine_seats(cfg: RunConfig, *, prompt_tokens: float, num_evaluated: int, kv_tokens: int | None) -> Seats:
    """`auto`: all responses that can be in flight, or all of an evaluation, in one wave over the engines; fewer if the
    cache cannot hold them, and never more than the largest captured graph.

    Args:
        prompt_tokens: mean; the responses of a group share the cache of their prompt.
        num_evaluated: responses of an evaluation.
        kv_tokens: room in the cache of an engine; None if unknown.
    """
    rollout = cfg.rollout
    if rollout.max_num_seqs != "auto":
        return Seats(rollout.max_num_seqs, "")
    wave = -(-max(num_in_flight(cfg), num_evaluated) // rollout.num_replicas)
    if rollout.max_concurrency is not None:
        wave = min(wave, rollout.max_concurrency)
    held = prompt_tokens / rollout.group_size + MEAN_SHARE * rollout.max_response_tokens
    if kv_tokens is not None and (room := int(kv_tokens / held)) < wave:
        number = max((size for size in GRAPH_SIZES if size <= room), default=1)
        why = f"its cache of {kv_tokens:,} tokens holds about {room} of {held:,.0f}; {wave} may be in flight"
    else:
        number, why = wave, f"all {wave} that may be in flight"
    largest = rollout.engine_args.get("max_num_batched_tokens", GRAPH_SIZES[-1])
    sizes = [size for size in GRAPH_SIZES if size <= largest]
    if number > sizes[-1]:
        return Seats(sizes[-1], f"the largest captured graph; {wave} may be in flight")
    return Seats(next(size for size in sizes if size >= number), why)
