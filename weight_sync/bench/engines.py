"""Real vLLM engines in place of synthetic workers: random weights, requests in flight all the while.

    this process: SyncCoordinator ─ VllmReplica ─pipe─> VllmHost: AsyncLLM, Traffic ─> vLLM's own processes

A model directory with nothing but a `config.json` is made from the shapes. No tokenizer: prompts are token ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.bench.case import DTYPE
from weight_sync.device.environment import merge_env
from weight_sync.device.select import get_backend, seen_devices
from weight_sync.vllm.compat import EXTENSION, check_vllm_version, device_arguments, takes_device_ids
from weight_sync.vllm.replica import AsyncLLMReplica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from weight_sync.bench.case import Case
    from weight_sync.bench.report import SyncSample, Window
    from weight_sync.device.base import Backend
    from weight_sync.messages import CommitResult

PROMPT_TOKENS = 32
CPU_CACHE_BYTES = 256 << 20
SETTLE_S, UNDISTURBED_S, BETWEEN_SYNCS_S = 2.0, 3.0, 0.25
SHUTDOWN_S = 30.0


def engine_setup(case: Case, devices: Sequence[int]) -> tuple[dict[str, str], tuple[int, ...]]:
    """Variables of an engine's processes, of which a value that the user has set wins; and the places of its devices.

    Raises:
        UnsupportedVllm: vLLM is missing or of another version.
    """
    check_vllm_version()
    backend = get_backend(case.device)
    seen, places = engine_devices(backend, devices, num_devices=backend.num_devices(), environ=os.environ)
    found = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if backend.name == "cpu":
        # No plugins; no C++ compiler run for one small function of the sampler.
        found |= {"VLLM_PLUGINS": "", "TORCHDYNAMO_DISABLE": "1"}
        if case.tp == 1:
            found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    own = {name: value for name, value in found.items() if name not in os.environ}
    return {**merge_env(backend.process_env("engine"), own, os.environ), **seen}, places


def engine_devices(
    backend: Backend, devices: Sequence[int], *, num_devices: int, environ: Mapping[str, str]
) -> tuple[dict[str, str], tuple[int, ...]]:
    """As `seen_devices`, for an engine with `devices`: places among the `num_devices` that this process sees."""
    ids = [backend.device_id(index, environ) for index in devices]
    return seen_devices(backend, ids, num_devices=num_devices, environ=environ, own_first=not takes_device_ids())


def engine_arguments(case: Case, backend: Backend, folder: str) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`."""
    found: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": DTYPE,
        "tensor_parallel_size": case.tp,
        "max_model_len": PROMPT_TOKENS + case.max_tokens,
        "max_num_seqs": case.requests,
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        **backend.engine_defaults(),
    }
    if backend.name != "cpu":
        return {**found, "gpu_memory_utilization": case.gpu_memory_utilization}
    found["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return {**found, "distributed_executor_backend": "uni"} if case.tp == 1 else found


class VllmHost:
    """Lives in the child: an engine, the loop it runs in, and its requests."""

    def __init__(self, case: Case, environment: dict[str, str], places: tuple[int, ...]) -> None:
        os.environ.update(environment)  # before anything asks which devices there are
        self._case = case
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()
        # Gone once the engine is up, so that one that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="weight-sync-bench-") as folder:
            config = json.dumps(case.architecture.config(DTYPE))
            (Path(folder) / "config.json").write_text(config, encoding="utf-8")
            arguments = engine_arguments(case, get_backend(case.device), folder)
            self._engine = _launch({**arguments, **device_arguments(places)})
        self._replica = AsyncLLMReplica(self._engine, name="engine")
        self._traffic = Traffic(self._generate, max_tokens=case.max_tokens)

    def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[bytes]:
        return self._run(self._replica.call(method, *args, timeout_s=timeout_s))

    def commit(self, version: int, method: str, args: tuple[Any, ...], timeout_s: float) -> CommitResult:
        return self._run(self._replica.commit(version, method, *args, timeout_s=timeout_s))

    def start_traffic(self) -> list[int]:
        """Returns the process ids of the engine."""
        self._run(self._traffic.start(self._case.requests))
        manager: Any = self._engine.engine_core.resources.engine_manager
        return [process.pid for process in getattr(manager, "processes", ())]

    def end_traffic(self, windows: Mapping[str, Sequence[Window]], timeout_s: float) -> dict[str, Any]:
        self._run(self._traffic.end(timeout_s))
        return self._traffic.summary(windows)

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUTDOWN_S)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

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


def _launch(arguments: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


class Traffic:
    """Keeps a number of requests in flight: one that is complete is followed by another.

    `generate(number)` streams the sizes of the pieces of one request; a complete one has `max_tokens` in all.
    """

    def __init__(self, generate: Callable[[int], AsyncIterator[int]], *, max_tokens: int) -> None:
        self.arrivals: list[tuple[float, float, int]] = []
        """(time, time at which the same request got its tokens before these, tokens), in order of time."""
        self.num_done = self.num_lost = 0
        self._generate = generate
        self._max_tokens = max_tokens
        self._is_ending = False
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, num_requests: int) -> None:
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(num_requests)]

    async def end(self, timeout_s: float) -> None:
        """Start no more and wait for those in flight; what does not end in time is lost."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        self.num_lost += len(late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def summary(self, windows: Mapping[str, Sequence[Window]]) -> dict[str, Any]:
        """`windows`: undisturbed, pull, attest, until_commit (from the publication to the first pause), commit."""
        when, before, tokens = np.array(self.arrivals, dtype=float).reshape(-1, 3).T

        def inside(window: Window) -> Any:
            return (when > window[0]) & (when <= window[1])

        def per_second(name: str) -> float:
            seconds = sum(stop - start for start, stop in windows[name])
            return float(sum(tokens[inside(window)].sum() for window in windows[name])) / seconds if seconds else 0.0

        steps = np.concatenate([(when - before)[inside(window)] for window in windows["undisturbed"]])
        # The longest wait of any request for its next tokens, of those waits that touch the window.
        touching = ((when >= start) & (before <= stop) for start, stop in windows["commit"])
        gaps = [float((when - before)[touch].max(initial=0.0)) for touch in touching] or [0.0]
        rates = ("undisturbed", "pull", "attest", "until_commit")
        return {
            **{f"{name}_tokens_s": per_second(name) for name in rates},
            "median_step_s": float(np.median(steps)) if len(steps) else 0.0,
            "commit_gap_p50_s": statistics.median(gaps),
            "commit_gap_max_s": max(gaps),
            "requests_done": self.num_done,
            "requests_lost": self.num_lost,
        }

    async def _keep_one(self) -> None:
        """Consumes: nothing. Waits for: the tokens of one request at a time. Unblocked by: `end`."""
        while not self._is_ending:
            if await self._one_request(next(self._numbers)):
                self.num_done += 1
            else:
                self.num_lost += 1
                await asyncio.sleep(0.1)  # an engine that refuses must not be asked in a tight loop

    async def _one_request(self, number: int) -> bool:
        """Whether every token came."""
        total, before = 0, None
        try:
            async for size in self._generate(number):
                now = time.monotonic()
                if before is not None:
                    self.arrivals.append((now, before, size))
                total, before = total + size, now
        except Exception:  # noqa: BLE001 - whatever an engine raises, the request is lost; it is counted
            return False
        return total == self._max_tokens


def merged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for all replicas: rates and counts add up, times are those of the slowest."""
    return {
        name: (sum if name.endswith("_tokens_s") or name.startswith("requests_") else max)(s[name] for s in summaries)
        for name in summaries[0]
    }


def windows_of(replica: str, samples: Sequence[SyncSample]) -> dict[str, list[Window]]:
    """When the engine `replica` pulled, took digests and committed; and the times from a publication to the first
    commit, since while one replica commits others may wait for their turn, with nothing going on. A pull is reckoned
    from when the coordinator asked, so a message's way too early."""
    found: dict[str, list[Window]] = {name: [] for name in ("pull", "attest", "until_commit", "commit")}
    for sample in samples:
        begun = sample.published + sample.report.pin_s
        reports = [report for name, report in sample.pulls.items() if name.startswith(f"{replica}/")]
        pulled = [begun + report.pull_s for report in reports]
        found["pull"].append((begun, max(pulled)))
        found["attest"].append(
            (min(pulled), max(report.attest_s + at for report, at in zip(reports, pulled, strict=True)))
        )
        found["until_commit"].append((sample.published, min(started for started, _ in sample.commits.values())))
        found["commit"].append(sample.commits[replica])
    return found
