"""Finds everything that can be known to be wrong before a run starts, and reports it together.

`python -m trainer` first calls `named_files.file_problems`, without torch; then `preflight`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import socket
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.agent.runner import make_loop
from rollout.errors import PluginError
from trainer.algorithms.group_filter import own_group_filter
from trainer.config.algorithm import is_own, load_own, traits_of
from trainer.config.rules import SIZES_OF_CACHE, estimator_problems
from trainer.config.schema import LoraConfig, problem
from trainer.config.seats import Seats, engine_seats
from trainer.driver.actors import why_engines_read_weights
from trainer.driver.checkpointing import ResumePoint, find_resume_point
from trainer.driver.datasets import DataSets, Findings, check_data, data_warnings, make_source
from trainer.driver.models import (
    ModelInfo,
    beside_policy,
    hub_problems,
    lost_characters,
    model_problems,
    policy_tokenizer,
    read_models,
    teacher_problems,
    token_problems,
    vocabulary_problems,
    weight_problems,
)
from trainer.driver.placement import Placement, check_cpus, check_fits, plan_placement
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.telemetry.console import FILE_ONLY
from weight_sync.device.select import INSTALL, build, get_backend
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rollout.agent.loop import AgentLoop
    from rollout.types import Prompt
    from trainer.config.schema import RunConfig
    from trainer.driver.memory_plan import EngineMemory
    from weight_sync.device.base import Backend

log = logging.getLogger(__name__)

_PIN = re.compile(r"torch\s*\(?==\s*([^\s;)]+)")
"""In the metadata of torchvision."""
_PUBLISHED_BUILD = re.compile(r"[a-z]{2,4}[\d.]*")
"""The label of a wheel of the download index; other builds carry hashes, which may differ."""
_REACH_TIMEOUT_S = 5.0
"""For a connection to the head of a Ray cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """The checked parts of a run."""

    backend: Backend
    placement: Placement
    inputs: DataSets
    models: Mapping[str, ModelInfo]
    """By configuration key."""
    resumed: ResumePoint | None


def preflight(cfg: RunConfig, *, on_device: Callable[[Backend], object] = lambda _: None) -> PreflightResult:
    """Check packages, devices, models, checkpoint, data and rewards. Leaves nothing behind but what `on_device` did.
    Blocking: call it in the main thread, outside an event loop. Raises ConfigurationError or DataError with everything
    that is wrong.

    Args:
        on_device: called once nothing is wrong with packages and devices, before models and data are read.
    """
    found = Findings()
    found.add(engine_package_problems())
    found.add(torchvision_problems())
    found.raise_if_any()  # the rest imports them
    backend, placement = found.attempt(_backend, cfg), None
    if backend is not None:
        found.add(_sleep_problems(cfg, backend))
        found.add(_engine_args_problems(cfg, backend))
        placement = found.attempt(_placement, cfg, backend)
    found.add(_float32_head_problems(cfg))
    found.add(_ray_address_problems(cfg))
    if backend is not None and not found.problems:
        on_device(backend)
    inputs, models, resumed = _check_inputs(cfg, found, backend)
    found.raise_if_any()
    assert backend is not None and placement is not None and inputs is not None
    return PreflightResult(backend=backend, placement=placement, inputs=inputs, models=models, resumed=resumed)


def check_inputs(cfg: RunConfig) -> tuple[DataSets, Mapping[str, ModelInfo]]:
    """The part of `preflight` that needs neither the devices of the run nor vLLM. Raises as `preflight`."""
    found = Findings()
    found.add(torchvision_problems())
    found.raise_if_any()
    inputs, models, _ = _check_inputs(cfg, found, None)
    found.raise_if_any()
    assert inputs is not None
    return inputs, models


def recheck_resume(cfg: RunConfig, checked: PreflightResult, checkpoints: Path) -> PreflightResult:
    """`checked` with the newest checkpoint now that the run directory is ours: while `preflight` read the data, the
    last process of the run may have saved it, and deleted the one found before. Raises as `preflight`."""
    resumed = find_resume_point(cfg, checkpoints)
    make_source(cfg, checked.inputs.train, resumed)  # raises if the data is not that of the checkpoint
    return replace(checked, resumed=resumed)


class EnginePlan(NamedTuple):
    seats: Seats
    """Of each engine."""
    cache_bytes: int | None
    """Of each engine; None: it measures what is left for its cache, or the configuration has the size."""
    in_turns: bool
    """Learner and engines cannot start at the same time: on a device that they share there may be no room for both."""


def plan_engines(cfg: RunConfig, checked: PreflightResult) -> EnginePlan:
    """Caches are planned where the model and the devices are on this host. Blocks for seconds.

    Raises:
        ConfigurationError: there is no plan, or no room, for several engines on a device.
    """
    rollout, has_devices = cfg.rollout, checked.backend.ray_resource is not None
    shares, is_divided = has_devices and cfg.mode.shares_devices, has_devices and rollout.engines_per_device > 1
    memory, both_fit = None, False
    if shares or is_divided or rollout.max_num_seqs == "auto":
        memory, both_fit = _planned(cfg, checked)
    has_room = memory is not None and memory.kv_tokens >= memory.longest_tokens
    has_size = any(name in rollout.engine_args for name in SIZES_OF_CACHE)
    if is_divided and not has_room and not has_size:
        message = "needs the model and the devices here, to plan their caches"
        hint = "use 1: an engine alone measures what is left for its cache"
        if memory is not None:
            message = f"leaves room for {memory.kv_tokens} tokens in each; a sequence needs {memory.longest_tokens}"
            hint = "use fewer, or raise rollout.gpu_memory_utilization"
        raise ConfigurationError([problem(cfg, "rollout.engines_per_device", message, hint)])
    at_once = shares and both_fit and has_room and memory is not None and not memory.uncounted
    inputs = checked.inputs
    seats = engine_seats(
        cfg,
        prompt_tokens=inputs.prompt_tokens,
        num_evaluated=inputs.num_evaluated(cfg),
        kv_tokens=None if memory is None or memory.uncounted else memory.kv_tokens,
    )
    is_planned = (is_divided or at_once) and not has_size
    cache_bytes = memory.kv_bytes if memory is not None and is_planned else None
    return EnginePlan(seats, cache_bytes, in_turns=shares and not at_once)


def _planned(cfg: RunConfig, checked: PreflightResult) -> tuple[EngineMemory | None, bool]:
    """The memory of an engine, and whether the learner stays beside it for sure."""
    model, backend = checked.models["model.path"].config, checked.backend
    if model is None or backend.unavailable_reason() is not None:
        return None, False
    from trainer.driver.memory_plan import Device, engine_memory, model_shape, stays_for_sure

    device = Device(backend.name, backend.device_bytes(), is_shared=backend.ray_resource is None)
    others = beside_policy(cfg, checked.models)
    whole = replace(cfg.model, lora=LoraConfig())  # adapters are the policy's
    try:
        shape = model_shape(cfg.model, model)
    except ModelError:  # the learner reports it, as below
        return None, False
    memory = engine_memory(cfg, shape, device)
    configs = [None if one is None else one.config for one in others]
    if any(one is not None and config is None for one, config in zip(others, configs, strict=True)):
        return memory, False  # elsewhere
    try:
        critic, teacher = [None if config is None else model_shape(whole, config) for config in configs]
    except ModelError:
        return memory, False
    earlier = {} if checked.resumed is None else checked.resumed.state.get("learner", {})
    tokens = earlier.get("max_tokens_per_micro_batch")
    return memory, stays_for_sure(cfg, shape, device, critic=critic, teacher=teacher, earlier_tokens=tokens)


def log_inputs(cfg: RunConfig, inputs: DataSets) -> None:
    """There is no log yet while `preflight` runs, so this logs what it found."""
    main, *further = [len(one.prompts) for one in inputs.evaluation] or [0]
    more = "".join(f", {one.name} {num}" for one, num in zip(inputs.evaluation[1:], further, strict=True))
    log.info("%d training prompts, %d held out%s", len(inputs.train.prompts), main, more)
    for text in inputs.notes:
        log.warning(text, extra=FILE_ONLY)
    if cfg.task.reward.column:
        by_reward = Counter(prompt.reward if prompt.reward else cfg.task.reward.name for prompt in inputs.prompts)
        log.info("prompts by reward: %s", ", ".join(f"{name} {count}" for name, count in by_reward.most_common()))
    drawn, path = f"drawn from seed {cfg.seed}", cfg.model.path
    log.info("weights: %s", drawn if cfg.model.random_weights else f"those of {path}")


# --- packages ---


def engine_package_problems() -> Iterator[Problem]:
    """Without importing vLLM."""
    from weight_sync.vllm.compat import DISTRIBUTIONS, UnsupportedVllm, check_vllm_version

    found = next((version for name in DISTRIBUTIONS if (version := _version_of(name))), None)
    if found is None:
        hint = f"install it: {INSTALL}"
        yield Problem(key="installation", value="no vLLM", message="the rollout engine needs vLLM", hint=hint)
        return
    try:
        check_vllm_version(found, _version_of("vllm-ascend"))
    except UnsupportedVllm as error:
        yield Problem(key="installation", value=f"vLLM {found}", message=str(error), hint="install a version in range")


def torchvision_problems() -> Iterator[Problem]:
    """A torchvision built for another torch makes `import transformers` and `import vllm` fail far from the cause.
    Reads metadata: importing either takes seconds."""
    torch, torchvision = _version_of("torch"), _version_of("torchvision")
    if torch is None or torchvision is None:
        return
    built_for = [match[1] for text in importlib.metadata.requires("torchvision") or [] if (match := _PIN.match(text))]
    version, label = torch.partition("+")[::2]
    own_label = torchvision.partition("+")[2]
    is_other_build = label != own_label and all(map(_PUBLISHED_BUILD.fullmatch, (label, own_label)))
    if is_other_build or any(wanted not in (version, torch) for wanted in built_for):
        target = own_label if is_other_build else ", ".join(built_for)
        yield Problem(
            key="installation",
            value=f"torchvision {torchvision} with torch {torch}",
            message=f"torchvision must match torch or be absent: this one is built for torch {target}",
            hint="pip uninstall torchvision torchaudio torchcodec (Tandem needs none), or install matching builds",
        )


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- devices and cluster ---


def _backend(cfg: RunConfig) -> Backend:
    """On a joined cluster, a named device need not be on this host."""
    name, is_elsewhere = cfg.device.name, cfg.ray.address != "local" and cfg.device.name != "auto"
    try:
        backend = (build if is_elsewhere else get_backend)(name, cpu_threads=cfg.device.cpu_threads)
        problems = backend.check_env("driver", dict(os.environ))
    except DeviceError as error:
        raise ConfigurationError([Problem(key="device", value=name, message=str(error))]) from error
    if problems:
        raise ConfigurationError([Problem(key="device", value=backend.name, message=text) for text in problems])
    return backend


def _float32_head_problems(cfg: RunConfig) -> Iterator[Problem]:
    from weight_sync.vllm.compat import has_float32_head

    if cfg.learner.fp32_head and not has_float32_head():
        message = "the installed vLLM rounds its logits, so with float32 logits in the learner log-probs would differ"
        yield problem(cfg, "learner.fp32_head", message, "install a newer vLLM, or leave it null")


def _engine_args_problems(cfg: RunConfig, backend: Backend) -> Iterator[Problem]:
    try:
        backend.engine_args(cfg.rollout.engine_args)
    except DeviceError as error:
        yield problem(cfg, "rollout.engine_args", str(error), f"needed by device={backend.name}", "device.name")


def _sleep_problems(cfg: RunConfig, backend: Backend) -> Iterator[Problem]:
    if cfg.mode.shares_devices and backend.ray_resource is not None and not backend.capabilities().sleep_mode:
        message = f"engines on {backend.name} cannot free their memory for learners with the installed version"
        hint = "use mode=async or mode=sync, with separate devices, or a newer version (docs/backends.md)"
        yield problem(cfg, "mode.name", message, hint)


def _placement(cfg: RunConfig, backend: Backend) -> Placement:
    placement = plan_placement(cfg, resource=backend.ray_resource)
    if cfg.ray.address == "local":
        num_devices = backend.num_devices()
        check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="this host")
        check_cpus(cfg, placement)
    return placement


def _ray_address_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Of a HOST:PORT that does not respond: Ray would retry for half a minute, after the run directory was made."""
    host, colon, port = cfg.ray.address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return  # `local`, `auto`, or an address that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        message = f"no Ray cluster can be reached there: {getattr(error, 'strerror', None) or error}"
        yield problem(cfg, "ray.address", message, "start one with `ray start --head`, or use ray.address=local")


# --- models, checkpoint, data, reward ---


def _check_inputs(
    cfg: RunConfig, found: Findings, backend: Backend | None
) -> tuple[DataSets | None, Mapping[str, ModelInfo], ResumePoint | None]:
    """A check runs if what it needs was found: data and rewards are checked even without a tokenizer. `backend` is None
    if the devices are not here."""
    found.attempt(check_own_functions, cfg)
    agent = found.attempt(make_agent, cfg)
    weights = list(weight_problems(cfg, why_read=why_engines_read_weights(cfg)))
    found.add(weights)
    resumed = None
    if not weights:  # a checkpoint compares whether they are drawn
        directory = Path(cfg.run_dir) / "checkpoints" if cfg.run_dir else None
        resumed = found.attempt(find_resume_point, cfg, directory, is_device_here=backend is not None)
    if unreachable := list(hub_problems(cfg)):
        found.add(unreachable)
        return None, {}, resumed  # the rest would ask the hub
    models = read_models(cfg)
    for info in models.values():
        found.add(model_problems(cfg, info))
    tokenizer = found.attempt(policy_tokenizer, cfg)
    data = check_data(cfg, found, tokenizer, tools=shown_tools(agent))
    if tokenizer is not None:
        found.add(vocabulary_problems(cfg, models["model.path"], tokenizer))
    if tokenizer is None or data is None:
        return None, models, resumed
    found.add(token_problems(models.values(), data.prompts))
    of_teacher = list(teacher_problems(cfg, models, tokenizer))
    found.add(item for item in of_teacher if isinstance(item, Problem))
    found.attempt(make_source, cfg, data.train, resumed)  # whether the data is that of the checkpoint
    warnings = [
        *data_warnings(cfg, data),
        *lost_characters(tokenizer, data.train.prompts),
        *unnamed_tools(agent, data.train.prompts),
        *(item for item in of_teacher if isinstance(item, str)),
        *size_warnings(cfg, backend),
    ]
    for text in () if found.problems else warnings:
        log.warning(text)
    return replace(data, notes=(*data.notes, *warnings)), models, resumed


def check_own_functions(cfg: RunConfig) -> None:
    """Import a custom estimator, loss and group filter. Raises ConfigurationError if one is no such function, or does
    not fit the rest of the configuration."""
    found, algorithm = Findings(), cfg.algorithm
    if is_own(algorithm.loss):
        found.attempt(load_own, algorithm.loss, key="algorithm.loss", args=algorithm.loss_args)
    found.attempt(own_group_filter, algorithm)
    if is_own(algorithm.advantage_estimator):
        found.attempt(lambda: found.add(estimator_problems(cfg, traits_of(algorithm))))
    found.raise_if_any()


def size_warnings(cfg: RunConfig, backend: Backend | None) -> Iterator[str]:
    """Sizes that are allowed and rarely meant."""
    ranks, staleness, steps = cfg.learner.num_ranks, cfg.mode.max_staleness, cfg.trainer.total_steps
    cores = len(os.sched_getaffinity(0))
    if backend is not None and backend.ray_resource is None and cfg.ray.address == "local" and ranks > cores:
        yield (
            f"learner.num_ranks={ranks} processes share the {cores} core{'' if cores == 1 else 's'} of this host, and "
            "each has a copy of the libraries in memory: a step is slower"
        )
    if staleness >= steps:
        yield (
            f"mode.max_staleness={staleness} is no bound for a run of trainer.total_steps={steps}: its last step may "
            "train on responses of the first version"
        )


# --- agent ---


def make_agent(cfg: RunConfig) -> AgentLoop:
    """Raises ConfigurationError if the path does not lead to a factory that makes a loop of its arguments."""
    try:
        return make_loop(cfg.task.agent, cfg.task.agent_args, chat_template_kwargs=cfg.task.chat_template_kwargs)
    except PluginError as error:
        raise ConfigurationError([problem(cfg, "task.agent", str(error))]) from error


def shown_tools(agent: AgentLoop | None) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the functions that the chat template shows to the policy."""
    return getattr(agent, "tools", ())


def unnamed_tools(agent: AgentLoop | None, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Warns of tools that the policy should know and most training prompts do not name; a few may name one by chance,
    as a problem about a calculator does."""
    unnamed: list[str] = []
    for name in getattr(agent, "tool_names", ()):
        whole_word = re.compile(rf"\b{re.escape(name)}\b")
        number = sum(whole_word.search(prompt.text) is not None for prompt in prompts)
        if 2 * number < len(prompts):
            unnamed.append(f"{name} (in {number} of {len(prompts)})")
    if unnamed:
        why = "is given the tools and does not show them" if shown_tools(agent) else "shows no tools"
        yield (
            f"the chat template {why}, and the training prompts do not name {', '.join(unnamed)}: the policy cannot "
            "know what it may call. Use a model whose chat template reads `tools`, or describe the tools, and how they "
            "are called, in task.system_prompt; if the policy knows them already, set tools_in_prompt=false among "
            "task.agent_args"
        )
