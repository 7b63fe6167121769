"""What can go wrong while weights travel. An error names the party, what was found and expected, and what to do."""

from __future__ import annotations


class WeightSyncError(Exception):
    """Base of all weight-sync failures."""


class PlanMismatch(WeightSyncError):
    """Learner and engine do not agree on names, shapes, dtypes or the plan digest. Raised before a byte moves."""


class SlotOverwritten(WeightSyncError):
    """A slot was packed again while it was read; what was read must not be committed."""


class PullTimeout(WeightSyncError):
    """A receiver did not finish pulling, or a publisher did not answer, within the deadline of the sync."""


class DigestMismatch(WeightSyncError):
    """Bytes that arrived differ from the bytes that were packed."""


class ReplicaDirty(WeightSyncError):
    """A replica failed in the middle of an in-place commit: its weights are a mixture and it must not generate."""


class PublisherLost(WeightSyncError):
    """A learner rank was silent for longer than a living one is. A link or an engine that fails is not that."""


class StaleEpoch(WeightSyncError):
    """A message belongs to an earlier membership of the sync group, or to another run."""


class VersionUnavailable(WeightSyncError):
    """A publisher does not hold the version asked for: not published yet, superseded before it was pinned, or not
    sealed for the reason that the message gives."""


class TransportUnusable(WeightSyncError):
    """A probe showed that a transport does not work between two processes; the message names both and says why."""


class RelayStalled(WeightSyncError):
    """The replica that a source is read from went silent, ended, or gave the version up: somebody else has the rest."""


class DeviceError(Exception):
    """A device is missing, misconfigured or refused a call. The message says what to do."""
