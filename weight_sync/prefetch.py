"""A pull beside generation: one thread, one version, one outcome."""

from __future__ import annotations

import logging
import threading

from weight_sync.errors import PullTimeout, WeightSyncError
from weight_sync.receiver_epoch import Host, Pulled, ReceiverEpoch
from weight_sync.sources import Deadline

log = logging.getLogger(__name__)

SLACK_S = 5.0
"""A pull outlives its deadline by this much. Whoever asked for it notices a little late that the deadline has passed,
and asks again: what the first attempt brought is not to be thrown away in between."""
ABORT_WAIT_S = 30.0
"""How long an aborted pull may take to notice: one batch of copies."""


class Prefetch:
    """Brings `version` into the shadow block; in place it takes the leases only. Starts at once."""

    def __init__(self, epoch: ReceiverEpoch, host: Host, version: int, *, deadline_s: float) -> None:
        self.version = version
        self._epoch = epoch
        self._host = host
        self._give_up = Deadline(host.clock() + deadline_s + SLACK_S, self._check)
        self._deadline_s = deadline_s
        self._is_aborted = threading.Event()
        self._outcome: Pulled | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"weight-sync-prefetch-{version}", daemon=True)
        self._thread.start()

    def extend(self, deadline_s: float) -> bool:
        """A retry wants the same version, and has until `deadline_s` from now. False if there is nothing to join: the
        pull failed, or is about to, since its time is over."""
        if self._outcome is not None:
            return not isinstance(self._outcome, BaseException)
        now = self._host.clock()
        if now >= self._give_up.at:
            return False
        self._give_up.at = max(self._give_up.at, now + deadline_s + SLACK_S)
        return True

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def outcome(self) -> Pulled | None:
        """What it cost; None while it runs.

        Raises:
            WeightSyncError: what made it fail.
        """
        match self._outcome:
            case WeightSyncError() as error:
                raise error
            case BaseException() as error:
                raise WeightSyncError(f"the pull of version {self.version} failed: {error!r}") from error
            case outcome:
                return outcome

    def wait(self, timeout_s: float) -> Pulled:
        """
        Raises:
            PullTimeout: it still runs after `timeout_s`.
        """
        self._thread.join(max(0.0, timeout_s))
        outcome = self.outcome()
        if outcome is None:
            raise PullTimeout(f"version {self.version} is still being pulled after {timeout_s:.1f} s more")
        return outcome

    def abort(self) -> bool:
        """Stop and wait for the thread. False if it does not end, so that what it uses must not be freed."""
        self._is_aborted.set()
        self._thread.join(ABORT_WAIT_S)
        if self._thread.is_alive():
            log.error("the pull of version %d did not stop within %.0f s", self.version, ABORT_WAIT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._host.device.index is not None:
                self._host.backend.set_device(self._host.device.index)
            if self._epoch.landing.is_staged:
                self._outcome = self._epoch.pull(self.version, give_up=self._give_up)
            else:
                self._epoch.lease(self.version, give_up=self._give_up, ttl_s=self._deadline_s)
                self._outcome = Pulled()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: `outcome` raises it again in the caller's thread
            # At once: giving things back takes a while, and a retry that comes meanwhile must not join.
            self._outcome = error
            self._epoch.give_up()

    def _check(self) -> None:
        if self._is_aborted.is_set():
            raise WeightSyncError(f"the pull of version {self.version} was aborted")
