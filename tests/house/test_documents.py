"""Documentation is current: generated pages, metric names, links, and the commands that it shows."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from scripts.generate_docs import PAGE, configuration_page
from tests.fakes.metric_names import METRICS, find_row
from tests.house.source import ROOT, Module, docstrings, modules
from trainer.__main__ import TOOLS
from trainer.config.cli import parse
from trainer.config.compose import resolve
from trainer.config.plain import RENAMED as RENAMED_KEYS
from trainer.tools.run_records import RENAMED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REFRESH = "run: python scripts/generate_docs.py"
PRODUCERS = ("trainer/driver/", "trainer/learner/", "trainer/data/", "trainer/telemetry/", "rollout/")
CLUSTER = " ray.address=10.0.0.1:6379"
STARTS = {
    rf"python -m trainer(?! (?:{'|'.join(TOOLS)})\b)": "",
    r"scripts/multinode\.sh head \d+": CLUSTER,
    r"sbatch .*scripts/slurm\.sbatch": CLUSTER,
}
"""What may precede the arguments of a run -> what it adds to them."""
OF_THE_READER = {
    "model.path", "task.train_path", "task.eval_path", "task.reward.name", "checkpoint.resume", "telemetry.wandb",
}  # fmt: skip
"""Keys whose files and packages may be missing here."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FAMILIES = sorted({metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name})
_METRIC = re.compile(rf"({'|'.join(_FAMILIES)})/[a-z0-9_]+(/[a-z0-9_]+)?")


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> Iterator[tuple[str, str]]:
    """(document, line) of every line in a code block that starts a program."""
    for document in documents():
        for block in re.findall(r"^```\w*\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                yield document.name, line.strip().removeprefix("$ ")


def trainer_commands() -> list[str]:
    """Their arguments; scripts for several nodes add the cluster that they have made."""
    found: set[str] = set()
    for _, line in commands():
        for start, added in STARTS.items():
            match = re.search(rf"{start}([^#&|;>]*)", line)
            # Capitals stand for what the reader puts in: KEY=VALUE, --config-name NAME.
            if match and not re.search(r"\.\.\.|[=\s][A-Z_]{3,}\b", match[1]):
                found.add(match[1].strip() + added)
    return sorted(found)


def test_the_configuration_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), REFRESH


def metric_names() -> Iterator[tuple[str, str]]:
    """(where, name) of every string in the trainer's code that looks like a metric."""
    for module in modules():
        if not module.path.startswith("trainer/"):
            continue
        documenting = docstrings(module.tree)
        for node in ast.walk(module.tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documenting
            if is_text and _METRIC.fullmatch(node.value):
                yield f"{module.path}:{node.lineno}", node.value


def test_every_metric_named_in_the_code_has_a_row() -> None:
    named = ((where, name) for where, name in metric_names() if name not in RENAMED)
    unknown = sorted(f"{where} {name}" for where, name in named if find_row(name) is None)
    assert not unknown, "add a row to docs/metrics.md for:\n" + "\n".join(unknown)


def test_no_document_uses_an_earlier_name_of_a_key() -> None:
    earlier = re.compile("|".join(rf"(?<![\w./]){re.escape(name)}(?![\w/])" for name in RENAMED_KEYS))
    texts = {path.name: path.read_text("utf-8") for path in documents() if path.name != "benchmarks_history.md"}
    assert not {name: found for name, text in texts.items() if (found := earlier.findall(text))}


def test_every_metric_named_in_a_document_has_a_row() -> None:
    for document in documents():
        for name in re.findall(
            rf"`((?:{'|'.join(_FAMILIES)})/[a-z0-9_]+(?:/[a-z0-9_]+)?)`", document.read_text("utf-8")
        ):
            assert find_row(name) or find_row(f"{name}/any"), (
                f"{document.name} names {name}, which docs/metrics.md lacks"
            )


def in_producers(module: Module) -> bool:
    """Whether a file may write metrics: not one that only reads them."""
    return module.path.startswith(PRODUCERS)


def texts() -> tuple[set[str], list[re.Pattern[str]]]:
    """What the producers can say: every text and every name of a field, and every f-string that begins with a text."""
    whole: set[str] = set()
    made: list[re.Pattern[str]] = []
    for module in filter(in_producers, modules()):
        documenting = docstrings(module.tree)
        for node in ast.walk(module.tree):
            match node:
                case ast.Constant(value=str(text)) if node not in documenting:
                    whole.add(text)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    whole.add(name)
                case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_]) if len(first) > len("no_"):
                    parts = (re.escape(v.value) if isinstance(v, ast.Constant) else "(.+)" for v in node.values)
                    made.append(re.compile("".join(parts)))
                    whole.add(f"{first.rpartition('/')[0]}/*")
                case _:
                    pass
    return whole, made


def can_say(name: str, whole: set[str], made: list[re.Pattern[str]]) -> bool:
    """Whether a text is one of those, or an f-string becomes it with such texts in its gaps."""
    if name in whole or name == "*":
        return True
    found = (pattern.fullmatch(name) for pattern in made)
    return any(all(can_say(gap, whole, made) for gap in match.groups()) for match in found if match is not None)


def test_every_row_of_the_catalogue_is_written() -> None:
    whole, made = texts()
    # The numbers of an evaluation get `eval/`, a set and the name of a reward when they are written.
    prefix = re.compile(r"^eval/|/\*$")
    names = {
        metric.name: (metric.name, metric.name.removeprefix("eval/"), prefix.sub("", metric.name)) for metric in METRICS
    }
    silent = [name for name, forms in names.items() if not any(can_say(form, whole, made) for form in forms)]
    assert not silent, "nothing writes these rows of docs/metrics.md:\n" + "\n".join(silent)
    for name in ("perf/no_such", "learner/no_such_s", "learner/correction_no_such_frac", "perf/no_such/*"):
        assert not can_say(name, whole, made)


def test_files_and_modules_that_documents_name_exist_and_shell_scripts_can_be_run() -> None:
    tops, wrong = "configs|docs|rollout|scripts|tests|trainer|weight_sync", set[str]()
    for document in documents():
        text = document.read_text(encoding="utf-8")
        # Capitals stand for a name that the reader chooses.
        named = re.findall(rf"(?<![\w/])((?:{tops})/[a-z_][a-z0-9_/.]*[a-z0-9_/])(?![\w*{{/.-])", text)
        if document.name != "benchmarks_history.md":
            wrong |= {f"{document.name} names {path}" for path in named if not (ROOT / path).exists()}
        shell = [path for path in named if path.startswith("scripts/") and path.endswith(".sh")]
        wrong |= {f"{document.name}: chmod +x {path}" for path in shell if not os.access(ROOT / path, os.X_OK)}
        for name in re.findall(r"python -m ((?:trainer|weight_sync|tests)\b[\w.]*\w)", text):
            if importlib.util.find_spec(name) is None:
                wrong.add(f"{document.name}: there is no module {name} to run")
    assert not wrong, "\n".join(sorted(wrong))


def anchors(document: Path) -> set[str]:
    """What a link into a document can name: its headings, as GitHub writes them into its pages."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", without_code(document), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        numbered = (f"{slug}-{number}" for number in itertools.count(1))
        found.add(slug if slug not in found else next(name for name in numbered if name not in found))
    return found


def without_code(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links() -> Iterator[tuple[Path, str]]:
    """(document, target) of every link that stays in the repository."""
    for document in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document)):
            if not re.match(r"[a-z]+:", target):
                yield document, target


def test_links_between_documents_lead_to_a_file_and_a_heading() -> None:
    dangling: list[str] = []
    for document, target in links():
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        if not file.exists():
            dangling.append(f"{document.name} links to {target}: no such file")
        elif anchor and anchor not in anchors(file):
            dangling.append(f"{document.name} links to {target}: no such heading")
    assert not dangling, "\n".join(dangling)


def test_the_path_of_a_group_names_functions_that_are_there() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    section = text.partition("## From a prompt to an optimizer step")[2].partition("\n## ")[0]
    rows = [row.split("|")[2:4] for row in section.splitlines() if row.startswith("|") and "`" in row]
    calls = [call for row in rows for call in re.findall(r"`([\w.]+)`", row[0])]
    files: set[str] = set()
    for _, cell in rows:
        files |= set(re.findall(r"`([\w/]+/\w+\.py)`", cell))
        for folder, names in re.findall(r"`([\w/]+/)` \(([^)]*)\)", cell):
            files |= {folder + name for name in re.findall(r"`(\w+\.py)`", names)}
    known: set[str] = set()
    for path in files:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)):
            known |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, FUNCTIONS)}
        known |= {one.name for one in ast.walk(tree) if isinstance(one, FUNCTIONS)}
        known |= {
            f"{path.rpartition('/')[2].removesuffix('.py')}.{one.name}"
            for one in tree.body
            if isinstance(one, FUNCTIONS)
        }
    missing = [call for call in calls if call not in known]
    assert not missing, f"docs/index.md names {missing}, which none of its files defines"
    counted = re.search(r"(\d+) calls in (\d+) files", section)
    assert counted and [int(one) for one in counted.groups()] == [len(calls), len(files)], (len(calls), len(files))


def test_headings_become_the_anchors_that_github_makes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# On 8 H200s, 2026-11-21\n## `a_b`: what?\n```\n# no heading\n```\n## Same\n## Same\n")
    assert anchors(page) == {"on-8-h200s-2026-11-21", "a_b-what", "same", "same-1"}


def example_configurations() -> list[tuple[str, str]]:
    """(name, text) of every YAML file that a document shows."""
    found: list[tuple[str, str]] = []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        found += re.findall(r"^```yaml\n# my_configs/(\w+)\.yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return sorted(found)


@pytest.mark.parametrize(("name", "text"), example_configurations())
def test_a_configuration_file_in_a_document_composes(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_configs").mkdir()
    (tmp_path / "my_configs" / f"{name}.yaml").write_text(text)
    config, _ = resolve(parse(["--config-dir=my_configs", f"--config-name={name}"]))
    assert config.name == name


@pytest.mark.parametrize("command", trainer_commands())
def test_a_training_command_in_a_document_composes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = parse(shlex.split(command))
    if line.action in {"help", "version"} or line.config_dir is not None:
        return
    _, problems = resolve(line)
    assert not [str(problem) for problem in problems if problem.key not in OF_THE_READER]


def test_the_commands_for_several_nodes_are_among_them() -> None:
    joining = [command for command in trainer_commands() if command.endswith(CLUSTER)]
    assert len(joining) >= 1 and all("learner.num_ranks=8" in command for command in joining)
    assert any("--nodes" in command for command in trainer_commands())
