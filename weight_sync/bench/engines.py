"""Real vLLM engines in place of synthetic workers: random weights, requests in flight all the while.

    this process: SyncCoordinator ─ VllmReplica ─pipe─> VllmHost: AsyncLLM, Traffic ─> vLLM's own processes

A model directory with nothing but a `config.json` is made from the shapes. No tokenizer: prompts are token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.bench.children import Child
from weight_sync.bench.traffic import Traffic, Window, Windows, merged
from weight_sync.device.select import get_backend
from weight_sync.device.visibility import shown
from weight_sync.messages import CommitResult, reply_state
from weight_sync.vllm.compat import EXTENSION, check_vllm_version
from weight_sync.vllm.replica import AsyncLLMReplica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from weight_sync.bench.case import Case
    from weight_sync.bench.processes import Fleet, Journal, Replica
    from weight_sync.bench.results import Results, SyncSample
    from weight_sync.device.base import Backend

PROMPT_TOKENS = 32
CPU_CACHE_BYTES = 256 << 20
SETTLE_S, UNDISTURBED_S, BETWEEN_SYNCS_S = 2.0, 3.0, 0.25
SHUTDOWN_S = 30.0


def vllm_replicas(case: Case, backend: Backend) -> Callable[[int, Sequence[int], Journal], Replica]:
    """
    Raises:
        UnsupportedVllm: vLLM is missing or of another version.
    """
    check_vllm_version()
    num_devices = backend.num_devices()

    def make(number: int, devices: Sequence[int], journal: Journal) -> Replica:
        seen = devices_environment(backend, devices, num_devices=num_devices, environ=os.environ)
        return VllmReplica(case, f"r{number}", {**engine_environment(case, backend), **seen}, journal)

    return make


def devices_environment(
    backend: Backend, devices: Sequence[int], *, num_devices: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables that show an engine its `devices`, which are places among the `num_devices` that this process sees."""
    inherited = None if backend.visible_devices_var is None else environ.get(backend.visible_devices_var)
    names = [str(index) for index in range(num_devices)] if inherited is None else inherited.split(",")
    return shown(backend, [names[index] for index in devices], num_devices=num_devices, environ=environ)


def engine_environment(case: Case, backend: Backend) -> dict[str, str]:
    """Variables of an engine's processes. A value that the user has set wins."""
    found = {variable.name: variable.value for variable in backend.process_env("engine")}
    found |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if backend.name == "cpu":
        # No plugins; no C++ compiler run for one small function of the sampler.
        found |= {"VLLM_PLUGINS": "", "TORCHDYNAMO_DISABLE": "1"}
        if case.tp == 1:
            found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in found.items() if name not in os.environ}


def engine_arguments(case: Case, backend: Backend, folder: str) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`."""
    found: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": case.dtype,
        "tensor_parallel_size": case.tp,
        "max_model_len": PROMPT_TOKENS + case.max_tokens,
        "max_num_seqs": case.requests,
        "worker_extension_cls": EXTENSION,
        "enforce_eager": case.enforce_eager,
        "disable_log_stats": True,
        **backend.engine_defaults(),
    }
    if backend.name == "cpu":
        found["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        if case.tp == 1:
            found["distributed_executor_backend"] = "uni"
    else:
        found["gpu_memory_utilization"] = case.gpu_memory_utilization
    return found


class VllmReplica:
    """A `ReplicaHandle`: one vLLM engine with its workers, in a process of its own."""

    def __init__(self, case: Case, name: str, environment: dict[str, str], journal: Journal) -> None:
        self.name = name
        self._journal = journal
        # Spawned afresh: vLLM decides by the state of its process how to start its own.
        child = Child(name, VllmHost, case, environment, method="spawn", has_children=True)
        self.children = (child,)

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        answer = await self.children[0].ask("call", method, args, timeout_s, timeout_s=timeout_s)
        if method == "ws_open":
            self._journal.note_opened(self.name, answer.value)
        return answer.value

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        started = time.monotonic()
        answer = await self.children[0].ask("commit", version, method, args, timeout_s, timeout_s=timeout_s)
        result: CommitResult = answer.value
        if reply_state(result.results) == "ok":
            self._journal.note_commit(self.name, result.results, started)
        return result


class VllmHost:
    """Lives in the child: an engine, the loop it runs in, and its requests."""

    def __init__(self, case: Case, environment: dict[str, str]) -> None:
        os.environ.update(environment)  # before anything asks which devices there are
        self._case = case
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()
        # Gone once the engine is up, so that one that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="weight-sync-bench-") as folder:
            config = json.dumps(case.architecture.config(case.dtype))
            (Path(folder) / "config.json").write_text(config, encoding="utf-8")
            self._engine = _launch(engine_arguments(case, get_backend(case.device), folder))
        self._replica = AsyncLLMReplica(self._engine, name="engine")
        self._traffic = Traffic(self._generate, max_tokens=case.max_tokens)

    def call(self, method: str, *args: Any) -> Any:
        match method:
            case "call":
                name, passed, timeout_s = args
                return self._run(self._replica.call(name, *passed, timeout_s=timeout_s))
            case "commit":
                version, name, passed, timeout_s = args
                return self._run(self._replica.commit(version, name, *passed, timeout_s=timeout_s))
            case "start_traffic":
                return self._run(self._start_traffic())
            case "end_traffic":
                return self._run(self._end_traffic(*args))
            case "engine_pids":
                manager: Any = self._engine.engine_core.resources.engine_manager
                return [process.pid for process in getattr(manager, "processes", ())]
            case _:
                raise ValueError(f"a vLLM host does not know {method!r}")

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUTDOWN_S)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start_traffic(self) -> None:
        self._traffic.start(self._case.requests)

    async def _end_traffic(self, windows: Windows, timeout_s: float) -> dict[str, Any]:
        await self._traffic.end(timeout_s)
        return {
            **self._traffic.log.summary(windows),
            "requests_done": self._traffic.num_done,
            "requests_lost": self._traffic.num_lost,
        }

    async def _generate(self, number: int) -> AsyncIterator[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        vocab = self._case.architecture.vocab
        prompt: Any = {"prompt_token_ids": random.Random(number).choices(range(vocab), k=PROMPT_TOKENS)}
        sampling = SamplingParams(
            max_tokens=self._case.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._engine.generate(prompt, sampling, request_id=f"bench-{number}"):
            yield len(output.outputs[0].token_ids)


def _hull(windows: Sequence[Window]) -> Window:
    return min(start for start, _ in windows), max(stop for _, stop in windows)


def _launch(arguments: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


class Generation:
    """Watches how the engines of a fleet generate while a case runs."""

    def __init__(self, fleet: Fleet, case: Case) -> None:
        self._children = list(fleet.workers())
        self._case = case
        self._undisturbed: list[tuple[float, float]] = []
        self._pids: list[int] = []

    async def start(self) -> None:
        """Put requests in flight and measure how fast they run undisturbed."""
        for child in self._children:
            self._pids += (await child.ask("engine_pids", timeout_s=self._case.timeout)).value
        for child in self._children:
            await child.ask("start_traffic", timeout_s=self._case.timeout)
        await asyncio.sleep(SETTLE_S)
        started = time.monotonic()
        await asyncio.sleep(UNDISTURBED_S)
        self._undisturbed.append((started, time.monotonic()))

    async def end(self, results: Results) -> None:
        """Let the requests end and put what they saw into the results."""
        summaries: list[dict[str, Any]] = []
        for child in self._children:
            windows = self._windows(child.name, results.samples)
            timeout_s = self._case.timeout
            summaries.append((await child.ask("end_traffic", windows, timeout_s, timeout_s=2 * timeout_s)).value)
        results.generation = merged(summaries)

    def _windows(self, replica: str, samples: Sequence[SyncSample]) -> Windows:
        commits, pulls, attests, until_commits = [], [], [], []
        for sample in samples:
            spans = [span for span in sample.spans if span.phase == "commit"]
            commits += [(span.started, span.stopped) for span in spans if span.party == replica]
            # While the first replica commits, others may wait for their turn, with nothing going on.
            until_commits.append((sample.published, min(span.started for span in spans)))
            workers = [name for name in sample.pulls if name.startswith(f"{replica}/")]
            pulls.append(_hull([sample.pull_window(name) for name in workers]))
            attests.append(_hull([sample.attest_window(name) for name in workers]))
        return Windows(self._undisturbed, pulls, attests, until_commits, commits)

    def kill_orphans(self) -> None:
        """vLLM's engine process does not notice that its owner is gone; call this when the fleet has closed."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
