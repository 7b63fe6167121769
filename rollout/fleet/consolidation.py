"""`rollout.repack_below`: moves the last requests of a step to fewer engines.

An engine is freed as a whole or not at all: one that keeps a request is as busy as before, and the others would have
moved for nothing. Requests move from an engine to a fuller one, never back within a plan.

A moved request is computed again, prompt and tokens so far. So it moves only once it is at least twice as long as when
it was sent (`has_doubled`). Then whatever the plans, a request that ends with L tokens, P of them prompt, moves at most
log2(L / P) times, and its moves together compute at most 2 L tokens again: each move costs at least twice as much as
the one before, and the last one at most L. No request can go back and forth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollout.fleet.adaptive_limit import KV_ROOM

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationRule:
    below: int
    """An engine with fewer requests is worth freeing."""
    most: int
    """No engine gets more requests through a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoadView:
    """One engine that takes requests, as one sender sees it."""

    running: int
    """Requests of all senders that are there."""
    own: int
    """Those of this sender, which are all that it can move."""
    limit: int | None = None
    """Of this sender's requests there; None without a limit."""
    is_queueing: bool = False
    """Whether requests wait inside it."""
    kv_frac: float | None = None
    """Share of its KV cache in use; None where the engine does not report it."""
    may_leave: bool
    """Whether everything of this sender that is there, or may come back there, may move now."""

    def has_room(self, other: EngineLoadView, most: int) -> bool:
        """Whether everything of another engine fits next to its own."""
        if self.is_queueing or self.running + other.running > most:
            return False
        if self.limit is not None and self.own + other.own > self.limit:
            return False
        return self.kv_frac is None or other.kv_frac is None or self.kv_frac + other.kv_frac < KV_ROOM

    def joined(self, other: EngineLoadView) -> EngineLoadView:
        kv_frac = None if self.kv_frac is None or other.kv_frac is None else self.kv_frac + other.kv_frac
        return replace(self, running=self.running + other.running, own=self.own + other.own, kv_frac=kv_frac)


def has_doubled(num_tokens: int, num_sent: int) -> bool:
    """Whether a request of `num_tokens` tokens may move that was sent to its engine with `num_sent`."""
    return num_tokens >= 2 * num_sent


def engines_to_drain(places: Mapping[str, EngineLoadView], rule: ConsolidationRule) -> list[str]:
    """The engines to free now, the emptiest first; the others have room for their requests.

    Each one's requests are meant for an engine that is not worth freeing, the emptiest of these, because they are
    fastest there; and if none of them has room, for the fullest of the others.
    """
    after, freed = dict(places), list[str]()
    for name, place in sorted(places.items(), key=lambda item: (item[1].running, item[0])):
        is_worth_it = 0 < place.running < rule.below and place.own > 0
        if after[name] is not place or not is_worth_it or not place.may_leave:
            continue
        fuller = {n: p for n, p in after.items() if n not in freed and (p.running, n) > (place.running, name)}
        targets = {n: p for n, p in fuller.items() if p.has_room(place, rule.most)}
        if not targets:
            continue
        kept = {n: p.running for n, p in targets.items() if p.running >= rule.below}
        target = min(kept, key=lambda n: kept[n]) if kept else max(targets, key=lambda n: targets[n].running)
        after[target] = after[target].joined(place)
        freed.append(name)
    return freed
