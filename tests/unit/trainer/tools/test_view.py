"""Recorded samples -> what `python -m trainer view` shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Group, Prompt, RolloutRequest, Trajectory
from tests.fakes.trajectories import make_turn
from trainer.telemetry.trajectories import TrajectoryRecorder
from trainer.tools.view import main

if TYPE_CHECKING:
    from pathlib import Path

Capture = pytest.CaptureFixture[str]


def prompt(number: int) -> Prompt:
    token_ids, text = np.array([5], np.int32), f"[bold]{number}+1="
    return Prompt(prompt_id=f"train/{number}", token_ids=token_ids, text=text, answer=str(number + 1))


def sample(
    index: int, reward: float, *, text: str = "", error: str = "", versions: tuple[int, ...] = (0,)
) -> Trajectory:
    turn = make_turn([0], range(1, 1 + len(versions)), [(version, 1) for version in versions])
    return Trajectory.of_turns(
        [turn], prompt_id="p", sample_index=index, reward=reward, timings={}, text=text, error=error,
        reward_parts={} if error else {"exact": reward}, status="failed" if error else "completed",
    )  # fmt: skip


def group(number: int, *samples: Trajectory, version: int) -> Group:
    return Group(group_id=number, prompt_id=f"train/{number}", trajectories=samples, start_version=version)


class Run:
    """Three groups of two steps, an attempt that failed, in files of two processes; three evaluations."""

    def __init__(self, path: Path, capsys: Capture) -> None:
        self.path, self.samples, self._capsys = path, path / "trajectories", capsys
        for folder in ("trajectories", "evaluations"):
            (path / folder).mkdir(parents=True)
        (path / "config.yaml").write_text("telemetry: {record_trajectories: true}\n")
        first = TrajectoryRecorder(self.samples)
        ready = group(0, sample(0, 1.0, text="one"), sample(1, 0.25, text="a quarter"), version=0)
        first.write(ready, prompt(0), "ready")
        equal = group(1, sample(0, 0.0, text="nothing"), sample(1, 0.0), version=0)
        first.write(equal, prompt(1), "filtered", reason="zero_variance")
        item = RolloutRequest(group_id=2, prompt=prompt(2), attempt=0, start_version=0)
        first.write_failure(item, "retried", reason="RuntimeError: judge is down")
        failed = sample(1, float("nan"), text="two", error="reward hung")
        self.add(group(2, sample(0, 0.5, text="half", versions=(1, 1, 2)), failed, version=1))
        for version, reward in ((9, 0.125), (9, 0.25), (10, 0.375)):
            file = first.begin_evaluation(path / "evaluations", version)
            assert file is not None
            held_out = [("hard", prompt(7), [sample(0, reward, text="held out")])]
            first.write_answers(file, held_out, version=version, status="scored")

    def add(self, one: Group) -> None:
        """In a new file."""
        TrajectoryRecorder(self.samples).write(one, prompt(one.group_id), "ready")

    def shown(self, arguments: str = "", *, code: int = 0) -> str:
        """What goes to stdout; to stderr if the code is another."""
        assert main([str(self.path), *arguments.split()]) == code
        out, err = self._capsys.readouterr()
        assert not (err if code == 0 else out)
        return out if code == 0 else err

    def values(self, arguments: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.shown(f"--json {arguments}").splitlines()]


@pytest.fixture
def run(tmp_path: Path, capsys: Capture) -> Run:
    return Run(tmp_path / "run", capsys)


@pytest.mark.parametrize(
    ("arguments", "words", "absent"),
    [
        # The newest groups, in full
        ("", ["[bold]2+1=", "answer: 3", "reward 0.500 (exact 0.500)", "half", "3 tokens", "versions 1-2",
              "failed: reward hung", "filtered: zero_variance", "retried: RuntimeError: judge is down", "step 2"], []),
        ("--failed", ["failed: reward hung", "retried: RuntimeError"], ["half"]),
        ("--evaluations --last 1", ["evaluation hard of version 10, scored", "[bold]7+1=", "answer: 8",
                                    "reward 0.375", "held out"], ["0.250"]),
        # A failure that is trained all the same, a greedy baseline
        ("--group 9", ["reward 0.500 (exact 0.500) in spite of: too slow, truncated", "greedy response: reward 0.750",
                       "greedy text"], []),
    ],
)  # fmt: skip
def test_samples_are_shown_to_people(run: Run, arguments: str, words: list[str], absent: list[str]) -> None:
    kept = replace(sample(0, 0.5, text="half"), failure="timeout", error="too slow", status="truncated")
    if "9" in arguments:
        run.add(replace(group(9, kept, version=3), baseline=sample(0, 0.75, text="greedy text")))
    text = run.shown(arguments)
    assert [word for word in words if word not in text] == [word for word in absent if word in text] == []
    if not arguments:
        assert text.index("group 0") < text.index("group 1") < text.rindex("group 2")


@pytest.mark.parametrize(
    ("arguments", "groups", "rewards"),
    [
        ("--last 3", [1, 2, 2], [[0.0, 0.0], [], [0.5, None]]),
        ("--last 1", [2], [[0.5, None]]),
        ("--group 2", [2, 2], [[], [0.5, None]]),
        ("--step 2", [2], [[0.5, None]]),
        ("--step 1", [0, 1, 2], [[1.0, 0.25], [0.0, 0.0], []]),
        ("--step 1 --last 1", [2], [[]]),
        ("--best 2", [0, 2], [[1.0], [0.5]]),  # sorted by reward, without what has none
        ("--worst 3", [1, 1, 0], [[0.0], [0.0], [0.25]]),
        ("--best 1 --step 2", [2], [[0.5]]),
        ("--worst 1 --group 0", [0], [[0.25]]),
        ("--failed", [2, 2], [[], [None]]),
        ("--failed --last 1", [2], [[None]]),
        ("--evaluations", [None] * 3, [[0.125], [0.25], [0.375]]),
        ("--evaluations --step 9", [None] * 2, [[0.125], [0.25]]),
        ("--evaluations --worst 2", [None] * 2, [[0.125], [0.25]]),
        ("--evaluations --best 1", [None], [[0.375]]),
    ],
)
def test_groups_and_responses_are_chosen(run: Run, arguments: str, groups: list[Any], rewards: list[Any]) -> None:
    found = run.values(arguments)
    assert ([one.get("group_id") for one in found], [one["rewards"] for one in found]) == (groups, rewards)


def test_values_for_programs_have_all_but_the_tokens(run: Run) -> None:
    assert run.values("--best 1 --step 2") == [{
        "group_id": 2, "start_version": 1, "status": "ready", "reason": "", "rewards": [0.5],
        "prompt": {"prompt_id": "train/2", "text": "[bold]2+1=", "answer": "3"},
        "trajectories": [{
            "sample_index": 0, "text": "half", "reward": 0.5, "reward_parts": {"exact": 0.5}, "status": "completed",
            "error": "", "num_generated_tokens": 3, "versions": [1, 2],
        }],
    }]  # fmt: skip
    attempt, ended = run.values("--failed")
    assert (attempt["group_id"], attempt["status"], attempt["reason"]) == (2, "retried", "RuntimeError: judge is down")
    assert [(one["sample_index"], one["error"]) for one in ended["trajectories"]] == [(1, "reward hung")]


def test_a_run_in_progress_is_read_up_to_its_last_whole_line(run: Run, capsys: Capture) -> None:
    newest = sorted(run.samples.iterdir())[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole + whole[: len(whole) // 2])
    assert len(run.values("--step 2")) == 1
    newest.write_bytes(b"{torn\n" + whole + b"\0\0\xff\n" + whole.replace(b'"rewards":[', b'"rewards":[1.0,'))
    assert main([str(run.path), "--json", "--step", "2"]) == 0
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (1, f"{newest}: 3 lines cannot be read; the others are\n")


def test_files_are_read_in_the_order_of_their_numbers(run: Run) -> None:
    (run.samples / "groups_mine.jsonl").write_text("whatever\n")
    (run.samples / "groups_00001.jsonl").rename(run.samples / "groups_99999.jsonl")
    run.add(group(100, sample(0, 1.0), version=5))
    assert (run.samples / "groups_100000.jsonl").exists()
    assert [one["group_id"] for one in run.values("--last 2")] == [2, 100]


def test_long_texts_are_cut_in_the_middle_and_control_characters_do_nothing(run: Run) -> None:
    bad = "\x1b[2J\x9b2J\x7f\r\u202e" + "x" * 5000 + "é THE END"
    run.add(group(9, sample(0, float("nan"), text=bad, error="\x1b]0;title\x07\ngroup 3"), version=3))
    text = run.shown("--group 9")
    assert all(c.isprintable() or c == "\n" for c in text)
    for part in (r"\x1b[2J\x9b2J\x7f\r\u202e", r"\x1b]0;title\x07", "é THE END", "characters left out", "    group 3"):
        assert part in text, part
    assert "x" * 2000 not in text
    assert "x" * 5000 in run.shown("--group 9 --chars 0")
    line = run.shown("--group 9 --json")
    assert line.isascii() and line.strip("\n").isprintable()
    assert json.loads(line)["trajectories"][0]["text"] == bad


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--step -1", "at least 0"),
        ("--last 0", "at least 1"),
        ("--best 1 --worst 1", "not allowed with"),
        ("--evaluations --group 3", "has no groups"),
    ],
)
def test_a_wrong_command_line_is_refused(run: Run, capsys: Capture, arguments: str, reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(run.path), *arguments.split()])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.touch()
    unreadable = tmp_path / "run" / "trajectories" / "groups_00007.jsonl"
    for path, reason in (
        (tmp_path / "none", f"{tmp_path / 'none'} is not a directory; give the run directory"),
        (file, f"{file} is not a directory; give the run directory"),
        (tmp_path, f"{tmp_path} holds no run: it has no config.yaml and no trajectories/; give the run directory"),
        (tmp_path / "run", f"Is a directory: '{unreadable}'"),
    ):
        assert main([str(path)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and reason in err
        unreadable.mkdir(parents=True, exist_ok=True)


def test_nothing_to_show_is_reported(run: Run) -> None:
    for arguments in ("--group 77", "--evaluations --failed"):
        assert "nothing that was recorded" in run.shown(arguments, code=1)
    for path in (*run.samples.iterdir(), *(run.path / "evaluations").iterdir()):
        path.unlink()
    assert "has no samples yet; no group has ended" in run.shown(code=1)
    (run.path / "evaluations" / "version_20.jsonl").touch()  # in progress
    assert "has no samples yet; no evaluation has ended" in run.shown("--evaluations", code=1)
    (run.path / "config.yaml").write_text("telemetry: {record_trajectories: false}\n")
    assert "with telemetry.record_trajectories=true" in run.shown(code=1)


def test_the_command_is_light_and_works_on_any_terminal_and_pager(run: Run, capsys: Capture) -> None:
    run.add(group(9, sample(0, 1.0, text="é"), version=3))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "trainer view runs/first --worst 5" in capsys.readouterr().out
    code = "import sys; from trainer.tools.view import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, str(run.path), "--group", "9"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, env=env, timeout=60, check=True)
    assert rb"\xe9" in ended.stdout
    assert not {"torch", "ray", "vllm", "transformers", "numpy"} & set(ended.stderr.decode().split())
    command = [sys.executable, "-m", "trainer", "view", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # a pager that was left
        process.wait(timeout=60)
        assert (process.returncode, process.stderr.read()) == (0, b"")
