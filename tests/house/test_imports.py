"""No cycles, heavy libraries stay in their places, and light modules stay light. `lint-imports` checks the layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import pytest

from tests.house.source import ROOT, modules, runtime_imports, words_of_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.house.source import Module

# Regular expressions of the files that may import a library, by library.
PLACES = {
    "ray": r".*/actor\.py|trainer/learner/group\.py|trainer/driver/(cluster|actors)\.py|"
    r"rollout/fleet/engine_client\.py|trainer/remote\.py",
    "vllm": r"rollout/engine/(vllm_engine|vllm_config|vllm_process|vllm_scheduler)\.py|"
    r"weight_sync/(vllm/.*|bench/engines)\.py",
    "hydra": r"trainer/config/compose\.py",
    "omegaconf": r"trainer/config/compose\.py",
}

VENDORS = re.compile(r"(?<![a-z])(cuda|hip|rocm|npu|nccl|hccl)(?![a-z])", re.IGNORECASE)
EXTRAS = re.compile(r"\[(cpu|cuda|rocm|npu)\]")
"""What people install, as in `pip install "tandem-rl[cuda]"`: a name of ours that messages have to say."""
VENDOR_PLACES = r"weight_sync/device/.*|weight_sync/transports/(ipc|pair)\.py|trainer/config/schema\.py"

LIGHT = (
    "rollout.types", "rollout.errors", "rollout.prompts", "rollout.agent", "rollout.reward", "rollout.buffer",
    "trainer.config", "trainer.data", "trainer.telemetry", "trainer.__main__", "weight_sync.plan",
)  # fmt: skip


def name_of(module: Module) -> str:
    return module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(module: Module, known: set[str]) -> Iterator[str]:
    """Those of `known` that it imports anywhere, without the packages that it is in."""
    me = name_of(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in names]
        else:
            continue
        yield from (n for n in names if n in known and not f"{me}.".startswith(f"{n}.") and not n.startswith(f"{me}."))


IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        for info in pkgutil.walk_packages(module.__path__, name + "."):
            importlib.import_module(info.name)
    heavy = sorted({"torch", "ray", "vllm", "transformers"} & set(sys.modules))
    if heavy:
        sys.exit(f"{name} imports {', '.join(heavy)}")
"""


def test_no_module_imports_itself_over_others() -> None:
    """Type-only imports included: a reader of one such module has to read the others, too."""
    known = {name_of(module) for module in modules()}
    graph = {name_of(module): set(imported_modules(module, known)) for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@cache
def all_imports() -> list[tuple[str, str, int]]:
    return [(module.path, *found) for module in modules() for found in runtime_imports(module.tree)]


@pytest.mark.parametrize("library", PLACES)
def test_a_heavy_library_is_imported_only_in_its_places(library: str) -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, name, line in all_imports()
        if name.split(".")[0] == library and not re.fullmatch(PLACES[library], path)
    ]
    assert not wrong, "\n".join(wrong)


def test_words_of_vendors_stay_in_the_device_layer() -> None:
    wrong = sorted(
        {
            f"{module.path}:{line} says {found[0]}"
            for module in modules()
            if not re.fullmatch(VENDOR_PLACES, module.path)
            for text, line in words_of_code(module.tree)
            if (found := VENDORS.search(EXTRAS.sub("", text)))
        }
    )
    assert not wrong, "\n".join(wrong)


def test_light_modules_import_without_torch() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *LIGHT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
