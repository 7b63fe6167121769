"""The command line: advice on wrong ones, exit codes, and how a failure is reported. More advice: tests/golden."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import psutil
import pydantic
import pytest
from ray.exceptions import RayTaskError

import trainer.__main__ as main_module
from trainer.config.compose import load_config
from trainer.config.plain import OTHER_NAMES
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError, Problem, first_cause, note_log, one_line

ROOT = Path(__file__).resolve().parents[4]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learner.lr=1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "seed=1"], "keys have no dashes: learner.lr=VALUE"),
        (["--max-steps", "10"], "keys have no dashes: trainer.total_steps=10"),
        (["trainer.max_steps=10"], "did you mean trainer.total_steps?"),
        (["device=gpu"], "device=cuda (NVIDIA) or device=rocm (AMD)"),
        (["--config-path", "x"], "--config-dir DIR"),
        (["algorithm.kl_coef=0.1"], "did you mean algorithm.kl.coef?"),
        (["trainer.stop_at_accuracy=None"], "for no value write null"),
        (["model=Qwen/X"], "-> set its keys one by one: model.path=..."),
        (["--config-name", "FOLDER/mine.yaml"], "write --config-dir FOLDER --config-name mine"),
        (["--config-dir", "FOLDER", "--config-name", "yours"], "rename yours.yml to yours.yaml"),
    ],
)
def test_a_habit_from_another_program_gets_the_right_words(arguments: list[str], words: str, tmp_path: Path) -> None:
    for name in ("mine.yaml", "yours.yml"):
        (tmp_path / name).write_text("defaults: [tiny, _self_]\n")
    found = refusal(*(word.replace("FOLDER", str(tmp_path)) for word in arguments))
    assert words.replace("FOLDER", str(tmp_path)) in found


@pytest.mark.parametrize("word", ["gpu", "tpu", "GPU"])
@pytest.mark.parametrize("key", ["device", "device.name"])
def test_another_kind_of_device_is_not_taken_for_one_of_three_letters(key: str, word: str) -> None:
    assert "npu?" not in refusal(f"{key}={word}")


def test_every_name_from_another_system_maps_to_a_key_and_is_none() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    assert set(OTHER_NAMES.values()) <= all_keys().keys()
    assert not OTHER_NAMES.keys() & leaves


# Actions and exit codes


def test_help_lists_groups_keys_and_exit_codes_and_version_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for words in ("Usage:", "algorithm   cispo", "mode.max_staleness=1", "Examples:", "130  interrupted"):
        assert words in shown
    assert main_module.main(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "tandem-rl"


def test_show_config_prints_even_if_a_file_is_missing_and_still_ends_with_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main_module.main(["--cfg", "job", "task.train_path=missing.jsonl"]) == 2
    shown = capsys.readouterr()
    assert "train_path: missing.jsonl" in shown.out
    assert "does not exist" in shown.err


def test_every_ending_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    late = ConfigurationError([Problem(key="learner.num_ranks", value="8", message="no room on the cluster")])
    note_log(late, Path("runs/a/log.txt"))
    endings: list[tuple[BaseException | int, int, str]] = [
        (1, 1, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ConfigurationError([]), 2, "nothing was started\n"),
        (late, 2, "see runs/a/log.txt\n"),  # it shows after the start
    ]
    for ending, code, last in endings:

        def run(*_: object, ending: BaseException | int = ending) -> int:
            if isinstance(ending, BaseException):
                raise ending
            return ending

        monkeypatch.setattr(main_module, "_run", run)
        assert main_module.main([]) == code
        shown = capsys.readouterr().err
        assert shown.endswith(last) and ("nothing was started" in shown) == (last == "nothing was started\n")


def test_a_run_reports_that_it_has_begun_before_anything_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(main_module, "_run", lambda *_: said.append(capsys.readouterr()) or 0)
    main_module.main([])
    main_module.main(["--dry-run"])
    assert said == [("", "tandem: checking configuration, model and data ...\n"), ("", "")]


# As a process


def run_trainer(*args: str, cwd: Path, path: Path = ROOT, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-m", "trainer", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def test_help_imports_neither_torch_nor_hydra_and_loading_imports_no_torch() -> None:
    code = (
        "import sys; from trainer.__main__ import main; main(['--help']);"
        "assert not {'torch', 'hydra', 'ray'} & set(sys.modules);"
        "main(['--cfg', 'job']); assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_a_closed_output_ends_it_quietly(tmp_path: Path) -> None:
    """As in `python -m trainer --cfg job | head -1`."""
    read, write = os.pipe()
    os.close(read)
    code, _, error = run_trainer("--cfg", "job", cwd=tmp_path, stdout=write)
    os.close(write)
    assert (code, error) == (141, "")


def test_a_built_wheel_contains_the_configurations(tmp_path: Path) -> None:
    """Built from a copy, so that the checkout gets no build directory."""
    source, installed, elsewhere = (tmp_path / name for name in ("source", "installed", "elsewhere"))
    elsewhere.mkdir()
    for name in ("trainer", "rollout", "weight_sync", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").write_text("Tandem")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    built = subprocess.run([*build, str(source)], capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    shown = ["--cfg", "job", "--config-name", "dapo_7b", "device=cuda"]
    code, out, error = run_trainer(*shown, cwd=elsewhere, path=installed)
    assert code == 0, error
    assert "path: Qwen/Qwen2.5-7B" in out
    assert list(elsewhere.iterdir()) == []


def test_a_package_that_hides_the_configurations_is_named_and_a_plain_folder_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.yaml").write_text("broken: [")
    assert run_trainer("--cfg", "job", cwd=tmp_path)[0] == 0
    (tmp_path / "configs" / "__init__.py").touch()
    code, _, error = run_trainer("--cfg", "job", cwd=tmp_path)
    assert code == 2 and "hides the package" in error


def test_process_start_is_the_one_that_the_kernel_knows() -> None:
    assert main_module.process_started_at() == pytest.approx(psutil.Process().create_time(), abs=1.0)


# How a failure is reported


class FromAnActor(Exception):
    """As Ray's RayTaskError: a traceback as text, and the error itself in `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("\x1b[36mray::Learner()\x1b[39m\nTraceback (most recent call last):\n  ...\nValueError: boom")
        self.cause = cause


def caused(error: BaseException, cause: BaseException | None) -> BaseException:
    """`error` as it is caught after `raise error from cause`."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "cause", "last"),
    [
        (RuntimeError("step 3 failed"), OSError("disk full"), "OSError: disk full"),
        # A group is raised because of its member, whatever it was raised from.
        (ExceptionGroup("tasks", [RuntimeError("loop ended")]), OSError("disk full"), "RuntimeError: loop ended"),
        (RuntimeError("rank 0 failed"), FromAnActor(ValueError("boom\nat token 3")), "ValueError: boom at token 3"),
    ],
)
def test_the_first_cause_is_the_last_line(
    error: BaseException, cause: BaseException, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = caused(error, cause)
    main_module.report_failure(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == f"failed: {last}" and "Traceback" in shown
    note_log(error, tmp_path / "log.txt")
    main_module.report_failure(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == f"failed: {last}" and "Traceback" not in shown
    assert str(tmp_path / "log.txt") in shown


def test_one_line_is_one_line_of_the_error_that_began_it() -> None:
    error = caused(RuntimeError("rank 1 timed out after 0 s"), caused(TimeoutError(), asyncio.CancelledError()))
    assert one_line(first_cause(error)) == "RuntimeError: rank 1 timed out after 0 s"  # those below have no text
    carried = "worker:\nTraceback (most recent call last):\n  x\n"
    for text, line in {
        "errors.OSError: gone\nat 3": "OSError: gone at 3",
        "KeyError\n": "KeyError",
        "mine.reward.<locals>.Odd: hi": "Odd: hi",
        "(pid=3) OSError: gone": "RuntimeError: (pid=3) OSError: gone",
    }.items():
        assert one_line(RuntimeError(carried + text)) == line
    assert one_line(AssertionError()) == "AssertionError"
    assert len(one_line(ValueError("x" * 10_000))) < 600


def test_an_error_of_pydantic_is_reported_by_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """As vLLM's configuration raises it in an actor: Ray cannot send it, and sends its traceback as text."""

    @pydantic.dataclasses.dataclass
    class ModelConfig:
        quantization: str

        def __post_init__(self) -> None:
            raise ValueError("fp8 needs another device.\nIt was asked for here.")

    with pytest.raises(pydantic.ValidationError) as caught:
        ModelConfig("fp8")
    trace = "".join(traceback.format_exception(caught.value))
    sent = RayTaskError("start", trace, caught.value, proctitle="ray::Engine", pid=1, ip="127.0.0.1")
    assert type(sent.cause).__name__ == "RayError" and "isn't serializable" in caplog.text
    expected = (
        "ValidationError: 1 validation error for ModelConfig Value error, fp8 needs another device. It was asked for"
    )
    for error in (sent, caught.value):
        line = one_line(first_cause(error))
        assert line.startswith(expected) and "errors.pydantic.dev" not in line


def test_problems_are_the_same_in_another_process() -> None:
    problems = [
        Problem(key="algorithm.policy_loss", value="mine.loss", message="no module of that name on this node"),
        Problem(key="mode.max_staleness", value="-1", message="must be >= 0", hint="use 0 for on-policy training"),
    ]
    loaded = pickle.loads(pickle.dumps(ConfigurationError(problems)))
    assert loaded.problems == tuple(problems) and str(loaded) == str(ConfigurationError(problems))
