"""One receiver's place in a relay: what it offers to the next replica, and from whom it reads itself."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from weight_sync.device.errors import DeviceError
from weight_sync.errors import PlanMismatch, RelayStalled
from weight_sync.relay import RelayInlet, RelayOutlet, ShadowMap, map_shadow
from weight_sync.transports.base import OnArrived, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.control import LinkRequest
    from weight_sync.device.base import Backend
    from weight_sync.landing import Landing
    from weight_sync.transports.base import Piece
    from weight_sync.types import RelayHandle

log = logging.getLogger(__name__)


class RelayEnds:
    """An outlet, once the shadow block can be shared, and an inlet, once a predecessor is named. Both may be missing;
    then everything comes from the learners."""

    def __init__(self, backend: Backend, shadow: ShadowMap | None, outlet: RelayOutlet | None) -> None:
        self._backend = backend
        self._shadow = shadow
        self._outlet = outlet
        self._inlet: RelayInlet | None = None
        self._relayed: frozenset[int] = frozenset()
        self._is_read = False

    @classmethod
    def of(cls, landing: Landing, backend: Backend, *, owner: str, is_wanted: bool) -> RelayEnds:
        """For a staged landing in memory that can be shared; else ends that do nothing."""
        if landing.shadow is None or not is_wanted or not backend.capabilities().ipc:
            return cls(backend, None, None)
        shadow = map_shadow(landing.shadow, landing.pieces)
        return cls(backend, shadow, RelayOutlet(backend, shadow, owner=owner))

    @property
    def handle(self) -> RelayHandle | None:
        """How others read from here; None if they cannot."""
        return None if self._outlet is None else self._outlet.handle

    def link(self, request: LinkRequest) -> bool:
        """Take a new predecessor, or none. False if its memory cannot be read: then the learners give everything."""
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.close()
        self._relayed, self._is_read = frozenset(request.relayed), request.is_read
        if request.predecessor is None or self._shadow is None:
            return False
        try:
            self._inlet = RelayInlet(self._backend, request.predecessor, self._shadow)
        except (DeviceError, PlanMismatch) as error:
            log.warning("cannot read from %s, the learners give everything: %s", request.predecessor.owner, error)
            return False
        return True

    def begin(self, version: int) -> None:
        """Call before the first byte of `version` is written."""
        if self._outlet is not None:
            self._outlet.begin(version)

    def restart(self, rank: int) -> None:
        """The source is pulled again from its start."""
        if self._outlet is not None:
            self._outlet.advance(rank, 0)

    def pull(
        self,
        rank: int,
        pieces: Sequence[Piece],
        *,
        version: int,
        direct: Callable[[Sequence[Piece], OnArrived], None],
        check: Callable[[], None],
        may_relay: bool,
    ) -> bool:
        """Bring one source in, from the predecessor as far as it has it, else by `direct`. Whether it fell silent."""
        done, has_stalled = 0, False
        if self._inlet is not None and rank in self._relayed and may_relay:
            try:
                self._inlet.pull(rank, version, check=check, outlet=self._outlet)
                return False
            except RelayStalled as stalled:
                log.warning("%s", stalled)
                done, has_stalled = stalled.pieces_done, True
        outlet = self._outlet
        if outlet is not None and self._is_read:
            direct(pieces[done:], lambda num_pieces: outlet.advance(rank, done + num_pieces))
        else:
            direct(pieces[done:], ignore)
            if outlet is not None:  # reports on the way would cost time; whoever is linked to us later finds it all
                outlet.advance(rank, len(pieces))
        return has_stalled

    def give_up(self) -> None:
        """What the shadow holds is not to be read."""
        if self._outlet is not None:
            self._outlet.end()

    def counters(self) -> dict[str, int]:
        """The inlet is left out: it changes with the membership, not with a sync."""
        return {} if self._outlet is None else self._outlet.counters()

    def close(self) -> None:
        """Idempotent. Both are closed, also if one cannot be; that failure is raised at the end."""
        inlet, self._inlet = self._inlet, None
        with ExitStack() as closing:
            for end in (self._outlet, inlet):
                if end is not None:
                    closing.callback(end.close)
