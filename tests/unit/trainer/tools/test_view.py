"""What people read of a run's samples, without writing Python."""

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
    return Prompt(
        prompt_id=f"train/{number}",
        token_ids=np.array([5], np.int32),
        text=f"[bold]{number}+1=",
        answer=str(number + 1),
    )


def sample(
    index: int, reward: float, *, text: str = "", error: str = "", versions: tuple[int, ...] = (0,)
) -> Trajectory:
    turn = make_turn([0], range(1, 1 + len(versions)), [(version, 1) for version in versions])
    return Trajectory.of_turns(
        [turn], prompt_id="p", sample_index=index, reward=reward, timings={}, text=text, error=error,
        reward_parts={} if error else {"exact": reward}, status="failed" if error else "completed",
    )  # fmt: skip


def group(number: int, samples: list[Trajectory], *, version: int) -> Group:
    return Group(group_id=number, prompt_id=prompt(number).prompt_id, trajectories=samples, start_version=version)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three groups of two steps, an attempt that failed, in files of two processes; three evaluations."""
    run = tmp_path / "run"
    for folder in ("trajectories", "evaluations"):
        (run / folder).mkdir(parents=True)
    (run / "config.yaml").write_text("telemetry: {record_trajectories: true}\n")
    first = TrajectoryRecorder(run / "trajectories")
    first.write(
        group(0, [sample(0, 1.0, text="one"), sample(1, 0.25, text="a quarter")], version=0), prompt(0), "ready"
    )
    first.write(
        group(1, [sample(0, 0.0, text="nothing"), sample(1, 0.0)], version=0),
        prompt(1),
        "filtered",
        reason="zero_variance",
    )
    item = RolloutRequest(group_id=2, prompt=prompt(2), attempt=0, start_version=0)
    first.write_failure(item, "retried", reason="RuntimeError: judge is down")
    second = TrajectoryRecorder(run / "trajectories")
    failed = sample(1, float("nan"), text="two", error="reward hung")
    second.write(group(2, [sample(0, 0.5, text="half", versions=(1, 1, 2)), failed], version=1), prompt(2), "ready")
    for version, reward in ((9, 0.125), (9, 0.25), (10, 0.375)):
        path = second.begin_evaluation(run / "evaluations", version)
        assert path is not None
        answers = [("hard", prompt(7), [sample(0, reward, text="held out")])]
        second.write_answers(path, answers, version=version, status="scored")
    return run


def shown(run_dir: Path, capsys: Capture, *arguments: str) -> str:
    assert main([str(run_dir), *arguments]) == 0
    return capsys.readouterr().out


def values(run_dir: Path, capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(run_dir, capsys, "--json", *arguments).splitlines()]


def test_the_newest_groups_are_shown_in_full(run_dir: Path, capsys: Capture) -> None:
    text = shown(run_dir, capsys)
    for part in (
        "[bold]2+1=", "answer: 3", "reward 0.500 (exact 0.500)", "half", "3 tokens", "versions 1-2",
        "failed: reward hung", "filtered: zero_variance", "retried: RuntimeError: judge is down", "step 2",
    ):  # fmt: skip
        assert part in text, part
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
    ],
)
def test_groups_and_responses_are_chosen(
    run_dir: Path, capsys: Capture, arguments: str, groups: list[int], rewards: list[list[float | None]]
) -> None:
    found = values(run_dir, capsys, *arguments.split())
    assert ([value["group_id"] for value in found], [value["rewards"] for value in found]) == (groups, rewards)


def test_what_failed_is_shown_with_its_reason(run_dir: Path, capsys: Capture) -> None:
    attempt, ended = values(run_dir, capsys, "--failed")
    assert (attempt["group_id"], attempt["status"], attempt["reason"]) == (2, "retried", "RuntimeError: judge is down")
    assert [(one["sample_index"], one["error"]) for one in ended["trajectories"]] == [(1, "reward hung")]
    assert "half" not in shown(run_dir, capsys, "--failed")


def test_values_for_programs_have_all_but_the_tokens(run_dir: Path, capsys: Capture) -> None:
    (found,) = values(run_dir, capsys, "--best", "1", "--step", "2")
    assert found == {
        "group_id": 2, "start_version": 1, "status": "ready", "reason": "", "rewards": [0.5],
        "prompt": {"prompt_id": "train/2", "text": "[bold]2+1=", "answer": "3"},
        "trajectories": [{
            "sample_index": 0, "text": "half", "reward": 0.5, "reward_parts": {"exact": 0.5}, "status": "completed",
            "error": "", "num_generated_tokens": 3, "versions": [1, 2],
        }],
    }  # fmt: skip


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(run_dir: Path, capsys: Capture) -> None:
    newest = sorted((run_dir / "trajectories").iterdir())[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole + whole[: len(whole) // 2])
    main([str(run_dir), "--json", "--step", "2"])
    told = capsys.readouterr()
    assert (len(told.out.splitlines()), told.err) == (1, "")
    newest.write_bytes(b"{torn\n" + whole + b"\0\0\xff\n" + whole.replace(b'"rewards":[', b'"rewards":[1.0,'))
    main([str(run_dir), "--json", "--step", "2"])
    told = capsys.readouterr()
    assert (len(told.out.splitlines()), told.err) == (1, f"{newest}: 3 lines cannot be read; the others are\n")


def test_files_are_read_in_the_order_of_their_numbers(run_dir: Path, capsys: Capture) -> None:
    (run_dir / "trajectories" / "groups_mine.jsonl").write_text("whatever\n")
    folder = run_dir / "trajectories"
    (folder / "groups_00001.jsonl").rename(folder / "groups_99999.jsonl")
    TrajectoryRecorder(folder).write(group(100, [sample(0, 1.0)], version=5), prompt(100), "ready")
    assert (folder / "groups_100000.jsonl").exists()
    assert [value["group_id"] for value in values(run_dir, capsys, "--last", "2")] == [2, 100]


def test_long_texts_are_cut_in_the_middle_and_control_characters_do_nothing(run_dir: Path, capsys: Capture) -> None:
    recorder = TrajectoryRecorder(run_dir / "trajectories")
    bad = "\x1b[2J\x9b2J\x7f\r\u202e" + "x" * 5000 + "é THE END"
    recorder.write(
        group(9, [sample(0, float("nan"), text=bad, error="\x1b]0;title\x07\ngroup 3")], version=3), prompt(9), "ready"
    )
    text = shown(run_dir, capsys, "--group", "9")
    assert all(c.isprintable() or c == "\n" for c in text)
    for part in (r"\x1b[2J\x9b2J\x7f\r\u202e", r"\x1b]0;title\x07", "é THE END", "characters left out", "    group 3"):
        assert part in text, part
    assert "x" * 2000 not in text
    assert "x" * 5000 in shown(run_dir, capsys, "--group", "9", "--chars", "0")
    line = shown(run_dir, capsys, "--group", "9", "--json")
    assert line.isascii()
    assert line.strip("\n").isprintable()
    assert json.loads(line)["trajectories"][0]["text"] == bad


def test_a_terminal_without_utf8_shows_what_it_can(run_dir: Path) -> None:
    TrajectoryRecorder(run_dir / "trajectories").write(
        group(9, [sample(0, 1.0, text="é")], version=3), prompt(9), "ready"
    )
    for arguments, expected in (([], rb"\xe9"), (["--json"], rb"\u00e9")):
        command = [sys.executable, "-m", "trainer.view", str(run_dir), "--group", "9", *arguments]
        result = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout


def test_answers_of_evaluations_are_shown(run_dir: Path, capsys: Capture) -> None:
    text = shown(run_dir, capsys, "--evaluations", "--last", "1")
    for part in ("evaluation hard of version 10, scored", "[bold]7+1=", "answer: 8", "reward 0.375", "held out"):
        assert part in text, part

    def rewards(*arguments: str) -> list[float]:
        return [value["rewards"][0] for value in values(run_dir, capsys, "--evaluations", *arguments)]

    assert rewards() == [0.125, 0.25, 0.375]
    assert rewards("--step", "9") == [0.125, 0.25]
    assert rewards("--worst", "2") == [0.125, 0.25]
    assert rewards("--best", "1") == [0.375]
    assert main([str(run_dir), "--evaluations", "--failed"]) == 1


def test_a_failure_that_is_trained_all_the_same_is_shown_with_its_reward(run_dir: Path, capsys: Capture) -> None:
    kept = replace(sample(0, 0.5, text="half"), failure="timeout", error="too slow", status="truncated")
    TrajectoryRecorder(run_dir / "trajectories").write(group(9, [kept], version=3), prompt(9), "ready")
    assert "reward 0.500 (exact 0.500) in spite of: too slow, truncated" in shown(run_dir, capsys, "--last", "1")


def test_the_greedy_response_that_others_are_compared_with_is_shown(run_dir: Path, capsys: Capture) -> None:
    compared = replace(group(9, [sample(0, 1.0)], version=3), baseline=sample(0, 0.75, text="greedy text"))
    TrajectoryRecorder(run_dir / "trajectories").write(compared, prompt(9), "ready")
    text = shown(run_dir, capsys, "--last", "1")
    assert "greedy response: reward 0.750" in text
    assert "greedy text" in text


def test_a_pager_that_is_closed_is_no_failure(run_dir: Path) -> None:
    command = [sys.executable, "-m", "trainer.view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, b"")


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
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert reason in told.err
        unreadable.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--best", "0"], "must be a whole number of at least 1, got 0"),
        (["--step", "-1"], "must be a whole number of at least 0, got -1"),
        (["--evaluations", "--group", "1"], "an evaluation has no groups"),
    ],
)
def test_a_wrong_command_line_is_refused(run_dir: Path, capsys: Capture, arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(run_dir), *arguments])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_nothing_to_show_is_told(run_dir: Path, capsys: Capture) -> None:
    assert main([str(run_dir), "--group", "77"]) == 1
    assert "nothing that was recorded" in capsys.readouterr().err
    for folder in ("trajectories", "evaluations"):
        for path in (run_dir / folder).iterdir():
            path.unlink()
    assert main([str(run_dir)]) == 1
    assert "has no samples yet; no group has ended" in capsys.readouterr().err
    (run_dir / "evaluations" / "version_20.jsonl").touch()  # under way
    assert main([str(run_dir), "--evaluations"]) == 1
    assert "has no samples yet; no evaluation has ended" in capsys.readouterr().err
    (run_dir / "config.yaml").write_text("telemetry: {record_trajectories: false}\n")
    assert main([str(run_dir)]) == 1
    assert "with telemetry.record_trajectories=true" in capsys.readouterr().err


def test_help_shows_examples_and_nothing_heavy_is_imported(run_dir: Path) -> None:
    code = "import sys; from trainer.tools.view import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "group 2" in result.stdout
    assert not {"torch", "ray", "vllm", "transformers", "numpy"} & set(result.stderr.split())
    helped = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, timeout=60).stdout
    assert "--worst 5" in helped
    assert "trainer.view runs/first" in helped
