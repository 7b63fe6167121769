"""Files and functions are short, are named by a noun, and know no machine."""

from __future__ import annotations

import ast
import re

from tests.house.source import ROOT, Module, docstrings, modules, text_files

MOST_FILE_LINES = 700
MOST_FUNCTION_LINES = 90

VAGUE_NAMES = re.compile(r"(^|_)(utils?|misc|commons?|helpers?)$")
# Written in parts, so that this file does not find itself.
MACHINE_PATHS = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/[a-z]", "/tmp/" + "brief"]))


def function_lengths(module: Module) -> list[tuple[int, str]]:
    """(lines without docstring, where) of every function."""
    documenting = docstrings(module.tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_documented = isinstance(first, ast.Expr) and first.value in documenting
            doc_lines = (first.end_lineno or 0) - first.lineno + 1 if is_documented else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - doc_lines
            found.append((lines, f"{module.path}:{node.lineno} {node.name} has {lines} lines"))
    return found


def test_files_are_short() -> None:
    sizes = [(len(module.text.splitlines()), module.path) for module in modules()]
    too_long = [f"{path} has {lines} lines" for lines, path in sizes if lines > MOST_FILE_LINES]
    assert not too_long, "\n".join(too_long)


def test_functions_are_short() -> None:
    sizes = [size for module in modules() for size in function_lengths(module)]
    too_long = [where for lines, where in sizes if lines > MOST_FUNCTION_LINES]
    assert not too_long, "\n".join(too_long)


def test_no_module_has_a_vague_name() -> None:
    parts = {(module.path, part) for module in modules() for part in module.path.removesuffix(".py").split("/")}
    vague = sorted({path for path, part in parts if VAGUE_NAMES.search(part)})
    assert not vague, "\n".join(vague)


def test_every_module_says_what_it_is_for() -> None:
    silent = [m.path for m in modules() if m.text.strip() and ast.get_docstring(m.tree) is None]
    assert not silent, "\n".join(silent)


def test_no_file_names_a_path_of_one_machine() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if MACHINE_PATHS.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_tests_belongs_to_a_stage() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= set(re.findall(r"\w+", script))
