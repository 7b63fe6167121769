"""Tandem's engine settings as vLLM's: arguments, environment, sampling, end tokens, and the logger of its load."""

from __future__ import annotations

import copy
import functools
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weight_sync.vllm.compat import engine_lora_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from vllm.config import VllmConfig

    from rollout.engine.interface import EngineSpec
    from rollout.engine.load_meter import LoadMeter
    from rollout.types import SamplingParams


log = logging.getLogger(__name__)

_GIB = 1 << 30


def engine_args(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments for vLLM's `AsyncEngineArgs`; `spec.engine_args` wins."""
    args: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "seed": spec.seed,
        "trust_remote_code": spec.trust_remote_code,
        # Token-in, token-out: no tokenizer is loaded, stop tokens are given with each request.
        "skip_tokenizer_init": True,
        # Log-probs of the distribution that was sampled from, after temperature.
        "logprobs_mode": "processed_logprobs",
        # One output per chunk instead of one per step: the event loop wakes stream_interval times less often.
        "stream_interval": spec.stream_interval,
        "disable_log_stats": True,
    }
    if spec.float32_head:
        args["hf_overrides"] = {"head_dtype": "float32"}
    if spec.sleep_level:
        args["enable_sleep_mode"] = True
    if spec.extension:
        args["worker_extension_cls"] = spec.extension
    if spec.lora_rank:  # one adapter, the policy, in one slot that weight sync writes in place
        args |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        args |= {"max_lora_rank": engine_lora_rank(spec.lora_rank), "lora_target_modules": list(spec.lora_targets)}
    if spec.tensor_parallel_size > 1:
        # Within a placement group, which a run on a shared cluster has, vLLM would make Ray actors of its workers.
        args["distributed_executor_backend"] = "mp"
    elif spec.device == "cpu":
        # The worker lives in the engine's own process: one interpreter, one import and one hop per step less.
        args["distributed_executor_backend"] = "uni"
    if spec.device != "cpu":
        args["gpu_memory_utilization"] = spec.gpu_memory_utilization
    if spec.device == "cpu" or spec.kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int((1.0 if spec.kv_cache_gib is None else spec.kv_cache_gib) * _GIB)
    return {**args, **spec.engine_args}


def process_env(spec: EngineSpec) -> dict[str, str]:
    """What an engine wants. A variable that is already set wins."""
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.device == "cpu":
        # No third-party plugin is imported in every process. (Elsewhere the platform itself may be a plugin.)
        env["VLLM_PLUGINS"] = ""
        env["OMP_NUM_THREADS"] = str(spec.num_threads)
        if spec.tensor_parallel_size == 1:
            # The CPU platform turns "uni" back into a worker process unless this is off (it manages OpenMP per
            # process); AsyncLLM's engine process does not depend on it. OMP_NUM_THREADS above does that job.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:
            first = range(0, spec.tensor_parallel_size * spec.num_threads, spec.num_threads)
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(core) if spec.num_threads == 1 else f"{core}-{core + spec.num_threads - 1}" for core in first
            )
        if spec.enforce_eager:
            # In eager mode vLLM still compiles one tiny function of the sampler, with a C++ compiler, at the first
            # request: 2-16 s for a comparison and a sum.
            env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def engine_environ(spec: EngineSpec) -> dict[str, str]:
    """All of the environment of an engine that this process starts now."""
    return {**process_env(spec), **os.environ, **spec.env}


def out_of_vocabulary(token_ids: np.ndarray, vocab_size: int) -> int | None:
    """Of `token_ids` (int[T]) the one furthest above [0, vocab_size), or else below it; None if all are inside."""
    highest, lowest = int(token_ids.max(initial=0)), int(token_ids.min(initial=0))
    return highest if highest >= vocab_size else lowest if lowest < 0 else None


def check_token_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError unless these are integers of the vocabulary in one row (int[T])."""
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"token ids must be integers in one row, got {token_ids.dtype} of shape {token_ids.shape}; an agent loop "
            "must give generate() an int32[T]"
        )
    token = out_of_vocabulary(token_ids, vocab_size)
    if token is not None:
        raise ValueError(
            f"prompt has token id {token}, must be >= 0 and < {vocab_size}, the vocabulary of the model; use the "
            "model's own tokenizer (an agent must too), or resize the embedding of the model"
        )


def engine_config(spec: EngineSpec) -> VllmConfig:
    """vLLM's configuration of the engine, on the device of this process.

    As neither vLLM's server nor its offline class, a step holds 2048 tokens on every device, as in all figures of
    docs/benchmarks.md. With its server's up to 8192, decoding requests and commits would wait longer for the prefills
    of others, and less memory would be left for the KV cache.
    """
    from vllm.config import SchedulerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = AsyncEngineArgs(**engine_args(spec))
    if args.max_num_batched_tokens is None and spec.max_num_seqs > SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS:
        args.max_num_batched_tokens = spec.max_num_seqs  # vLLM refuses fewer: a decoding step holds a token of each
    return args.create_engine_config(UsageContext.ENGINE_CONTEXT)


def known_end_tokens(stop: set[int], vocab_size: int) -> list[int]:
    """Without those outside the vocabulary: no response ends there, and vLLM 0.32 refuses requests with them."""
    if unknown := sorted(token for token in stop if not 0 <= token < vocab_size):
        log.warning(
            "end tokens %s are not in the model's vocabulary of %d: no response ends there", unknown, vocab_size
        )
    return sorted(stop.difference(unknown))


def vllm_sampling(params: SamplingParams, stop_token_ids: Sequence[int]) -> Any:
    """vLLM's sampling parameters for one request. Its checks of the values are a third of the work that starts one, so
    requests that differ only in seed and length are checked once. The copies share the set of end tokens, to which vLLM
    adds those of the model."""
    common = replace(params, seed=None, max_tokens=1, num_prefix_tokens=0)
    made = copy.copy(_checked_sampling(common, tuple(stop_token_ids)))
    made.seed, made.max_tokens = params.seed, params.max_tokens
    return made


@functools.lru_cache(maxsize=256)
def _checked_sampling(params: SamplingParams, stop_token_ids: tuple[int, ...]) -> Any:
    """Text is decoded only where there are stop strings, and of every token, so that the response has them all."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    return VllmParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        ignore_eos=params.ignore_eos,
        stop_token_ids=None if params.ignore_eos else list(stop_token_ids),
        stop=list(params.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # of an object that has one request
    )


def stat_logger(meter: LoadMeter) -> type:
    """A logger class for vLLM that forwards to `meter`. It is one for Prometheus in name: without one of that class
    vLLM adds its own, which costs more per step than everything else."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def ignore(*_: Any, **__: Any) -> None: ...

    class Listener(PrometheusStatLogger):
        __init__ = ignore  # no metric is registered
        log_engine_initialized = log = record_sleep_state = record_admission_rejection = ignore

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            meter.record(scheduler_stats, iteration_stats)

    return Listener
