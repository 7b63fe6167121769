"""`rollout`: engines, sampling and the workers that drive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    group_size: int = key(8, "Samples per prompt.", ge=1)
    num_replicas: int = key(1, "Independent engines.", ge=1)
    tensor_parallel_size: int = key(1, "Devices per engine.", ge=1)
    num_workers: int = key(1, "Rollout worker processes (CPU) that drive the engines and run rewards.", ge=1)
    temperature: float = key(
        1.0, "Sampling temperature of training rollouts, in the range in which vLLM takes it as it is.", ge=0.01, le=2
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling of training rollouts. Below 1 equal weights have a ratio of learner to engine below 1, so "
        "only `algorithm.loss=importance_sampling`, or a loss of your own, takes it.",
        gt=0,
        le=1,
    )
    top_k: int = key(
        0, "Top-k sampling of training rollouts; 0 keeps the whole vocabulary. What holds for `top_p` holds here.", ge=0
    )
    seed_requests: bool | None = key(
        None,
        "Whether every request has a seed of its own, which a run that is to repeat itself needs and which costs an "
        "engine some speed; otherwise the engines draw from `seed` in the order of their work. null is true with "
        "`mode.max_staleness=0` and false above, where timing decides what is trained.",
    )
    stop_token_ids: list[int] = key(
        factory=list,
        doc="Tokens that end an answer, beside the end tokens of the model's generation config and of the tokenizer. "
        "Like these they are part of the answer and trained. Evaluation uses them too.",
    )
    stop: list[str] = key(
        factory=list,
        doc="Texts that end an answer, with the token that completes one of them; special tokens spelled out. Their "
        "tokens are part of the answer and trained. Evaluation uses them too, and agent loops may ask for others.",
    )
    max_response_tokens: int = key(1024, "Longest answer, in tokens.", ge=1)
    max_model_len: int = key(0, "Engine context length; 0 means prompt plus response limits.", ge=0)
    max_num_seqs: int = key(256, "Most sequences an engine runs at once.", ge=1)
    concurrency: Literal["fixed", "adaptive"] = key(
        "fixed",
        "How many requests an engine has at once; the others wait, the oldest group first, and go where room is first. "
        "`fixed`: `max_concurrency`. `adaptive`: between `min_concurrency` and `max_concurrency`, fewer while the "
        "engine preempts or fills its KV cache, more while it has room.",
    )
    min_concurrency: int = key(1, "Fewest requests of an engine at once, with `concurrency=adaptive`.", ge=1)
    max_concurrency: int | None = key(
        None,
        "Most requests of an engine at once; null is `max_num_seqs` with `concurrency=adaptive`, and no limit with "
        "`fixed`. Shared out evenly over the rollout workers.",
        ge=1,
    )
    report_load: bool = key(
        False,
        "Engines report the use of their KV cache, preemptions and what waits inside them (`engine/kv_usage_frac/*`, "
        "`engine/preemptions/*`, `engine/waiting/*`), which costs their front end some time in every step. "
        "`concurrency=adaptive` always needs it.",
    )
    repack_below: int | None = key(
        None,
        "When nothing waits to be sent, an engine with fewer requests than this hands them over to fuller ones that "
        "have room for all of them, and stays empty until there is a new group. Prompt and tokens so far are computed "
        "again. null never moves a request.",
        ge=2,
    )
    gpu_memory_utilization: float = key(0.85, "Share of device memory for an engine (accelerators).", gt=0, le=1)
    kv_cache_gib: float = key(1.0, "KV cache of an engine on `cpu`, GiB.", gt=0)
    enforce_eager: bool = key(False, "Never capture device graphs.")
    stream_tokens: int = key(
        64,
        "Tokens per streamed chunk; a dead engine loses at most one chunk, and a live one gives a sign of life with "
        "each, which must take much less than silence_timeout_s.",
        ge=1,
        le=1024,
    )
    request_timeout_s: float = key(
        600.0,
        "Longest time the answers of a group may take to generate (with `task.agent`: one turn of them), waits for "
        "room and moves to other engines included; those that are not done then have failed.",
        gt=0,
    )
    max_retries: int = key(2, "Retries of a prompt whose group failed, before it is dropped and counted.", ge=0)
    max_engine_restarts: int = key(
        3,
        "Times that a lost engine is started again while the run trains; 0 leaves it out for good. An hour without a "
        "loss gives it all of them back.",
        ge=0,
    )
    max_worker_restarts: int = key(
        3,
        "Times that each lost rollout worker is started again; one that has lived for an hour since has all of them "
        "again. While the run trains, it fails when no worker is left.",
        ge=0,
    )
    silence_timeout_s: float = key(
        120.0,
        "An engine that answers nothing for so long is lost, and so is one that has requests and gives no token, "
        "unless it is paused or asleep; a rollout worker is lost after half of it. What is lost is ended and started "
        "again.",
        gt=0,
    )
    engine_args: dict[str, Any] = key(
        factory=dict,
        doc="Further vLLM engine arguments, passed as they are. Refused are those that have a key of their own, and "
        "those that weight sync and log-probs rely on.",
    )
