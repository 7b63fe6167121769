"""The earlier place of `trainer.tools.bench_workload.forced_lengths`."""

from trainer.tools.bench_workload import forced_lengths

__all__ = ["forced_lengths"]
