"""vLLM on CPU.

After a part of a prompt that is not its last, vLLM samples a token, throws it away and turns the request's random
generator back by an offset, which only device generators have: the engine ends with "CPU Generator does not use
offset". Prompts longer than a step's budget do that, and so do requests that are computed again at a commit
(`in_flight: recompute`). Here the state is kept before sampling and put back. Can go when vLLM does so itself, which
0.32 does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def rewind_generators() -> None:
    """Repair the CPU model runner of this process. Idempotent."""
    runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if hasattr(runner._sample, "rewinds"):
        return
    sample, book = runner._sample, runner._bookkeeping_sync

    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [(generator, generator.get_state()) for generator in _discarded(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in kept:
            generator.set_state(state)
        return output

    def book_without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, hidden = self.input_batch.generators, _discarded(self)
        for index in hidden:
            del generators[index]
        try:
            return book(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    sample_and_rewind.rewinds = True  # pyright: ignore[reportFunctionMemberAccess] - so that a second call does nothing
    runner._sample, runner._bookkeeping_sync = sample_and_rewind, book_without_rewinding


def _discarded(runner: Any) -> dict[int, Any]:
    """Row -> generator, of the rows whose sampled token does not count."""
    batch = runner.input_batch
    rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}
