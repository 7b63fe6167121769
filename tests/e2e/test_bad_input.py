"""Everything a user can get wrong: a clear message, exit code 2, and nothing left behind.

Each row runs in a separate world (working directory, home, temporary files, caches), which is compared before and
after. What a row expects are words of the message: the thing, what it got, what to do. Most rows call `main`; those of
`PROCESSES` are real `python -m trainer`, for what only a process shows: what it imports, and what it leaves behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.learner import save_tiny
from tests.fakes.patience import PATIENT_S
from trainer.__main__ import main
from trainer.builtin.tiny_model import build_tokenizer
from trainer.learner import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
MARK = "TANDEM_TEST_WORLD"
"""An environment variable by which every process that a run has started is found."""


class World:
    """What one run can see and write."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.mark = path, uuid.uuid4().hex
        self.model = model
        """A whole model directory, shared by all: rows that break it take a copy."""
        self.cwd, self.packages = path / "cwd", path / "packages"
        self.cleanup = contextlib.ExitStack()
        for name in ("cwd", "packages", "home", "tmp", "cache"):
            (path / name).mkdir(parents=True)

    def environment(self) -> dict[str, str]:
        return {
            MARK: self.mark,
            "HOME": str(self.path / "home"),
            "TMPDIR": str(self.path / "tmp"),
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "TANDEM_CACHE_DIR": str(self.path / "cache"),
            "PYTHONPATH": f"{self.packages}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def files(self) -> dict[str, str]:
        """Every file by its content, every directory by its name."""
        return {
            str(path.relative_to(self.path)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in sorted(self.path.rglob("*"))
        }

    def processes(self) -> list[int]:
        """Those that have the mark in their environment, whoever their parent is by now."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def write(self, name: str, text: str) -> str:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    def model_copy(self, **changes: str | None) -> str:
        """`changes`: file name (`__` for a dot) to its new text; None takes the file away."""
        copy = self.cwd / "model"
        copy.mkdir()
        for source in self.model.iterdir():
            (copy / source.name).write_bytes(source.read_bytes())
        for name, text in changes.items():
            path = copy / name.replace("__", ".")
            path.unlink()
            if text is not None:
                path.write_text(text)
        return "model"


@dataclass(frozen=True)
class Case:
    """`prepare` makes the bad world and returns arguments. `words` must all be in the message, in any order."""

    name: str
    prepare: Callable[[World], list[str]]
    words: tuple[str, ...]


def plain(name: str, *arguments: str, words: tuple[str, ...]) -> Case:
    return Case(name, lambda _: list(arguments), words)


def jsonl(name: str, rows: list[dict[str, str]], *arguments: str, words: tuple[str, ...]) -> Case:
    def prepare(world: World) -> list[str]:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        return [f"task.train_path={world.write('data.jsonl', text)}", *arguments]

    return Case(name, prepare, words)


def reward(name: str, body: str, *, words: tuple[str, ...], timeout_s: int = 30) -> Case:
    def prepare(world: World) -> list[str]:
        file = world.write("mine.py", body)
        return [f"task.reward.name={file}:reward", f"task.reward.timeout_s={timeout_s}"]

    return Case(name, prepare, words)


def reward_with(statement: str) -> str:
    return f"def reward(*, prompt, response, answer, metadata):\n    {statement}\n"


def run_dir_in_use(world: World) -> list[str]:
    owner = {"pid": 12345, "host": "somewhere", "since": 0.0}
    lock = (world.cwd / world.write("run/owner.lock", json.dumps(owner))).open("a")
    world.cleanup.callback(lock.close)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return ["run_dir=run"]


def another_data_set(world: World) -> list[str]:
    source = {"epoch": 0, "position": 3, "seed": 0, "shuffle": 1, "num_prompts": 5, "fingerprint": "another"}
    checkpoint.commit(checkpoint.begin(world.cwd / "run" / "checkpoints", 7), {"run": {"step": 7}, "source": source})
    world.write("run/config.yaml", "task: {train_path: old.jsonl, max_prompt_tokens: 16}\n")
    return ["run_dir=run"]


def old_vllm(world: World) -> list[str]:
    info = world.packages / "vllm-0.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    return []


def broken_torchvision(world: World) -> list[str]:
    info = world.packages / "torchvision-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\nRequires-Dist: torch (==1.0)\n"
    )
    package = world.packages / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    return []


def broken_model(**changes: str | None) -> Callable[[World], list[str]]:
    return lambda world: [f"model.path={world.model_copy(**changes)}"]


def wrong_size(world: World) -> list[str]:
    config = json.loads((world.model / "config.json").read_text())
    return [f"model.path={world.model_copy(config__json=json.dumps({**config, 'hidden_size': 'many'}))}"]


LONG = [{"prompt": "1+1=" * 200, "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]

CASES = [
    plain("unknown key", "learner.lrr=1", words=("learner.lrr = 1", "unknown key", "did you mean learner.lr?")),
    Case("missing tokenizer file", broken_model(tokenizer__json=None, tokenizer_config__json=None),
         ("model.path = model", "has no tokenizer", "model.tokenizer_path")),
    Case("model config is not JSON", broken_model(config__json="{broken"),
         ("model.path = model", "config.json cannot be read")),
    Case("model config names no model", broken_model(config__json='{"model_type": "nonsense"}'),
         ("model.path = model", "nonsense", "check model_type")),
    Case("model config of wrong type", wrong_size,
         ("model.path = model", "config.json", "hidden_size", "expected int")),
    Case("model weights truncated", broken_model(model__safetensors="short"),
         ("model.path = model", "model.safetensors cannot be read", "download it again")),
    Case("tokenizer is damaged", broken_model(tokenizer__json="{broken"),
         ("model.path = model", "tokenizer cannot be loaded")),
    jsonl("missing column", [{"question": "1+1=", "answer": "2"}],
          words=("data.jsonl, line 1", "no column 'prompt'", "question, answer", "task.prompt_column")),
    jsonl("empty data set", [], words=("data.jsonl", "has no rows", "at least one prompt")),
    jsonl("a prompt too long", LONG, "task.overlong_prompts=error",
          words=("1 of 2 prompts are longer", "task.max_prompt_tokens=16", "task.overlong_prompts=filter")),
    jsonl("all prompts too long", LONG[:1], words=("all 1 prompts are longer", "raise the limit")),
    plain("device that is not here", "device=cuda", words=("device = cuda", "cannot be used")),
    reward("reward does not import", "import no_such_module\n",
           words=("mine.py:reward", "No module named 'no_such_module'")),
    reward("reward has a syntax error", "def reward(:\n", words=("mine.py:reward", "SyntaxError")),
    reward("reward raises", reward_with("raise KeyError('gold')"),
           words=("mine.py:reward", "raised KeyError", "line 2", "trial call")),
    reward("reward hangs", reward_with("while True: pass"), timeout_s=1,
           words=("mine.py:reward", "longer than 1 s", "task.reward.timeout_s")),
    Case("run directory in use", run_dir_in_use, ("run_dir", "in use by process 12345 on host somewhere", "stop it")),
    Case("resumed with another data set", another_data_set,
         ("the prompt order cannot continue", "num_prompts was 5, now", "start a new run",
          "configured otherwise since: task.train_path: old.jsonl -> builtin:arithmetic")),
    Case("unsupported vLLM", old_vllm, ("vLLM 0.9.1", "not supported", ">= 0.25.1", "install")),
    Case("torchvision that cannot load", broken_torchvision,
         ("torchvision 0.1", "built for torch 1.0", "pip uninstall torchvision")),
]  # fmt: skip


PROCESSES = ("unknown key", "reward hangs", "unsupported vLLM", "torchvision that cannot load")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_tiny(tmp_path_factory.mktemp("whole"))
    build_tokenizer().save_pretrained(model)
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_with_a_clear_message_and_leaves_nothing(
    case: Case, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, model)
    arguments = case.prepare(world)
    monkeypatch.chdir(world.cwd)
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    with world.cleanup:
        before = world.files()
        if case.name in PROCESSES:
            command = [sys.executable, "-m", "trainer", *arguments]
            result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False)
            exit_code, out, error = result.returncode, result.stdout, result.stderr
        else:
            exit_code = main(arguments)
            out, error = capsys.readouterr()
        changed = dict(sorted(before.items() ^ world.files().items()))
    missing = [words for words in case.words if words not in " ".join(error.split())]
    assert not missing, f"{error}\nlacks {missing}"
    assert exit_code == 2
    assert "Traceback" not in error
    assert out == "", "a run that does not start prints its problem and nothing else"
    assert changed == {}
    assert world.processes() == []
