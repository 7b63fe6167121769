"""Engine arguments that a run sets itself, or stands on. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig

_OWN_KEYS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.rollout_dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",  # an engine is given so many devices and no more
    "prefill_context_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.num_replicas",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "stream_interval": "rollout.stream_tokens",
    "seed": "seed",
    "enable_sleep_mode": "mode.name",
    **dict.fromkeys(("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"), "model.lora.rank"),
    "lora_target_modules": "model.lora.target_modules",
}
"""What has a key of its own: setting it twice would leave the rest of a run with the other value."""
_RELIED_ON = {
    "logprobs_mode": "off-policy correction needs the log-probs of the distribution that tokens are sampled from",
    "worker_extension_cls": "weight sync lives in it",
    "skip_tokenizer_init": "engines take and give tokens; text is made of them elsewhere",
    "load_format": "the first weights come by weight sync, or from files where that does not bring them",
    "disable_log_stats": "the load of engines is measured in its place",
    "enable_eplb": "weight sync writes every expert where it lay at the start, and it would move them",
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path"),
        "the learner would not hear of it, and both must compute the same model; change the model's config.json",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        "off-policy correction needs tokens that are sampled from the distribution that the learner computes",
    ),
}
REFUSED = {**{name: f"is set by {key}" for name, key in _OWN_KEYS.items()}, **_RELIED_ON}
"""Engine argument -> why it is not for `rollout.engine_args`."""
_EXECUTORS = ("mp", "uni")


def engine_args_problems(config: RunConfig) -> Iterator[Problem]:
    """One for each argument that is ours to set, or that breaks what a run stands on."""
    tokens, most = config.rollout.engine_args.get("max_num_batched_tokens"), config.rollout.max_num_seqs
    if isinstance(tokens, int) and tokens < most:
        yield Problem(
            key="rollout.engine_args",
            got=f"max_num_batched_tokens: {tokens}",
            allowed=f"max_num_batched_tokens must be at least rollout.max_num_seqs={most}: a step has a token of each",
            do="raise it, or leave it out",
            also=("rollout.max_num_seqs",),
        )
    for name, value in config.rollout.engine_args.items():
        if name == "distributed_executor_backend" and value not in _EXECUTORS:
            yield Problem(
                key="rollout.engine_args",
                got=f"{name}: {value}",
                allowed=f"{name} must be one of {', '.join(_EXECUTORS)}: an engine's workers are processes of its host",
                do="leave it out",
            )
        if name not in REFUSED:
            continue
        instead = _OWN_KEYS.get(name)
        yield Problem(
            key="rollout.engine_args",
            got=f"{name}: {value}",
            allowed=f"must not hold {name}: {REFUSED[name]}" if instead is None else f"{name} {REFUSED[name]}",
            do="leave it out" if instead is None else f"use {instead}",
            also=() if instead is None else (instead,),
        )
