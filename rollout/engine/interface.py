"""What an engine is to the rest of rollout: its spec, its reports, its methods. Imports no torch, vLLM or Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    import numpy as np

    from rollout.types import SamplingParams, TokenChunk
    from weight_sync.messages import CommitResult
    from weight_sync.vllm.compat import InFlight


SleepLevel = Literal[0, 1, 2]
"""What a sleeping engine releases: 2 all its device memory; 1 the same, but weights are kept on the host (where a sync
does not bring all of them, below an adapter); 0 only compute (a device whose memory vLLM cannot release)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything needed to start one engine replica, as plain values (it travels to a Ray actor)."""

    model: str
    """Directory with config and weights (or any name the engine can resolve)."""
    tokenizer: str = ""
    """For its end token, and to find stop strings; without one (empty) stop strings are refused, and end tokens are
    those of `model`'s generation config. The engine itself is token-in, token-out."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model or tokenizer."""
    device: str = "cpu"
    """Name of the device backend."""
    devices: tuple[str, ...] = ()
    """Ids of the devices that it shares with others; empty for those that Ray gives it."""
    dtype: str = "bfloat16"
    float32_head: bool = False
    """Compute logits in float32, which not every vLLM can (`has_float32_head`)."""
    tensor_parallel_size: int = 1
    max_model_len: int = 4096
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.85
    kv_cache_gib: float | None = None
    """Size of the KV cache. None: what is left of `gpu_memory_utilization` when the model is loaded; 1 on "cpu"."""
    num_threads: int = 1
    """Compute threads per worker, on "cpu"."""
    enforce_eager: bool = False
    reports_load: bool = False
    """Collect figures of cache and queue for `Engine.load`, at a small cost per step."""
    stream_interval: int = 64
    """Most tokens of one chunk: what a caller loses if the engine dies."""
    seed: int = 0
    in_flight: InFlight = "keep"
    """What a commit does to running requests: "keep" continues with their KV (those without a token start again),
    "recompute" rebuilds it under the new weights, "abort" ends them, for the caller to resubmit."""
    pause_limit_s: float = 300.0
    """Of a pause that a commit left behind; longer than any commit takes."""
    initial_version: int = 0
    """Of the weights that the engine starts with."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens besides those of the model's generation config and the tokenizer."""
    lora_rank: int = 0
    """Rank of the policy's LoRA adapter, which is all that weight sync then moves; 0 syncs the whole model."""
    lora_targets: tuple[str, ...] = ()
    """Layers that have adapters, by their last name: ("q_proj", "v_proj")."""
    sleep_level: SleepLevel | None = None
    """How deep `sleep` goes; None for an engine that never sleeps."""
    extension: str = ""
    """Dotted path of the class whose methods `call_workers` reaches; empty for none."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments; they win over ours."""
    forks: bool = True
    """Whether the engine's process may be forked from one that has imported vLLM."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the engine's processes; wins over ours and over the inherited one."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs", "num_threads", "stream_interval"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"EngineSpec.{name} must be >= 1, got {value}; fix it in the `rollout` section")

    def check_prompt(self, num_tokens: int) -> None:
        """Raises ValueError unless a prompt of `num_tokens` leaves room for at least one generated token."""
        if not 1 <= num_tokens < self.max_model_len:
            raise ValueError(
                f"prompt has {num_tokens} tokens, must be >= 1 and < max_model_len={self.max_model_len}; "
                "drop overlong prompts (task.max_prompt_tokens) or raise rollout.max_model_len"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The life of one engine so far, by its own clock, in seconds."""

    began_at: float
    """Distinguishes it from one that took its place."""
    up_s: float
    busy_s: float
    """With requests inside it, from any sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine as of its last step. None is what the engine does not report."""

    running: int
    """Requests in its batch."""
    waiting: int
    """Requests inside it that wait for a place in the batch or in the cache."""
    kv_usage_frac: float | None
    """Share of the KV cache that running requests hold."""
    num_preemptions: int | None
    """Requests that lost their cache to others, since start."""
    still_s: float = 0.0
    """How long it has had requests and produced no token; 0 while it may not generate: paused, asleep, or idle."""
    times: EngineTimes | None = None
    unstarted: int = 0
    """Requests without a token: they wait for admission, for a place, or for their prefill."""
    generated_tokens: int = 0
    """Since start, warm-up excluded."""
    paused_s: float = 0.0
    """So far; 0 while generation runs."""
    is_dead: bool = False


class Engine(ABC):
    """One engine replica. Promises that every implementation keeps (tests/contract/engine):

    - every sampled token is labelled with the policy version that sampled it, commits in mid-response included;
    - an end token that was sampled is part of the response (`finish_reason="stop"`), and so are the tokens of a stop
      string, also of one that began in the response's prefix; the token that completes it is the last one;
    - a commit never loses a request, and generation runs again when `commit` returns or raises, unless the workers
      report that their weights are a mixture;
    - after the engine died every call raises `EngineDead`; no call waits indefinitely.
    """

    @abstractmethod
    async def start(self) -> Mapping[str, float]:
        """Load the model and generate once, so that all one-time compilation is done. The seconds of each stage."""

    @abstractmethod
    def generate(
        self, request_id: str, token_ids: np.ndarray, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream one response to `token_ids` (int32[T]) in chunks of at most `stream_interval` tokens.

        The last chunk, and only it, has a `finish_reason`. Closing the generator early aborts the request.

        Raises:
            EngineDead: the engine is dead or died meanwhile; tokens already yielded are good.
            ValueError: the prompt does not fit or has tokens outside the vocabulary, `request_id` is already running,
                or there are stop strings and the engine was started without a tokenizer.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request: its stream yields what it has, with finish reason "abort". Unknown ids are ignored."""

    @abstractmethod
    async def call_workers(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call `method` of the extension in every worker; one result per worker, in rank order.

        Generation waits while a worker runs it, so a long method starts a thread and returns before `timeout_s`.

        Raises:
            TimeoutError: no result within `timeout_s` seconds. The workers are in an unknown state: the engine is dead.
            EngineDead: the engine is dead.
        """

    @abstractmethod
    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        """Pause, call `method` in every worker, and continue as `version` if all of them report success.

        Workers reply with `weight_sync.messages.Reply` bytes. If one reports a mixture of versions, the engine stays
        paused until a later commit works; after `EngineSpec.pause_limit_s` it is dead. A commit runs to its end even
        if the caller is cancelled. Errors as of `call_workers`.
        """

    async def sleep(self) -> None:
        """Leave the device to a learner that shares it, as far as `EngineSpec.sleep_level` says (ValueError if it is
        None). Running requests end with finish reason "abort"; new ones wait. The next commit takes the memory again
        and wakes the engine: it must write every weight, since what was there may be gone. Errors as of `call_workers`.
        """
        raise ValueError("this engine cannot sleep; start it with EngineSpec.sleep_level")

    @property
    @abstractmethod
    def version(self) -> int:
        """The policy version that samples now."""

    @abstractmethod
    def status(self) -> EngineStatus:
        """Without waiting; also of a dead engine."""

    def load(self) -> EngineStatus:
        """The status of a live engine; raises EngineDead."""
        if (status := self.status()).is_dead:
            raise EngineDead("engine is dead; use another replica")
        return status

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent; running streams raise `EngineDead`."""
