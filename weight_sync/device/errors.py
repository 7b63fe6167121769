"""The error that a device layer raises."""

from __future__ import annotations


class DeviceError(Exception):
    """A device is missing, misconfigured or refused a call. The message says what to do."""
