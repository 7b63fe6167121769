"""Which engine replica generates what, and how much at once: pure policy, no I/O.

A group stays with one replica, because its samples share the prompt's prefix cache. A new group goes to the replica
with the fewest outstanding tokens (prompt plus budget of what was sent and has not come back) among those with room,
and to the first one of those that have equally few. A router knows what its own rollout worker has sent, and not what
the others have; so that they do not all begin with the same replica, each has the replicas in another order.
A replica that is set aside gives its groups up, and takes none of another one that has begun; new groups end that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class NoReplica(Exception):
    """No replica takes requests; the message has the reason of each."""


def order_of(names: Sequence[str], *, worker: int, num_workers: int) -> list[str]:
    """The replicas for the router of one of several rollout workers: they begin evenly spread over all of them.

    Example:
        order_of(["e0", "e1", "e2", "e3"], worker=1, num_workers=2)  # ["e2", "e3", "e0", "e1"]
    """
    first = worker * len(names) // num_workers
    return [*names[first:], *names[:first]]


class Router:
    """Least outstanding tokens, sticky per group, around replicas that are quarantined, at rest or full.

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
        self._num_requests = dict.fromkeys(self._outstanding_tokens, 0)
        self._limits: dict[str, int] = {}
        self._quarantined: dict[str, str] = {}
        self._resting: set[str] = set()
        self._aside: set[str] = set()
        self._sticky: dict[str, str] = {}

    def route(self, group_key: str, tokens: int, *, num_requests: int = 1) -> str | None:
        """Chooses a replica for `tokens` more tokens of a group, in `num_requests` requests, and counts them there.

        Returns:
            None if there is no room now: every replica that may take them (the group's own, if it has one) is full or
            at rest. Nothing is counted then.

        Raises:
            NoReplica: all are quarantined.
        """
        name = self._choose(group_key, num_requests)
        if name is None:
            return None
        self._sticky[group_key] = name
        self._aside.discard(name)
        self._outstanding_tokens[name] += tokens
        self._num_requests[name] += num_requests
        return name

    def home(self, group_key: str) -> str | None:
        """The one replica that a group waits for; None if any will do."""
        name = self._sticky.get(group_key)
        return name if name is not None and self._takes_groups(name) else None

    def done(self, name: str, tokens: int, *, num_requests: int = 1) -> None:
        """`tokens` of `num_requests` requests that were routed to `name` came back, or never will."""
        left = self._outstanding_tokens[name] - tokens
        if left < 0 or self._num_requests[name] < num_requests:
            raise ValueError(
                f"{tokens} tokens came back from {name!r}, but only {self._outstanding_tokens[name]} were outstanding "
                f"(requests: {num_requests} of {self._num_requests[name]})"
            )
        self._outstanding_tokens[name] = left
        self._num_requests[name] -= num_requests

    def forget(self, group_key: str) -> None:
        """The group is over; nothing else of it will be routed."""
        self._sticky.pop(group_key, None)

    def limit(self, name: str, num_requests: int) -> None:
        """From now on `name` gets nothing while it has so many requests, except a group that finds it empty."""
        self._require_known(name)
        self._limits[name] = num_requests

    def quarantine(self, name: str, reason: str) -> None:
        """Sends nothing more to `name` until `restore`. The first reason is kept."""
        self._require_known(name)
        self._quarantined.setdefault(name, reason)

    def restore(self, name: str) -> None:
        """`name` works again, and is not at rest."""
        self._require_known(name)
        self._quarantined.pop(name, None)
        self._resting.discard(name)
        self._aside.discard(name)

    def rest(self, name: str) -> None:
        """Sends nothing new to `name` until `resume`; it is well, and what it has goes on."""
        self._require_known(name)
        self._resting.add(name)

    def resume(self, name: str) -> None:
        """`name` takes requests again, unless it is quarantined."""
        self._require_known(name)
        self._resting.discard(name)

    def set_aside(self, name: str) -> None:
        """Its groups go on elsewhere, and `name` waits for a new group; others come only if they find no room."""
        self._require_known(name)
        self._aside.add(name)

    def groups(self, name: str) -> set[str]:
        """Those whose next requests go to `name`, if it takes any."""
        return {group_key for group_key, home in self._sticky.items() if home == name}

    @property
    def in_service(self) -> list[str]:
        """Replicas that are neither quarantined nor at rest nor set aside."""
        return [name for name in self._num_requests if self._takes_groups(name)]

    def require_service(self) -> None:
        """Raises NoReplica if nobody takes requests because some replicas are quarantined, and the others rest."""
        lost = {**dict.fromkeys(self._resting, "at rest"), **self._quarantined}
        if self._quarantined and len(lost) == len(self._num_requests):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
            raise NoReplica(f"all {len(lost)} engine replicas are quarantined or at rest ({reasons})")

    @property
    def quarantined(self) -> dict[str, str]:
        """Replica to reason."""
        return dict(self._quarantined)

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        """Replica to tokens."""
        return dict(self._outstanding_tokens)

    @property
    def num_requests(self) -> dict[str, int]:
        """Replica to requests that were sent there and have not come back."""
        return dict(self._num_requests)

    @property
    def limits(self) -> dict[str, int]:
        """Replica to its limit, for those that have one."""
        return dict(self._limits)

    def _choose(self, group_key: str, num_requests: int) -> str | None:
        home = self.home(group_key)
        if home is not None:
            return home if self._has_room(home, num_requests) else None
        if len(self._quarantined) == len(self._outstanding_tokens):
            self.require_service()
        usable = [name for name in self._outstanding_tokens if self._has_room(name, num_requests)]
        if group_key in self._sticky:
            usable = [name for name in usable if name not in self._aside] or usable
        return min(usable, key=self._outstanding_tokens.__getitem__, default=None)

    def _takes_groups(self, name: str) -> bool:
        return name not in self._quarantined and name not in self._resting and name not in self._aside

    def _has_room(self, name: str, num_requests: int) -> bool:
        if name in self._quarantined or name in self._resting:
            return False
        limit, used = self._limits.get(name), self._num_requests[name]
        return limit is None or used == 0 or used + num_requests <= limit

    def _require_known(self, name: str) -> None:
        if name not in self._outstanding_tokens:
            raise ValueError(f"unknown replica {name!r}; known are {sorted(self._outstanding_tokens)}")
