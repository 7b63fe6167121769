"""Environment variables of a process: what we set, what the user set, and what is wrong with the outcome.

Pure, but for `temporary_environment`.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


RELEVANT = (
    "ASCEND_", "CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "HCCL_", "HIP_", "HSA_", "KMP_", "MKL_", "NCCL_", "OMP_",
    "PYTORCH_", "RAY_", "RCCL_", "ROCR_", "TANDEM_", "TORCH", "TRITON_", "UCX_", "VLLM_",
)  # fmt: skip
"""Beginnings of the names of variables that change how a process computes or communicates."""
SECRET = re.compile(
    r"AUTH|CONFIG$|CREDENTIAL|HEADERS|JSON|KEY|PASSW|PASSPHRASE|PWD|RUNTIME_ENV|SECRET|TOKEN(?!_THRESHOLD|S_PER)"
)
"""Parts of names whose values must not be shown."""
CARRIES_SECRET = re.compile(r"://[^/\s]*@|^\s*[{\[]")
"""Values that must not be shown: addresses with a user in them, and JSON, which may hold anything."""
HIDDEN = "(not shown)"


def merge_env(defaults: tuple[EnvVar, ...], user: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables to start a process with: the user's configuration, else what is inherited, else our default.

    Where a variable `overrides` what is inherited, our value comes before that. Inherited variables that nobody asked
    for are left out: the child inherits them anyway. Inherited values of our variables are kept in, because a child on
    another host does not inherit from here.

    Example:
        >>> merge_env((EnvVar(name="A", value="1", why="..."),), {"B": "2"}, {"A": "3", "C": "4"})
        {'A': '3', 'B': '2'}
    """
    merged = {var.name: var.value if var.overrides else inherited.get(var.name, var.value) for var in defaults}
    return {**merged, **user}


def missing_variables(needed: tuple[EnvVar, ...], environ: Mapping[str, str]) -> list[str]:
    """One message per variable that is not set. A user's own value is accepted."""
    return [
        f"{var.name} should be {var.value!r}, it is not set ({var.why}); set it in `device.env`"
        for var in needed
        if var.name not in environ
    ]


def relevant_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that change how a process computes or communicates, by name: for a record of a run. `HIDDEN` stands for
    values that may be secret."""
    return {
        name: HIDDEN if hides_value(name, environ[name]) else environ[name]
        for name in sorted(environ)
        if name.startswith(RELEVANT)
    }


def hides_value(name: str, value: str) -> bool:
    """Whether a variable may hold a secret: a name like a key's, or a value with a user or JSON in it."""
    return bool(SECRET.search(name.upper()) or CARRIES_SECRET.search(value))


def is_true(value: str | None) -> bool:
    """How Ray reads a switch from the environment."""
    return value is not None and value.lower() in {"1", "true"}


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set inside, for what reads them there; restored at the end. One thread at a time."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """An environment variable a process needs. A value the user has set wins over ours."""

    name: str
    value: str
    why: str
    roles: tuple[str, ...] = ("learner", "engine")
    """Whose processes need it."""
    overrides: bool = False
    """True if an inherited value gives way to ours: images and nodes may have one that breaks what we need."""
