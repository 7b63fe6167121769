"""Which engine replica generates what: pure policy, no I/O.

A group stays with one replica, because its samples share the prompt's prefix cache. A new group goes to the replica
with the fewest outstanding tokens (prompt plus budget of what was sent and has not come back).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class NoReplica(Exception):
    """Every replica is quarantined; the message has the reason of each."""


class Router:
    """Least outstanding tokens, sticky per group, around quarantined replicas.

    Example:
        router = Router(["engine-0", "engine-1"])
        name = router.route("group 7", 4096)
        ...
        router.done(name, 4096)
        router.forget("group 7")
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._outstanding_tokens = dict.fromkeys(names, 0)
        if not self._outstanding_tokens:
            raise ValueError("a router needs at least one replica, got none")
        self._quarantined: dict[str, str] = {}
        self._sticky: dict[str, str] = {}

    def route(self, group_key: str, tokens: int) -> str:
        """Chooses a replica for `tokens` more tokens of a group and counts them as outstanding there.

        Raises:
            NoReplica: all are quarantined.
        """
        name = self._sticky.get(group_key)
        if name is None or name in self._quarantined:
            name = self._least_loaded()
            self._sticky[group_key] = name
        self._outstanding_tokens[name] += tokens
        return name

    def done(self, name: str, tokens: int) -> None:
        """`tokens` that were routed to `name` came back, or never will."""
        left = self._outstanding_tokens[name] - tokens
        if left < 0:
            raise ValueError(
                f"{tokens} tokens came back from {name!r}, but only {self._outstanding_tokens[name]} were outstanding"
            )
        self._outstanding_tokens[name] = left

    def forget(self, group_key: str) -> None:
        """The group is over; nothing else of it will be routed."""
        self._sticky.pop(group_key, None)

    def quarantine(self, name: str, reason: str) -> None:
        """Sends nothing more to `name` until `restore`. The first reason is kept."""
        self._require_known(name)
        self._quarantined.setdefault(name, reason)

    def restore(self, name: str) -> None:
        """`name` works again."""
        self._require_known(name)
        self._quarantined.pop(name, None)

    @property
    def quarantined(self) -> dict[str, str]:
        """Replica to reason."""
        return dict(self._quarantined)

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        """Replica to tokens."""
        return dict(self._outstanding_tokens)

    def _least_loaded(self) -> str:
        usable = [name for name in self._outstanding_tokens if name not in self._quarantined]
        if not usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._quarantined.items())
            raise NoReplica(f"all {len(self._outstanding_tokens)} engine replicas are quarantined ({reasons})")
        return min(usable, key=lambda name: self._outstanding_tokens[name])

    def _require_known(self, name: str) -> None:
        if name not in self._outstanding_tokens:
            raise ValueError(f"unknown replica {name!r}; known are {sorted(self._outstanding_tokens)}")
