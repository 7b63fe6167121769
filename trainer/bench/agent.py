"""Stored configurations name `trainer.bench.agent.forced_lengths`; see `trainer.tools.bench_agent`."""

from trainer.tools.bench_agent import forced_lengths

__all__ = ["forced_lengths"]
