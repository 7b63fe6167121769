"""Errors of the rollout side that callers distinguish."""

from __future__ import annotations


class DataError(Exception):
    """A data set, column, prompt or reward function cannot be used as configured. Exit code 2."""


class PluginError(Exception):
    """A dotted path of the configuration names nothing, or an object of the wrong kind."""


class AgentError(Exception):
    """An agent loop or its environment raised, hung, or broke its contract. Marks one trajectory."""


class BaselineError(Exception):
    """The greedy response of a group has no reward, so no response has an advantage. Fails the group."""


class EngineDead(Exception):
    """An engine replica stopped responding; its requests continue elsewhere, from their tokens."""


class WorkerLost(Exception):
    """A rollout worker died or stopped responding while it had a group, which may not be at fault."""


class RewardError(Exception):
    """A reward call raised, hung, or returned something that is not a finite number. Marks one trajectory."""


class RewardTimeout(RewardError):
    """A reward call took longer than `task.reward.timeout_s`."""


class BufferClosed(Exception):
    """The rollout buffer was closed: normal, unless `__cause__` is the error that closed it."""


class NoProgress(Exception):
    """Generation produces nothing to train on: every group is filtered, or every group fails."""
