"""Starts vLLM's processes, waits for them, and ends them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import psutil

from rollout.engine.vllm_config import engine_config, known_end_tokens, stat_logger
from rollout.fork_server import ForkContext
from rollout.processes import is_running
from rollout.rendering import load_tokenizer
from weight_sync.vllm import compat as vllm_compat

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.interface import EngineSpec
    from rollout.engine.load_meter import LoadMeter


log = logging.getLogger(__name__)

_END_TIMEOUT_S = 30.0
"""Of a process that was killed. It ends when its current call to the device does."""
_END_POLL_S = 0.05


def launch(spec: EngineSpec, meter: LoadMeter) -> tuple[AsyncLLM, list[int], Any]:
    """Import vLLM and start its processes (blocking). The engine, the tokens that end a response, and the tokenizer of
    `spec`, if any, which finds stop strings in front of the engine. `meter` gets the load of every step, with
    `spec.reports_load`."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.vllm_scheduler import receive_step_logprobs, send_step_logprobs

    vllm_compat.check_vllm_version()
    vllm_compat.start_engines_in(ForkContext() if spec.forks else None)
    config = engine_config(spec)
    send_step_logprobs(config)
    stop = set(spec.stop_token_ids)
    found = config.model_config.try_get_generation_config().get("eos_token_id")
    if found is not None:
        stop.update([found] if isinstance(found, int) else found)
    tokenizer: Any = None
    if spec.tokenizer:
        tokenizer = load_tokenizer(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
        stop.update(set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id})
    listeners: list[Any] | None = [stat_logger(meter)] if spec.reports_load else None
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=listeners)
    llm.output_processor.tokenizer = tokenizer
    receive_step_logprobs(llm)
    return llm, known_end_tokens(stop, config.model_config.get_vocab_size()), tokenizer


def engine_pids(llm: AsyncLLM) -> list[int]:
    """vLLM's engine process and all below it: the workers of tensor parallelism hold the devices. Call it while the
    engine runs: processes that outlive it get another parent."""
    return [process.pid for process in _process_tree(_processes(llm))]


def shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes and wait until they are gone (blocking). Logs an error if one is not. vLLM does not wait
    for a process that it had to kill: its memory is not free yet, and its entry in the table of processes stays."""
    processes = _processes(llm)
    tree = _process_tree(processes)
    llm.shutdown()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    while (left := [process.pid for process in tree if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(_END_POLL_S)
    if left:
        text = "engine processes %s still run %.0f s after they were killed; their device memory is not free"
        log.error(text, left, _END_TIMEOUT_S)


def _processes(llm: AsyncLLM) -> list[Any]:
    manager: Any = llm.engine_core.resources.engine_manager
    return list(getattr(manager, "processes", ()))


def _process_tree(processes: list[Any]) -> list[psutil.Process]:
    tree: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(process.pid)
            tree += [engine, *engine.children(recursive=True)]
    return tree
