"""Command lines: every key with a good value, all with bad ones, every preset and option, and picked combinations."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

from tests.golden import seams
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.golden.seams import Key

GOOD_AT_ONCE, BAD_AT_ONCE = 4, 14
"""Keys of one command line: all problems are told together."""

CONTEXT = {
    "algorithm.kl.": "algorithm.kl.coef=0.1",
    "algorithm.correction.": "correction=tis",
    "algorithm.dual_clip": "algorithm=ppo",
    "algorithm.gae_": "algorithm=ppo",
    "algorithm.whiten": "algorithm=ppo",
    "algorithm.gdpo": "algorithm=gdpo",
    "algorithm.gpg": "algorithm=gpg",
    "algorithm.sapo": "algorithm=sapo",
    "algorithm.cov": "algorithm=clip_cov",
    "algorithm.dppo": "algorithm=dppo",
    "algorithm.dro": "algorithm=dro",
    "algorithm.overlong_penalty": "algorithm=dapo",
    "critic.": "algorithm=ppo",
    "model.lora.": "model.lora.rank=8",
    "task.agent_": "task.agent=rollout.agent.tools:tool_agent",
    "telemetry.wandb_": "telemetry.wandb=false",
    "learner.min_lr_ratio": "learner.lr_schedule=cosine",
}
"""What a key needs beside it, by the beginning of its name."""

PICKED = """
|algorithm=grpo mode=sync|mode=sync mode.max_staleness=1|mode.max_staleness=-1|mode=colocated|mode=one_step_off
mode=colocated learner.num_ranks=2 rollout.num_replicas=2|mode=colocated trainer.eval_blocking=false|learner.lrr=1e-4
lerner.lr=1e-4|lr=1e-4|learner.lr=fast|learner.lr=1e-4 learner.lr=2e-4|learner.lr|learner.lr= 1|--lr=1|algorithm=grop
mode=asyn|--config-name 7b|--config-name dapo_7B|--config-dir nowhere|tiny|--resume|--dryrun|-m seed=1,2|seed=1,2
hydra.run.dir=x|+seed=3|++seed=3|~seed|~algorithm.kl|+other.key=1|seed=1e3|seed=1.5|seed=null|seed=''
algorithm.normalize_by_std=off|algorithm.normalize_by_std=maybe|learner.compile=true|learner.compile=false
task.system_prompt='Say: [a], {b}'|rollout.stop='[END, "a,b"]'|rollout.stop='a\\n'|task.system_prompt='x\\n'
task.train_path=data.jsonl task.eval_path=data.jsonl|task.train_path=gone.jsonl|task.train_path=builtin:other
task.train_path=data.jsonl task.eval_path='' trainer.eval_every=0|task.reader=jsonl|task.reward.name=reward.py:score
task.reward.name=gone.py:score|task.reward.name=reward.py:no-name|task.reward.name=maths|task=gsm8k
task=math task.dedup=x|model.path=model|model.path=gone/model/x|model.path=reward.py|model.path=''
model.path=builtin:huge|model.path=org/name|model.path=model rollout.tensor_parallel_size=3
model.path=model rollout.max_response_tokens=4096|model.tokenizer_path=gone/|rollout.group_size=1
rollout.group_size=1 algorithm=reinforce mode=sync|algorithm=remax rollout.group_size=1
algorithm=ppo critic.path=gone/model/x|algorithm=ppo critic.shared_backbone=true critic.lr=1e-5
algorithm=ppo critic.shared_backbone=true|algorithm=ppo critic.value_clip=0.2|algorithm=grpo critic.lr=1e-5
--config-name ppo_7b algorithm=grpo device=cuda|--config-name ppo_7b algorithm=grpo critic.lr=1e-5 device=cuda
--config-name dapo_7b mode=sync device=cuda|--config-name grpo_7b mode=colocated device=cuda learner.num_ranks=4
--config-name gspo_7b device=cuda correction=tis|--config-name gspo_7b device=cuda learner.num_ranks=3
algorithm=gspo correction=tis|algorithm=gspo correction=tis algorithm.correction.level=sequence_mean
algorithm=dapo correction=decoupled|algorithm=dapo correction=a3po
algorithm=grpo correction=decoupled algorithm.loss=ppo_clip|algorithm=cispo correction=mis
algorithm.loss=importance_sampling algorithm.clip_ratio_low=0.1|algorithm.loss=importance_sampling
algorithm.correction.reject.upper=2|algorithm.correction.reject.lower=3 algorithm.correction.reject.upper=2
algorithm.correction.mask.metric=k1 algorithm.correction.mask.upper=-1|algorithm.correction.clamp.lower=0
algorithm.kl.coef=0.1 algorithm.kl.apply_to=advantage|algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward
algorithm.kl.coef=0.1 algorithm.kl.estimator=k1|algorithm.kl.coef=0.1 algorithm.kl.reference_model=gone/model/x
algorithm.kl.coef=0.1 algorithm.kl.apply_to=advantage algorithm.kl.estimator=k1|algorithm=opd
algorithm.kl.estimator=k2|algorithm.loss=my.module:loss|algorithm.loss=tests.nowhere.loss
algorithm.advantage_estimator=tests.nowhere.estimator|algorithm.loss_args.x=1|algorithm.group_filter=tests.nowhere.keep
algorithm.group_filter_args.x=1|rollout.engine_args.max_num_seqs=5|rollout.engine_args.gpu_memory_utilisation=0.5
rollout.engine_args.model=x|rollout.engine_args.block_size=16|rollout.max_concurrency=4|rollout.repack_below=3
rollout.load_report_s=1|trainer.stop_at_accuracy=0.9 task.eval_path=''
trainer.stop_at_accuracy=0.9 trainer.eval_every=0|trainer.stop_at_accuracy=2|trainer.eval_samples=4
trainer.eval_samples=4 trainer.eval_temperature=0.7|trainer.eval_top_p=0.5|task.eval_sets.hard.path=data.jsonl
task.eval_sets.hard.path=gone.jsonl|task.eval_sets.hard.num=1|task.eval_sets=hard
task.eval_sets.hard.path=data.jsonl task.eval_path=''|task.curriculum=easy|task.max_operand=9|task.reader=parquet
checkpoint.every_steps=50 checkpoint.keep_every=75|checkpoint.resume=nowhere|checkpoint.resume=never
checkpoint.resume=model|ray.address=auto|ray.address=''|ray.address=auto ray.num_cpus=4|ray.num_cpus=4
device=cpu learner.compile=true|device=npu|learner.lr_schedule=cosine learner.warmup_steps=100000
learner.max_tokens_per_micro_batch=10|learner.num_ranks=1000
learner.lr=-1 rollout.group_size=0 mode.max_staleness=x trainer.total_steps=0 seed=a|run_dir=model|run_dir=reward.py
model.lora.rank=12|model.lora.rank=8 model.lora.target_modules=q_proj,v_proj|model.lora.alpha=8|device.env.A=1
weight_sync.transport=carrier_pigeon|weight_sync.num_slots=1|weight_sync.num_slots=1 mode=sync|name=a/b|name=''
--cfg job|--cfg yaml|--nodes 8,8|--dry-run --nodes x|--dry-run --device-memory-gib 0|--response-tokens 5|--help me
"""
"""Divided by `|` and lines."""

TOGETHER = """
'device.env={"NOT A NAME": x}' task.train_path='' 'task.chat_template_kwargs={a: nan}' task.reward.name=zero
algorithm=ppo task.agent=my.agent:make task.agent_max_sequences=2 critic.warmup_steps=100000
algorithm=reinforce_pp algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward task.agent=a.b:c task.agent_max_sequences=2
algorithm=reinforce_pp trainer.groups_per_step=1 rollout.group_size=1
algorithm=gdpo 'algorithm.gdpo_weights={a: 0}' task.agent=a.b:c algorithm.dynamic_sampling=true
algorithm=gpg algorithm.overlong_buffer_tokens=8 task.agent=a.b:c
algorithm=reinforce mode=sync algorithm.dynamic_sampling=true rollout.group_size=1
algorithm=reinforce mode=sync algorithm.dynamic_sampling=true
algorithm=dapo algorithm.overlong_penalty=0 algorithm.overlong_buffer_tokens=100000
algorithm=clip_cov algorithm.cov_min=5 algorithm.cov_max=5 checkpoint.every_steps=0 checkpoint.keep_every=5
algorithm=clip_cov algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward
correction=a3po mode=sync
algorithm=dppo algorithm.correction.objective=decoupled
algorithm=dppo correction=tis
algorithm=cispo correction=tis
algorithm.correction.mask.metric=k2 algorithm.correction.mask.lower=-1 algorithm.correction.mask.upper=2
algorithm.correction.mask.lower=0.2 algorithm.correction.mask.upper=4 algorithm.correction.clamp.upper=5
algorithm.correction.mask.lower=0.2 algorithm.correction.mask.upper=4 algorithm.correction.clamp.lower=0.1
model.lora.rank=8 model.path=org/name algorithm.kl.coef=0.1 learner.reference_cpu_offload=true
algorithm=dapo algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward algorithm.kl.estimator=k3_straight_through
algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward algorithm.mask_truncated=true
algorithm.advantage_estimator=zero algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward
algorithm=gdpo algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward
algorithm=gpg algorithm.kl.coef=0.1 algorithm.kl.apply_to=reward
task.pass_rate_min=0.6 task.pass_rate_max=0.7 rollout.group_size=2 task.curriculum=easy_to_hard
task.pass_rate_min=0.7 task.pass_rate_max=0.6
'rollout.engine_args={max_num_batched_tokens: 1, distributed_executor_backend: ray}'
trainer.eval_every=0 trainer.eval_at_start=false trainer.eval_blocking=true
trainer.eval_temperature=1e-9 trainer.eval_pass_k=5 trainer.eval_timeout_s=1
'task.eval_sets={hard: {path: data.jsonl}}' trainer.eval_every=0 trainer.eval_at_start=false trainer.eval_at_end=false
'task.eval_sets={"a b": {path: data.jsonl}, hard: {path: data.jsonl, samples: 2}}'
'task.eval_sets={hard: {path: data.jsonl, samples: 1}}' trainer.eval_pass_k=2 trainer.eval_samples=2
mode=colocated weight_sync.commit=staged weight_sync.transport=nccl learner.num_ranks=3
mode=colocated learner.num_ranks=1 rollout.num_replicas=1
rollout.concurrency=adaptive rollout.min_concurrency=600
rollout.max_concurrency=100000 'rollout.stop=[""]' 'rollout.stop_token_ids=[-1]'
rollout.max_concurrency=1 rollout.num_workers=4
rollout.repack_below=4 rollout.per_request_seed=true
rollout.repack_below=4 rollout.num_replicas=2 rollout.per_request_seed=false
algorithm=ppo critic.path=builtin:huge model.tokenizer_path=./gone
algorithm=ppo critic.path=model rollout.max_response_tokens=4096
model.path=broken
model.path=model rollout.tensor_parallel_size=4
--config-dir . --config-name mine
--config-dir . --config-name mine mode=sync
--config-dir . --config-name mine +mode=sync
--config-dir . --config-name mine +correction=tis
--config-dir . --config-name whole
--config-dir . --config-name whole algorithm=ppo
--config-dir . --config-name whole algorithm.clip_ratio_low=0.1
--config-dir . --config-name unreadable
--config-name ./mine.yaml
--config-name dapo_7b device=cpu
--config-name dapo_7b device=cpu learner.compile=true
seed=[1
rollout.stop=[a
other=[1
--dry-run --nodes 8,8
"""
"""Lines of several keys whose checks need each other, so that every check has something to say at least once."""


def cases() -> Mapping[str, Any]:
    """Command line -> its words."""
    lines = [*presets(), *options(), *good(), *bad(), *picked()]
    return {name: shlex.split(name) for name in dict.fromkeys(map(shlex.join, lines))}


def presets() -> Iterator[list[str]]:
    for name in seams.config_names():
        yield ["--config-name", name]
        yield ["--config-name", name, "device=cuda"]


def options() -> Iterator[list[str]]:
    for group, names in seams.config_groups().items():
        yield from ([f"{group}={name}"] for name in names)


def good() -> Iterator[list[str]]:
    """Every key, with a value of its type that is not its default; a few that need the same beside them at once."""
    together: dict[str, list[str]] = {}
    for key in seams.config_keys():
        context = next((words for begin, words in CONTEXT.items() if key.path.startswith(begin)), "")
        together.setdefault(context, []).append(f"{key.path}={good_value(key)}")
    for context, words in together.items():
        for chunk in batched(words, GOOD_AT_ONCE):
            yield [*context.split(), *chunk]


def bad() -> Iterator[list[str]]:
    """Many keys at once: values of another type, then out of bounds, then null."""
    keys = seams.config_keys()
    for values in (wrong_type, out_of_bounds, lambda _key: "null"):
        words = [f"{key.path}={value}" for key in keys if (value := values(key)) is not None]
        yield from map(list, batched(words, BAD_AT_ONCE))


def batched(words: Sequence[str], size: int) -> list[Sequence[str]]:
    return [words[first : first + size] for first in range(0, len(words), size)]


def picked() -> Iterable[list[str]]:
    divided = [line for lines in PICKED.strip("\n").splitlines() for line in lines.split("|")]
    return map(shlex.split, [*divided, *TOGETHER.strip().splitlines()])


def good_value(key: Key) -> str:
    kind = key.kind.removesuffix(" or null")
    if kind.startswith("one of "):
        words = kind.removeprefix("one of ").removesuffix(", or the dotted path of your own function").split(", ")
        return next(word for word in words if word != str(key.default))
    if kind == "true or false":
        return str(not key.default).lower()
    if kind in ("integer", "number"):
        return _number(key, is_whole=kind == "integer")
    simple = {"text": "other", "anything": "7", "map of name to text": "{a: b}", "map of name to section": "{}"}
    if kind.startswith("list of "):
        return "[a, b]" if kind.endswith("text") else "[3, 4]"
    return simple.get(kind, "{a: 1}")


def _number(key: Key, *, is_whole: bool) -> str:
    default = key.default if isinstance(key.default, int | float) else 0
    for value in (default + 1, 2 * default, default / 2, default - 1, 1, 2, 0.5, 0.25, 1.5):
        if value != default and _fits(value, key.bounds) and (not is_whole or value == int(value)):
            return str(int(value) if is_whole else float(value))
    raise AssertionError(f"no number fits {key}")


def _fits(value: float, bounds: Mapping[str, float]) -> bool:
    rules = {"ge": value >= bounds.get("ge", value), "le": value <= bounds.get("le", value)}
    return all(rules.values()) and value > bounds.get("gt", value - 1) and value < bounds.get("lt", value + 1)


def wrong_type(key: Key) -> str | None:
    kind = key.kind.removesuffix(" or null")
    if kind in ("text", "anything"):
        return None
    return "1.5" if kind == "integer" else "7" if re.match("map|list", kind) else "nonsense"


def out_of_bounds(key: Key) -> str | None:
    whole = key.kind.startswith("integer")
    outside = {name: limit + {"ge": -1, "gt": 0, "le": 1, "lt": 0}[name] for name, limit in key.bounds.items()}
    return next((str(int(value) if whole else float(value)) for value in outside.values()), None)


def play(argv: list[str], folder: Path) -> Any:
    seams.write_inputs(folder)
    return json.loads(json.dumps(seams.composed(argv)).replace(str(folder.resolve()), "HERE"))


ARGV = Part(name="argv", cases=cases, play=play, input_of=shlex.split)
