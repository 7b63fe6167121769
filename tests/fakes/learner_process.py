"""A `LearnerActor` in a process of its own, driven through a pipe instead of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes.fsdp_rank import RankProcess

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import RunConfig


def worker_main(rank: int, cfg: RunConfig, num_ranks: int, pipe: Any) -> None:
    """Build the worker, then answer `(method, args)` until the pipe closes."""
    from trainer.learner.actor import LearnerActor

    class Worker(LearnerActor):
        def set_adapters(self, seed: int) -> None:
            """New adapters in place, as an optimizer step would leave them, large enough to be seen in every logit."""
            import torch

            from trainer.learner.fsdp import local_rows, local_tensor
            from trainer.learner.lora import adapters_of

            for index, adapter in enumerate(adapters_of(self._parts.learner.model)):
                for at, param in enumerate((adapter.a, adapter.b)):
                    generator = torch.Generator().manual_seed(seed * 1000 + 2 * index + at)
                    whole = torch.randn(param.shape, generator=generator) * 0.15
                    rows = slice(*local_rows(param, name=adapter.module))
                    local_tensor(param.detach()).copy_(whole[rows])

        def adapters(self) -> tuple[dict[str, torch.Tensor], float]:
            """Collective. The whole adapter under PEFT's names, B without scaling; and the scaling."""
            from trainer.learner.lora import adapters_of, gather_adapters

            model = self._parts.learner.model
            return gather_adapters(model), adapters_of(model)[0].scaling

    worker = Worker(cfg, rank=rank, world_size=num_ranks)
    try:
        while True:
            method, args = pipe.recv()
            try:
                pipe.send((True, getattr(worker, method)(*args)))
            except Exception as error:  # noqa: BLE001 - a process's edge: the parent raises it again
                pipe.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        worker.close()


class LearnerProcess(RankProcess):
    """The parent's end; a `PublisherHandle`."""

    def __init__(self, cfg: RunConfig, rank: int, num_ranks: int) -> None:
        self._start(rank, worker_main, cfg, num_ranks)
