"""Workloads and cases of the benchmark, the agent that plays them, and options.

Lengths of responses are drawn from a seed and the prompt's number and written into the data set, so they cannot depend
on the mode, the engine or the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import string
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError
from trainer.builtin.tiny_model import build_tokenizer
from weight_sync.bench.shapes import MODELS, Architecture, architecture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollout.agent.loop import AgentLoop, Generate
    from rollout.types import Prompt, Trajectory


LENGTH_COLUMN = "response_tokens"
"""Column of the data set: tokens of each response to this prompt."""
NUM_PROMPTS = 4096
"""Rows of the data set; a run that needs more begins again."""
TINY_SHAPE = Architecture(
    name="tiny", model_type="qwen2", hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate=128, vocab=128,
    has_qkv_bias=True, max_positions=4096,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's work. Lengths have a Pareto distribution of shape 1, cut at `max_response_tokens`."""

    name: str
    shape: str
    """Of the model: a name in `weight_sync.bench.shapes`, or "tiny"."""
    dtype: str
    prompt_tokens: int
    min_response_tokens: int
    max_response_tokens: int
    groups_per_step: int
    group_size: int
    micro_batch_tokens: int
    activation_checkpointing: bool
    seed: int = 1
    lengths_per: str = "response"
    """Figures that lack it were measured with one length for all responses to a prompt, which is easier."""

    def lengths_of(self, index: int) -> list[int]:
        """Tokens of each response to prompt number `index`."""
        uniform = np.random.default_rng([self.seed, index]).random(self.group_size)  # [0, 1): 1 - uniform is never 0
        drawn = (self.min_response_tokens / (1.0 - uniform)).astype(np.int64)
        return [int(length) for length in np.minimum(drawn, self.max_response_tokens)]

    def lengths(self, num_prompts: int) -> list[int]:
        """Of all responses to the first `num_prompts` prompts, which repeat after `NUM_PROMPTS`."""
        return [length for index in range(num_prompts) for length in self.lengths_of(index % NUM_PROMPTS)]

    def architecture(self) -> Architecture:
        """Raises ValueError if there is no such shape."""
        return TINY_SHAPE if self.shape == TINY_SHAPE.name else architecture(self.shape)


_W1 = Workload(
    name="w1", shape="qwen2.5-7b", dtype="bfloat16", prompt_tokens=512, min_response_tokens=256,
    max_response_tokens=4096, groups_per_step=32, group_size=8, micro_batch_tokens=16384,
    # Without it, the activations of 16,384 tokens of this shape alone take more than 100 GiB.
    activation_checkpointing=True,
)  # fmt: skip
WORKLOADS = {
    "w1": _W1,
    "w1-heavy": replace(_W1, name="w1-heavy", max_response_tokens=16384, micro_batch_tokens=512 + 16384),
    "uniform": replace(_W1, name="uniform", max_response_tokens=256),
}


def workload(name: str, *, is_tiny: bool, shape: str = _W1.shape) -> Workload:
    """
    Args:
        is_tiny: the same distribution scaled down, for a model that trains on a CPU: shows that it works, not how fast.
        shape: another model for the same prompts and lengths; a tiny workload has its own.

    Raises:
        ValueError: no such workload or shape.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    chosen = WORKLOADS[name]
    if not is_tiny:
        named = name if shape == _W1.shape else f"{name} ({shape})"
        return replace(chosen, name=named, shape=architecture(shape).name)
    longest = chosen.max_response_tokens // 32
    return Workload(
        name=f"{name} (tiny)", shape=TINY_SHAPE.name, dtype="float32", prompt_tokens=16, min_response_tokens=8,
        max_response_tokens=longest, groups_per_step=8, group_size=4, micro_batch_tokens=max(1024, 16 + longest),
        activation_checkpointing=False,
    )  # fmt: skip


def write_inputs(work: Workload, folder: Path) -> tuple[Path, Path]:
    """(model directory without weights, data set) in `folder`, written again."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    # No end token anywhere: nothing but its budget ends a response.
    config = {**work.architecture().config(work.dtype), "bos_token_id": None, "eos_token_id": None}
    (model / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    with prompts.open("w", encoding="utf-8") as file:
        for index in range(NUM_PROMPTS):
            # A character per token. No two prompts begin alike, so that a prefix cache helps within a group only.
            letters = np.random.default_rng([work.seed, index, 1]).choice(
                list(string.ascii_letters), work.prompt_tokens
            )
            text = f"{index:06d}"[: work.prompt_tokens] + "".join(letters[6:])
            file.write(json.dumps({"prompt": text, "answer": "", LENGTH_COLUMN: work.lengths_of(index)}) + "\n")
    return model, prompts


def forced_lengths(*, column: str = "response_tokens") -> AgentLoop:
    """The factory for `task.agent`; `column` of the data set has the number of tokens of each response: a list, or one
    number for all."""
    return _ForcedLengths(column)


class _ForcedLengths:
    def __init__(self, column: str) -> None:
        self._column = column
        self._num_begun: Counter[str] = Counter()
        """By prompt. The responses of a group begin one after the other in one worker, so each has its own length."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        """Exactly so many tokens: an end token does not end the response, it continues after it.

        Rewarded with a number that depends on the sampled tokens alone and differs between responses, so that
        advantages are not all 0.

        Raises:
            AgentError: the column does not hold a length that fits.
        """
        given = prompt.metadata.get(self._column)
        lengths = given if isinstance(given, list | tuple) and given else [given]
        wanted = lengths[self._num_begun[prompt.prompt_id] % len(lengths)]
        self._num_begun[prompt.prompt_id] += 1
        if not isinstance(wanted, int) or not 1 <= wanted <= max_tokens:
            raise AgentError(f"column {self._column!r} must hold 1 to {max_tokens} tokens, got {wanted!r}")
        builder = TrajectoryBuilder(prompt.token_ids)
        while (left := wanted - builder.num_response_tokens) > 0:
            completion = await generate(builder.token_ids(), left)
            builder.add_generated(completion)
            if completion.finish_reason == "abort":
                return builder.finish("failed")
        response = builder.token_ids()[len(prompt.token_ids) :]
        builder.add_reward(zlib.crc32(response.tobytes()) % 1000 / 999)
        return builder.finish("completed")


def run_config(work: Workload, model: Path, prompts: Path) -> dict[str, Any]:
    """For `python -m trainer --config-dir`; a case adds its devices."""
    dtypes = {"rollout_dtype": work.dtype, "compute_dtype": work.dtype}
    long_s = 3600.0  # the benchmark has its own deadline
    return {
        "defaults": [{"device": "auto"}, {"algorithm": "grpo"}, {"correction": "none"}, {"mode": "async"}, "_self_"],
        "name": "bench",
        "model": {"path": str(model), **dtypes},
        "task": {
            "name": work.name,
            "train_path": str(prompts),
            "eval_path": "",
            "max_prompt_tokens": work.prompt_tokens,
            "overlong_prompts": "error",
            "shuffle": False,
            "agent": f"{__name__}.forced_lengths",
            "agent_timeout_s": long_s,
            "reward": {"name": "zero"},
        },
        "rollout": {
            "group_size": work.group_size,
            "max_response_tokens": work.max_response_tokens,
            "request_timeout_s": long_s,
            "enforce_eager": work.shape == TINY_SHAPE.name,
            "kv_cache_gib": 0.25,
        },
        "learner": {
            "max_tokens_per_micro_batch": work.micro_batch_tokens,
            "activation_checkpointing": work.activation_checkpointing,
        },
        "trainer": {
            "groups_per_step": work.groups_per_step,
            "eval_every": 0,
            "eval_at_start": False,
            "eval_at_end": False,
        },
        "checkpoint": {"every_steps": 0, "save_at_end": False, "export_hf": False},
        "telemetry": {"progress": "plain", "tensorboard": False},
    }


def attention_tokens(work: Workload, num_prompts: int) -> float:
    """Mean length of a token's sequence, of the first `num_prompts`: sum of squares over sum, prompts included."""
    whole = np.array(work.lengths(num_prompts), np.float64) + work.prompt_tokens
    return float((whole**2).sum() / whole.sum())


Mode = Literal["async", "sync", "colocated"]
STALENESS: dict[Mode, int] = {"async": 1, "sync": 0, "colocated": 0}
"""Default `mode.max_staleness`."""
STALENESS_KEY, STEPS_KEY, MODEL_KEY = "mode.max_staleness", "trainer.total_steps", "model.path"
_SET_OTHERWISE = {
    STEPS_KEY: "is --warmup + --steps + S; give --steps N for N steps that count",
    **dict.fromkeys(("mode", "mode.name"), "is the MODE of --case MODE:SPLIT"),
    **dict.fromkeys(("learner.num_ranks", "rollout.num_replicas"), "follows from the SPLIT of --case MODE:SPLIT"),
    "rollout.tensor_parallel_size": "is --tp",
    **dict.fromkeys(("learner.updates_per_batch", "learner.num_mini_batches"), "is 1: figures are of one pass"),
    **dict.fromkeys(("trainer.groups_per_step", "rollout.group_size"), "is the workload's, which the figures rely on"),
    "device": "is --device",
    "run_dir": "is the benchmark's own",
}
"""Key -> why `--set` must not set it."""
MAX_SEQUENCES = 512
"""Limit of concurrent responses of an engine, unless a case has another."""
_SPEC = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<mode>\w+):(?P<split>.+)")


class InvalidCase(ValueError):
    """A case on the command line makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    mode: Mode
    num_ranks: int
    num_replicas: int
    tensor_parallel_size: int
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, which win over what the benchmark sets."""

    @property
    def num_devices(self) -> int:
        engines = self.num_replicas * self.tensor_parallel_size
        return max(self.num_ranks, engines) if self.mode == "colocated" else self.num_ranks + engines

    @property
    def max_staleness(self) -> int:
        given = [text.partition("=")[2] for text in self.overrides if _key(text) == STALENESS_KEY]
        return int(given[-1]) if given else STALENESS[self.mode]

    @property
    def has_own_model(self) -> bool:
        """Weights and shape are not the workload's."""
        return any(_key(text) == MODEL_KEY for text in self.overrides)


def parse_case(text: str, *, tensor_parallel_size: int) -> Case:
    """`[NAME=]MODE:SPLIT`, where SPLIT is LEARNERS+ENGINES in devices, or for colocated the devices of both; without
    NAME it is called "async 2+2". Raises InvalidCase."""
    found = _SPEC.fullmatch(text)
    if found is None or found["mode"] not in STALENESS:
        modes = ", ".join(STALENESS)
        raise InvalidCase(
            f"case {text!r} must be [NAME=]MODE:SPLIT with MODE one of {modes}, e.g. async:2+2, colocated:4"
        )
    mode: Mode = found["mode"]  # pyright: ignore[reportAssignmentType]
    devices, is_shared = found["split"].split("+"), mode == "colocated"
    if len(devices) != (1 if is_shared else 2) or not all(part.isdecimal() and int(part) > 0 for part in devices):
        form = "the number of devices, e.g. 4" if is_shared else "LEARNERS+ENGINES, e.g. 2+2"
        raise InvalidCase(f"case {text!r}: the split of mode {mode} must be {form}")
    engines = int(devices[-1])
    if engines % tensor_parallel_size:
        raise InvalidCase(f"case {text!r}: {engines} engine devices do not divide into engines of --tp devices each")
    return Case(
        name=found["name"] if found["name"] else f"{mode} {found['split']}",
        mode=mode,
        num_ranks=int(devices[0]),
        num_replicas=engines // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
    )


def with_overrides(cases: Sequence[Case], settings: Sequence[str]) -> list[Case]:
    """The cases with their settings `WHICH:KEY=VALUE`; WHICH is a mode, a case, or `all`. Raises InvalidCase."""
    names = [case.name for case in cases]
    if double := {name for name in names if names.count(name) > 1}:
        raise InvalidCase(
            f"two cases are called {', '.join(sorted(double))}; give one a name of its own: NAME=MODE:SPLIT"
        )
    found: dict[str, list[str]] = {name: [] for name in names}
    for setting in settings:
        which, colon, override = setting.partition(":")
        if not colon or "=" not in override:
            raise InvalidCase(f"setting {setting!r} must be WHICH:KEY=VALUE, e.g. sync:rollout.max_num_seqs=256")
        key, value = _key(override), override.partition("=")[2]
        if key in _SET_OTHERWISE:
            raise InvalidCase(f"{key} is not for --set: it {_SET_OTHERWISE[key]}")
        if key == STALENESS_KEY and not value.isdecimal():
            raise InvalidCase(f"{STALENESS_KEY} must be a number >= 0, got {value!r}")
        reached = [case.name for case in cases if which in ("all", case.mode, case.name)]
        if not reached:
            raise InvalidCase(f"setting {setting!r} reaches no case; there are {', '.join(names)}")
        for name in reached:
            found[name].append(override)
    return [replace(case, overrides=tuple(found[case.name])) for case in cases]


def overrides_of(case: Case, work: Workload, *, num_steps: int, device: str) -> list[str]:
    """The command line of a case after `--config-name bench`; `num_steps` are all that the run makes.

    Every engine may run all responses in flight: the router balances tokens, so one engine may have more responses than
    the others, and none is to queue in it, whatever the mode.
    """
    responses = (case.max_staleness + 1) * work.groups_per_step * work.group_size
    return [
        f"device={device}",
        f"mode={case.mode}",
        f"learner.num_ranks={case.num_ranks}",
        f"rollout.num_replicas={case.num_replicas}",
        f"rollout.tensor_parallel_size={case.tensor_parallel_size}",
        f"rollout.num_workers={case.num_replicas}",
        f"rollout.max_num_seqs={min(MAX_SEQUENCES, responses)}",
        f"{STEPS_KEY}={num_steps}",
        *([] if case.has_own_model else ["model.random_weights=true"]),
        *case.overrides,
    ]


def _key(override: str) -> str:
    """Of KEY=VALUE, which may have Hydra's + signs before it."""
    return override.partition("=")[0].lstrip("+")


def bench_parser(command: str, *, about: str | None, shape: str, num_steps: int) -> argparse.ArgumentParser:
    """With the options of every benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m trainer {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shape", choices=sorted(MODELS), default=shape, help=f"of the model (default {shape})")
    add("--steps", type=positive(int), default=num_steps, metavar="N", help=f"that count (default {num_steps})")
    add("--warmup", type=positive(int), default=2, metavar="N",
        help="steps before them (default 2; S > 1 needs more, until its slots are open)")  # fmt: skip
    add("--device", default="auto", help="as in `python -m trainer` (default auto)")
    return parser


def positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not (math.isfinite(value) and value > 0):
            raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse
