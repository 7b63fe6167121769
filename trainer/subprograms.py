"""Modules of Tandem that run as programs of their own, such as the process cleaner."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages of Tandem are: the repository, or site-packages."""


def command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments`, without the working directory, where a file may have the name of a package of ours.
    Give it `environment()`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """That of this process, with our packages before all others where they are a repository that need not be installed;
    where they are installed, they are found anyway."""
    if not (ROOT / "pyproject.toml").is_file():
        return dict(os.environ)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
