"""Recorded groups can be read back token for token; what cannot be recorded is counted, and stops nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Group, Prompt, RolloutRequest, ToolUse, Trajectory, Turn
from tests.fakes.full_disk import file_limit
from trainer.telemetry.trajectories import TrajectoryRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


PROMPT = Prompt(prompt_id="train/1", token_ids=np.array([5], np.int32), text="12+7=", answer="19")


def make_group(group_id: int = 0, *, text: str = "19") -> Group:
    is_generated = np.array([False, True, True, False, True])
    turn = Turn(
        token_ids=np.array([5, 6, 7, 8, 9], np.int32),
        is_generated=is_generated,
        logprobs=np.where(is_generated, np.float32(-0.5), 0).astype(np.float32),
        versions=np.array([-1, 2, 3, -1, 3], np.int32),
        reward=0.25,
    )
    trajectories = [
        Trajectory.of_turns(
            [turn], prompt_id="train/1", sample_index=0, reward=1.0, reward_parts={"exact": 1.0},
            status="completed", timings={"generate_s": 0.5}, text=text,
            tool_use=ToolUse(num_calls=2, num_errors=1),
        ),
        Trajectory.of_turns(
            [], prompt_id="train/1", sample_index=1, reward=float("nan"), reward_parts={}, status="failed",
            timings={}, error="reward hung",
        ),
    ]  # fmt: skip
    return Group(group_id=group_id, prompt_id="train/1", trajectories=trajectories, start_version=2)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    return tmp_path / "trajectories"


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    (tmp_path / "evaluations").mkdir()
    return tmp_path / "evaluations"


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def write_evaluation(
    recorder: TrajectoryRecorder, folder: Path, groups: Sequence[Group], *, prompt: Prompt = PROMPT, **how: Any
) -> Path:
    path = recorder.begin_evaluation(folder, 4)
    assert path is not None and path.read_bytes() == b""
    answers = [("", prompt, group.trajectories) for group in groups]
    recorder.write_answers(path, answers, **({"version": 4, "status": "scored"} | how))
    return path


def test_a_group_is_recorded_in_full(tmp_path: Path) -> None:
    recorder, group = TrajectoryRecorder(tmp_path, clock=lambda: 12.5), make_group(7)
    group = replace(group, baseline=replace(group.trajectories[0], sample_index=2, reward=0.5, text="18"))
    recorder.write(group, replace(PROMPT, metadata={"level": np.int64(3)}), "filtered", reason="zero_variance")
    (line,) = recorded(tmp_path)
    about = [line[name] for name in ("group_id", "status", "reason", "start_version", "time_s")]
    assert about == [7, "filtered", "zero_variance", 2, 12.5]
    assert line["rewards"] == [1.25, None]
    assert [line["baseline"][name] for name in ("sample_index", "reward", "text")] == [2, 0.5, "18"]
    assert (line["prompt"]["text"], line["prompt"]["metadata"]) == ("12+7=", {"level": 3})
    good, failed = line["trajectories"]
    assert (failed["status"], failed["reward"], failed["error"]) == ("failed", None, "reward hung")
    assert (good["text"], good["versions"], good["reward_parts"]) == ("19", [2, 3], {"exact": 1.0})
    assert (good["tool_use"], failed["tool_use"]) == ({"num_calls": 2, "num_errors": 1}, None)
    assert good["turns"] == [
        {
            "token_ids": [5, 6, 7, 8, 9], "generated": [[1, 3], [4, 5]], "logprobs": [-0.5, -0.5, -0.5],
            "reward": 0.25, "segments": [[2, 1], [3, 2]], "begins_anew": False,
        }
    ]  # fmt: skip


def test_an_attempt_that_raised_is_recorded_with_prompt_attempts_and_reason(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, clock=lambda: 12.5)
    item = RolloutRequest(group_id=7, prompt=PROMPT, start_version=2, attempt=1, num_worker_losses=1)
    recorder.write_failure(item, "dropped", reason="TimeoutError: no sample ended")
    (line,) = recorded(tmp_path)
    assert (line["status"], line["reason"], line["attempts"]) == ("dropped", "TimeoutError: no sample ended", 3)
    assert (line["group_id"], line["start_version"], line["time_s"]) == (7, 2, 12.5)
    assert line["prompt"]["prompt_id"] == "train/1"
    assert (line["rewards"], line["trajectories"], line["baseline"]) == ([], [], None)
    recorder.write(make_group(8), PROMPT, "ready")
    assert recorded(tmp_path)[1].keys() - {"attempts"} == line.keys() - {"attempts"}


def test_responses_of_an_evaluation_are_recorded_as_those_of_a_group(groups: Path, evaluations: Path) -> None:
    recorder, group = TrajectoryRecorder(groups, clock=lambda: 12.5), make_group()
    # Their own numbers are places in the whole evaluation; recorded are those within the prompt.
    placed = [replace(trajectory, sample_index=8 + i) for i, trajectory in enumerate(group.trajectories)]
    recorder.write(group, PROMPT, "ready")
    (of_group,) = recorded(groups)
    for name in ("version_4.jsonl", "version_4.2.jsonl", "version_4.3.jsonl"):  # one file each, of processes
        how: dict[str, Any] = {"status": "failed", "reason": name}
        path = write_evaluation(recorder, evaluations, [replace(group, trajectories=placed)], **how)
        assert path == evaluations / name
        line = json.loads(path.read_text())
        assert [line[key] for key in ("status", "reason", "version", "time_s")] == ["failed", name, 4, 12.5]
        for key in ("prompt", "rewards", "trajectories"):
            assert line[key] == of_group[key]


def test_files_rotate_by_size_and_a_new_process_begins_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "groups_best.jsonl").write_text("")  # somebody else's
    recorder = TrajectoryRecorder(tmp_path, max_file_bytes=2000)
    for group_id in range(5):
        recorder.write(make_group(group_id, text="x" * 900), PROMPT, "ready")
    TrajectoryRecorder(tmp_path).write(make_group(5), PROMPT, "ready")
    assert [line["group_id"] for line in recorded(tmp_path)] == list(range(6))
    files = sorted(tmp_path.glob("groups_0*"))
    assert all(path.stat().st_size <= 2000 for path in files)
    assert [path.name for path in files] == [f"groups_{n:05d}.jsonl" for n in range(len(files))]


def test_past_its_limit_a_folder_gets_no_more_which_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TrajectoryRecorder(tmp_path).write(make_group(0), PROMPT, "ready")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    recorder = TrajectoryRecorder(tmp_path, max_bytes=int(3.5 * size), max_file_bytes=size)
    for group_id in range(1, 5):  # what an earlier process has written counts
        recorder.write(make_group(group_id), PROMPT, "ready")
    item = RolloutRequest(group_id=7, prompt=PROMPT, start_version=2)
    recorder.write_failure(item, "dropped", reason="nothing of it is written, however small")
    assert [line["group_id"] for line in recorded(tmp_path)] == [0, 1, 2]
    assert (recorder.num_skipped, recorder.num_errors) == (3, 0)
    (warning,) = caplog.messages
    assert f"{tmp_path} has reached telemetry.max_trajectories_gib=" in warning


def test_groups_wait_in_the_background_while_something_more_urgent_computes(groups: Path) -> None:
    recorder = TrajectoryRecorder(groups)
    with ThreadPoolExecutor(1) as thread, recorder.held():
        recorder.in_background(thread, recorder.write, make_group(1), PROMPT, "ready")
        with pytest.raises(TimeoutError):
            thread.submit(int).result(0.2)
        assert recorded(groups) == []
    assert [line["group_id"] for line in recorded(groups)] == [1]


def test_an_evaluation_that_has_begun_is_whole_and_later_ones_are_skipped(
    groups: Path, evaluations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TrajectoryRecorder(groups, max_bytes=10)
    write_evaluation(recorder, evaluations, [make_group()])
    assert recorder.begin_evaluation(evaluations, 5) is recorder.begin_evaluation(evaluations, 6) is None
    assert [path.name for path in evaluations.iterdir()] == ["version_4.jsonl"]
    recorder.write(make_group(), PROMPT, "ready")
    assert len(recorded(evaluations)) == 1 and not recorded(groups)
    assert (recorder.num_skipped, recorder.num_errors) == (3, 0)
    assert len(caplog.messages) == 2, "once for each folder"


def test_metadata_that_json_cannot_hold_is_kept_as_text(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path).write(make_group(0), replace(PROMPT, metadata={"image": b"\x00"}), "ready")
    assert "image" in recorded(tmp_path)[0]["prompt"]["metadata"]["repr"]


def test_half_a_surrogate_pair_is_escaped_and_costs_nothing(groups: Path, evaluations: Path) -> None:
    """As a reward or a data set makes it that cuts a text in the middle of an emoji."""
    prompt = replace(PROMPT, answer="ä \ud83d", metadata={"source": ["fine", "\ud83d"], "\udc00": 1})
    group = make_group(3)
    failed = replace(group.trajectories[1], error="ValueError: \ud83d is no number")
    group = replace(group, trajectories=[group.trajectories[0], failed])
    recorder = TrajectoryRecorder(groups)
    recorder.write(group, prompt, "ready")
    item = RolloutRequest(group_id=4, prompt=prompt, start_version=2)
    recorder.write_failure(item, "dropped", reason="RewardFailed: \udfff")
    write_evaluation(recorder, evaluations, [group] * 2, prompt=prompt, reason="first: \ud83d")
    line, failure = recorded(groups)
    assert line["prompt"]["answer"] == "ä \\ud83d"
    assert line["prompt"]["metadata"] == {"source": ["fine", "\\ud83d"], "\\udc00": 1}
    assert [one["error"] for one in line["trajectories"]] == ["", "ValueError: \\ud83d is no number"]
    assert failure["reason"] == "RewardFailed: \\udfff"
    assert [line["prompt"]["answer"] for line in recorded(evaluations)] == ["ä \\ud83d"] * 2
    assert {line["reason"] for line in recorded(evaluations)} == {"first: \\ud83d"}
    assert recorder.num_errors == 0


def test_a_group_that_cannot_be_encoded_is_counted_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, group = TrajectoryRecorder(tmp_path), make_group()
    endless: dict[str, Any] = {}
    endless["exact"] = endless
    for parts in (endless, {"exact": object()}, {"exact": object()}):
        broken = replace(group.trajectories[0], reward_parts=parts)  # type: ignore[arg-type]
        recorder.write(replace(group, trajectories=[broken]), PROMPT, "ready")
    recorder.write(make_group(1), PROMPT, "ready")
    assert [line["group_id"] for line in recorded(tmp_path)] == [1]
    assert recorder.num_errors == 3
    assert caplog.text.count("cannot be written") == 2, "once for each kind of error"


def test_responses_that_cannot_be_written_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, group = TrajectoryRecorder(tmp_path), make_group()
    assert recorder.begin_evaluation(tmp_path / "missing", 4) is None
    unknown = replace(group.trajectories[0], timings={"generate_s": object()})  # type: ignore[dict-item]
    write_evaluation(recorder, tmp_path, [group, replace(group, trajectories=[unknown]), group])
    assert len(recorded(tmp_path)) == 1, "after the first that cannot be written the rest is left out"
    assert recorder.num_errors == 2
    assert caplog.text.count("is incomplete") == 2 and "version_4.jsonl" in caplog.text


def test_a_full_disk_costs_what_it_refuses_and_leaves_no_half_line(groups: Path, evaluations: Path) -> None:
    recorder = TrajectoryRecorder(groups)
    recorder.write(make_group(0), PROMPT, "ready")
    (path,) = groups.iterdir()
    with file_limit(path.stat().st_size + 20):
        recorder.write(make_group(1), PROMPT, "ready")
    recorder.write(make_group(2), PROMPT, "ready")
    assert [line["group_id"] for line in recorded(groups)] == [0, 2]
    size = write_evaluation(recorder, evaluations, [make_group()]).stat().st_size
    with file_limit(int(2.5 * size)):
        write_evaluation(recorder, evaluations, [make_group()] * 4)
    assert len((evaluations / "version_4.2.jsonl").read_text().splitlines()) == 2
    assert recorder.num_errors == 2
