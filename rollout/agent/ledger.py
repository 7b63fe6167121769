"""The name under which older agents import `TrajectoryBuilder`."""

from rollout.agent.trajectory_builder import TrajectoryBuilder as TokenLedger

__all__ = ["TokenLedger"]
