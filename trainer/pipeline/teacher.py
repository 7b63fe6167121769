"""Whether the model of `algorithm.kl.path` speaks of the policy's tokens. It scores ids, and would score those of
another tokenizer just as well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.tokenizer import load_tokenizer
from trainer.builtin import tiny_model
from trainer.builtin.tokenizer import VOCABULARY_SIZE, build_tokenizer
from trainer.config.environment import context_problems
from trainer.config.errors import ConfigurationError, Problem
from trainer.learner.errors import ModelError

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

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
