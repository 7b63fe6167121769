"""One engine as a rollout worker reaches it: the protocol, and the client of a Ray actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import numpy as np

    from rollout.types import SamplingParams, TokenChunk


class EngineClient(Protocol):
    """One engine replica, as seen from a rollout worker."""

    @property
    def name(self) -> str: ...

    def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Generates for all requests at once; yields (index of the request, its new tokens) in any order. The last
        chunk of a request has a finish reason; "abort" means that the engine returned the request, which continues
        elsewhere. Closing the generator aborts what still runs. Raises EngineDead if the replica stops responding."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Has it return these requests, with all sampled tokens. Does not wait; unknown ids are ignored."""
        ...


class RayEngineClient:
    """An `EngineActor` behind a Ray handle, as an `EngineClient`."""

    def __init__(self, name: str, handle: Any, *, sender: str) -> None:
        """`sender` keeps request ids apart: a group whose worker died is generated again by another one, while the
        engine may still have the first attempt."""
        self.name = name
        self._handle = handle
        self._sender = sender

    async def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """See `EngineClient`."""
        from ray.exceptions import ObjectLostError, RayTaskError

        running = dict(enumerate(request_ids))
        distinct: dict[bytes, np.ndarray] = {}  # equal prompts travel once: pickle knows an object that it has seen
        prompts = [distinct.setdefault(tokens.tobytes(), tokens) for tokens in token_ids]
        try:
            async for ref in self._handle.generate_group.remote(self._full_ids(request_ids), prompts, list(params)):
                for index, chunk in await ref:
                    if chunk.finish_reason is not None:
                        del running[index]
                    yield index, chunk
        except (*actor_errors(), ObjectLostError) as error:
            running.clear()
            raise EngineDead(f"{self.name}: {str(error).splitlines()[0]}") from error
        except EngineDead as error:
            running.clear()
            # The text of what Ray raises for it is the engine's traceback; what happened is in its cause.
            raise EngineDead(f"{self.name}: {getattr(error, 'cause', error)}") from error
        except RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            # Ray's own has a traceback for a text, cannot be pickled, and is of a new class each time.
            raise error.cause from error
        finally:
            if running:
                self.abort(list(running.values()))

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `EngineClient`."""
        self._handle.abort.remote(self._full_ids(request_ids))

    def _full_ids(self, request_ids: Sequence[str]) -> list[str]:
        return [f"{self._sender}/{request_id}" for request_id in request_ids]


def actor_errors() -> tuple[type[Exception], ...]:
    """What Ray raises for a call to an actor that is gone or cannot be reached. One that the memory monitor of its node
    has killed fails with an `OutOfMemoryError`, which is no `RayActorError`."""
    from ray import exceptions as ray

    lost_host = (ray.NodeDiedError, ray.LocalRayletDiedError)
    return (ray.RayActorError, ray.OutOfMemoryError, ray.WorkerCrashedError, *lost_host)


def is_actor_lost(error: BaseException) -> bool:
    """Whether a remote call failed because its actor is gone or cannot be reached, and not by what the actor did."""
    from ray.exceptions import RayTaskError

    return isinstance(error, actor_errors()) and not isinstance(error, RayTaskError)
