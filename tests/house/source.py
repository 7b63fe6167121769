"""The source tree as the house rules see it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainer", "rollout", "weight_sync")
FOLDERS = (*PACKAGES, "configs", "scripts", "tests", "docs", ".ci")
TEXT_SUFFIXES = {".py", ".yaml", ".yml", ".toml", ".md", ".sh", ".c", ".txt", ".cfg", ""}


@dataclass(frozen=True)
class Module:
    """One Python file of the three packages."""

    path: str
    """Relative to the root, e.g. "trainer/config/compose.py"."""
    text: str
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    texts = [(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]
    return tuple(Module(path, text, ast.parse(text, path)) for path, text in texts)


def text_files() -> Iterator[Path]:
    """Every text file that belongs to the project."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and file.suffix in TEXT_SUFFIXES and "__pycache__" not in file.parts:
                yield file
    for file in sorted(ROOT.iterdir()):
        # `.git` is a file where the checkout is one of several worktrees.
        if file.is_file() and file.suffix in TEXT_SUFFIXES and file.name not in {"LICENSE", ".git"}:
            yield file


def runtime_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import that can run: those under `if TYPE_CHECKING` cannot."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from (found for other in node.orelse for found in runtime_imports(ast.Module([other], [])))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "", node.lineno)
        else:
            yield from runtime_imports(node)


def docstrings(tree: ast.AST) -> set[ast.Constant]:
    """The string nodes that only document: of modules, classes and functions, and those below a field."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def words_of_code(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(text, line) of every name and every string that is code, so neither comments nor docstrings."""
    documenting = docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.keyword(arg=str(name)):
                yield name, node.lineno
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                for alias in aliases:
                    yield f"{module}.{alias.name}", node.lineno
            case ast.Constant(value=str(text)) if node not in documenting:
                yield text, node.lineno
            case _:
                pass
