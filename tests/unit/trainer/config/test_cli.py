"""The command line: what is said to those who write it wrongly, exit codes, and how a failure is told."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

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
        (["-m", "seed=1,2"], "write a loop: for value in 1 2 3"),
        (["seed=1,2"], "write a loop: for value in ...; do python -m trainer seed=$value"),
        (["--learner.lr=1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "seed=1"], "keys have no dashes: learner.lr=VALUE"),
        (["--max-steps", "10"], "keys have no dashes: trainer.total_steps=10"),
        (["--learning-rate=1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--verbose"], "see python -m trainer --help"),
        (["max_steps=10"], "did you mean trainer.total_steps?"),
        (["trainer.max_steps=10"], "did you mean trainer.total_steps?"),
        (["device=gpu"], "device=cuda (NVIDIA) or device=rocm (AMD)"),
        (["device=tpu"], "must be one of auto, cpu, cuda, npu, rocm"),
        (["--config-path", "x"], "--config-dir DIR"),
        (["--resume"], "the same run_dir=PATH"),
        (["learner.lr", "=", "1e-5"], "without spaces around ="),
        (["+algorithm=dapo"], "leave the plus out"),
        (["algorithm=GRPO"], "did you mean algorithm=grpo?"),
        (["hydra.run.dir=/tmp/x"], "where a run writes is run_dir=PATH"),
        (["hydra/launcher=slurm"], "where a run writes is run_dir=PATH"),
        (["algorithm.kl_coef=0.1"], "did you mean algorithm.kl.coef?"),
        (["trainer.stop_at_accuracy=None"], "nothing is written null"),
        (["rollout.stop=</answer>"], """rollout.stop='["VALUE"]'"""),
        (["model=Qwen/X"], "-> set its keys one by one: model.path=..."),
        (["data.train_files=x"], "docs/coming_from.md has the names of other systems"),
    ],
)
def test_a_habit_from_elsewhere_is_answered_with_what_to_write(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


def test_keys_of_another_system_are_named_in_full() -> None:
    told = refusal("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1e-6")
    assert "actor_rollout_ref.rollout.n = 8" in told
    assert "actor_rollout_ref.actor.optim.lr = 1e-06" in told and "learner.lr" in told


@pytest.mark.parametrize("key", ["run_dir", "task.eval_path", "model.tokenizer_path", "algorithm.group_filter"])
def test_null_is_no_text_of_four_letters(key: str) -> None:
    told = refusal(f"{key}=null")
    assert f"{key} = null" in told and "no text is written as nothing behind the =" in told


def test_null_in_quotes_is_text() -> None:
    assert load_config(["run_dir='null'"]).run_dir == "null"


def test_the_path_of_a_file_is_split_into_folder_and_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\n")
    for given in (tmp_path / "mine.yaml", tmp_path / "mine"):
        assert f"write --config-dir {tmp_path} --config-name mine" in refusal("--config-name", str(given))


def test_a_file_with_another_suffix_is_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("defaults: [tiny, _self_]\n")
    told = refusal("--config-dir", str(tmp_path), "--config-name", "mine")
    assert "rename mine.yml to mine.yaml" in told


def test_every_name_of_elsewhere_stands_for_a_key_and_is_none() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    assert set(OTHER_NAMES.values()) <= all_keys().keys()
    assert not OTHER_NAMES.keys() & leaves


@pytest.mark.parametrize("word", ["gpu", "tpu", "GPU"])
@pytest.mark.parametrize("key", ["device", "device.name"])
def test_another_kind_of_device_is_not_taken_for_one_of_three_letters(key: str, word: str) -> None:
    assert "npu?" not in refusal(f"{key}={word}")


# As a process


def run_trainer(*args: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_groups_keys_and_exit_codes(tmp_path: Path) -> None:
    result = run_trainer("--help", cwd=tmp_path)
    assert result.returncode == 0
    for words in ("Usage:", "algorithm   cispo", "mode.max_staleness=1", "Examples:", "130  interrupted"):
        assert words in result.stdout


def test_version_is_printed(tmp_path: Path) -> None:
    result = run_trainer("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout.split()[0]) == (0, "tandem-rl")


def test_help_imports_neither_torch_nor_hydra_and_loading_imports_no_torch() -> None:
    code = (
        "import sys; from trainer.__main__ import main; main(['--help']);"
        "assert not {'torch', 'hydra', 'ray'} & set(sys.modules);"
        "main(['--cfg', 'job']); assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_problems_end_with_code_2_and_leave_nothing(tmp_path: Path) -> None:
    result = run_trainer("learner.lrr=1", "mode.max_staleness=-1", "run_dir=here", cwd=tmp_path)
    assert result.returncode == 2
    assert "2 configuration errors" in result.stderr and result.stderr.endswith("nothing was started\n")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_show_config_prints_even_if_a_file_is_missing_and_still_ends_with_code_2(tmp_path: Path) -> None:
    result = run_trainer("--cfg", "job", "task.train_path=missing.jsonl", cwd=tmp_path)
    assert result.returncode == 2
    assert "train_path: missing.jsonl" in result.stdout
    assert "does not exist" in result.stderr


@pytest.mark.parametrize("action", [["--help"], ["--cfg", "job"]])
def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path, action: list[str]) -> None:
    """As in `python -m trainer --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "trainer", *action]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_built_wheel_carries_the_configurations(tmp_path: Path) -> None:
    """Built from a copy, so that the checkout gets no build directory."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("trainer", "rollout", "weight_sync", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").write_text("Tandem")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    built = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.unpack_archive(wheel, installed, "zip")
    result = run_trainer("--cfg", "job", "--config-name", "dapo_7b", "device=cuda", cwd=elsewhere, path=installed)
    assert result.returncode == 0, result.stderr
    assert "path: Qwen/Qwen2.5-7B" in result.stdout
    assert list(elsewhere.iterdir()) == []


def test_a_package_that_hides_the_configurations_is_named(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    result = run_trainer("--cfg", "job", cwd=tmp_path)
    assert result.returncode == 2
    assert "hides the package" in result.stderr


def test_a_plain_folder_named_configs_in_the_working_directory_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.yaml").write_text("broken: [")
    assert run_trainer("--cfg", "job", cwd=tmp_path).returncode == 0


def test_process_start_lies_before_now_and_after_the_test_session_began() -> None:
    before = time.time()
    code = "from trainer.__main__ import process_started_at as s; print(s())"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert before - 0.1 <= float(out.stdout) <= time.time()


def test_the_first_cause_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise OSError("disk full")
        except OSError as disk:
            raise ExceptionGroup("tasks", [RuntimeError("loop ended")]) from disk
    except ExceptionGroup as group:
        # The group was raised because of its member, whatever it was raised from.
        main_module.report_failure(type(group), group, group.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1] == "failed: RuntimeError: loop ended"
    try:
        try:
            raise OSError("disk full")
        except OSError as disk:
            raise RuntimeError("step 3 failed") from disk
    except RuntimeError as error:
        main_module.report_failure(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1] == "failed: OSError: disk full"


class FromAnActor(Exception):
    """As Ray's RayTaskError: a traceback for a text, and the error itself behind `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("\x1b[36mray::Learner()\x1b[39m\nTraceback (most recent call last):\n  ...\nValueError: boom")
        self.cause = cause


def test_what_an_actor_raised_is_told_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("learner rank 0 failed") from FromAnActor(ValueError("boom\nat token 3"))
    except RuntimeError as error:
        note_log(error, tmp_path / "log.txt")
        main_module.report_failure(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == "failed: ValueError: boom at token 3"
    assert str(tmp_path / "log.txt") in shown
    assert "Traceback" not in shown


def test_a_traceback_that_nobody_has_logged_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("early")
    except RuntimeError as error:
        main_module.report_failure(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


def test_a_cause_without_a_text_is_passed_over() -> None:
    async def never() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(10)

    async def main() -> None:
        try:
            await never()
        except TimeoutError as error:
            raise RuntimeError("rank 1 gave no answer for 0 s") from error

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(main())
    assert one_line(first_cause(caught.value)) == "RuntimeError: rank 1 gave no answer for 0 s"


def test_one_line_is_one_line_and_ends_somewhere() -> None:
    carried = "worker:\nTraceback (most recent call last):\n  x\n"
    assert one_line(RuntimeError(carried + "errors.OSError: gone\nat 3")) == "OSError: gone at 3"
    assert one_line(RuntimeError(carried + "KeyError\n")) == "KeyError"
    assert one_line(RuntimeError(carried + "mine.reward.<locals>.Odd: hi")) == "Odd: hi"
    assert one_line(RuntimeError(carried + "(pid=3) OSError: gone")) == "RuntimeError: (pid=3) OSError: gone"
    assert one_line(AssertionError()) == "AssertionError"
    assert len(one_line(ValueError("x" * 10_000))) < 600


def test_an_error_of_pydantic_is_told_by_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
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
    told = "ValidationError: 1 validation error for ModelConfig Value error, fp8 needs another device. It was asked for"
    for error in (sent, caught.value):
        line = one_line(first_cause(error))
        assert line.startswith(told) and "errors.pydantic.dev" not in line


def test_every_ending_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    def refused(*_: object) -> int:
        raise ConfigurationError([])

    monkeypatch.setattr(main_module, "_run", lambda *_: 1)
    assert main_module.main([]) == 1
    monkeypatch.setattr(main_module, "_run", interrupted)
    assert main_module.main([]) == 130
    monkeypatch.setattr(main_module, "_run", refused)
    assert main_module.main([]) == 2


def test_an_error_that_shows_after_the_start_names_the_log_and_does_not_say_that_nothing_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: object) -> int:
        error = ConfigurationError([Problem(key="learner.num_ranks", value="8", message="no room on the cluster")])
        note_log(error, Path("runs/a/log.txt"))
        raise error

    monkeypatch.setattr(main_module, "_run", late)
    assert main_module.main([]) == 2
    shown = capsys.readouterr().err
    assert shown.endswith("see runs/a/log.txt\n") and "nothing was started" not in shown


def test_problems_are_the_same_in_another_process() -> None:
    problems = [
        Problem(key="algorithm.policy_loss", value="mine.loss", message="no module of that name on this node"),
        Problem(key="mode.max_staleness", value="-1", message="must be >= 0", hint="use 0 for on-policy training"),
    ]
    told = pickle.loads(pickle.dumps(ConfigurationError(problems)))
    assert told.problems == tuple(problems) and str(told) == str(ConfigurationError(problems))


def test_a_run_says_that_it_has_begun_before_anything_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, str]] = []

    def look(*_: object) -> int:
        said.append(capsys.readouterr())
        return 0

    monkeypatch.setattr(main_module, "_run", look)
    main_module.main([])
    main_module.main(["--dry-run"])
    main_module.main(["--version"])
    assert said == [("", "tandem: checking configuration, model and data ...\n"), ("", "")]
    assert capsys.readouterr().err == ""
