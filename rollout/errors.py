"""Errors of the rollout side that callers tell apart."""

from __future__ import annotations


class DataError(Exception):
    """A data set, column, prompt or reward function cannot be used as configured. The process exits with code 2."""


class PluginError(Exception):
    """A dotted path of the configuration leads to nothing, or to something of another kind than it has to be."""


class AgentError(Exception):
    """An agent loop or its environment raised, hung, or broke its contract. Marks one trajectory."""


class BaselineError(Exception):
    """The greedy answer of a group has no reward, so none of its answers has an advantage. Fails the group."""


class EngineDead(Exception):
    """An engine replica stopped answering; its requests continue elsewhere from the tokens they have."""


class WorkerLost(Exception):
    """A rollout worker died or stopped answering with a group in hand. Says nothing about the group."""


class RewardError(Exception):
    """A reward call raised, hung, or returned something that is not a finite number. Marks one trajectory."""


class BufferClosed(Exception):
    """The work buffer was closed: the normal end of a loop, unless `__cause__` carries the error that closed it."""


class NoProgress(Exception):
    """Generation keeps producing nothing that can be trained: every group is filtered, or every group fails."""
