"""Recorded groups can be read back token for token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Group, Prompt, RolloutRequest, ToolUse, Trajectory, Turn
from tests.fakes.full_disk import file_limit
from trainer.telemetry.trajectories import TrajectoryRecorder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def make_group(group_id: int, *, text: str = "19", metadata: dict[str, object] | None = None) -> Group:
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
    prompt = Prompt(
        prompt_id="train/1", token_ids=np.array([5], np.int32), text="12+7=", answer="19", metadata=metadata or {}
    )
    return Group(group_id=group_id, prompt=prompt, trajectories=trajectories, start_version=2)


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_a_group_is_recorded_in_full(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, clock=lambda: 12.5)
    recorder.write(make_group(7, metadata={"level": np.int64(3)}), "filtered", reason="zero_variance")
    (line,) = recorded(tmp_path)
    assert (line["group_id"], line["status"], line["reason"], line["start_version"]) == (
        7,
        "filtered",
        "zero_variance",
        2,
    )
    assert line["time_s"] == 12.5
    assert line["rewards"] == [1.25, None]
    assert line["baseline"] is None
    assert line["prompt"]["text"] == "12+7="
    assert line["prompt"]["metadata"] == {"level": 3}
    good, failed = line["trajectories"]
    assert (failed["status"], failed["reward"], failed["error"]) == ("failed", None, "reward hung")
    assert (good["text"], good["versions"], good["reward_parts"]) == ("19", [2, 3], {"exact": 1.0})
    assert good["tool_use"] == {"num_calls": 2, "num_errors": 1}
    assert failed["tool_use"] is None
    assert good["turns"] == [
        {
            "token_ids": [5, 6, 7, 8, 9], "generated": [[1, 3], [4, 5]], "logprobs": [-0.5, -0.5, -0.5],
            "reward": 0.25, "segments": [[2, 1], [3, 2]], "begins_anew": False,
        }
    ]  # fmt: skip


def test_an_attempt_that_raised_is_recorded_with_prompt_attempts_and_reason(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, clock=lambda: 12.5)
    item = RolloutRequest(group_id=7, prompt=make_group(7).prompt, start_version=2, attempt=1, num_worker_losses=1)
    recorder.write_failure(item, "dropped", reason="TimeoutError: no sample ended")
    (line,) = recorded(tmp_path)
    assert (line["status"], line["reason"], line["attempts"]) == ("dropped", "TimeoutError: no sample ended", 3)
    assert (line["group_id"], line["start_version"], line["time_s"]) == (7, 2, 12.5)
    assert line["prompt"]["prompt_id"] == "train/1"
    assert (line["rewards"], line["trajectories"], line["baseline"]) == ([], [], None)
    recorder.write(make_group(8), "ready")
    assert recorder.num_groups == 1, "a failure is no group"
    assert recorded(tmp_path)[1].keys() - {"attempts"} == line.keys() - {"attempts"}


def test_files_rotate_by_size_and_a_new_process_begins_a_new_file(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, max_file_bytes=2000)
    for group_id in range(5):
        recorder.write(make_group(group_id, text="x" * 900), "ready")
    TrajectoryRecorder(tmp_path).write(make_group(5), "ready")
    assert [line["group_id"] for line in recorded(tmp_path)] == list(range(6))
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert all(size <= 2000 for size in sizes)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == f"groups_{len(sizes) - 1:05d}.jsonl"


def test_past_its_limit_a_folder_gets_no_more_which_is_told_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TrajectoryRecorder(tmp_path).write(make_group(0), "ready")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    recorder = TrajectoryRecorder(tmp_path, max_bytes=int(3.5 * size), max_file_bytes=size)
    for group_id in range(1, 5):  # what the process before has written counts
        recorder.write(make_group(group_id), "ready")
    item = RolloutRequest(group_id=7, prompt=make_group(7).prompt, start_version=2)
    recorder.write_failure(item, "dropped", reason="nothing of it is written, however small")
    assert [line["group_id"] for line in recorded(tmp_path)] == [0, 1, 2]
    assert (recorder.num_groups, recorder.num_left_out, recorder.num_errors) == (2, 3, 0)
    (warning,) = caplog.messages
    assert f"{tmp_path} has what telemetry.trajectories_gib=" in warning


def test_an_evaluation_that_has_begun_is_whole_and_later_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups, evaluations = tmp_path / "trajectories", tmp_path / "evaluations"
    for folder in (groups, evaluations):
        folder.mkdir()
    recorder = TrajectoryRecorder(groups, max_bytes=10)
    path = recorder.begin_evaluation(evaluations, 4)
    assert path is not None
    write_answers(recorder, path)
    assert recorder.begin_evaluation(evaluations, 5) is recorder.begin_evaluation(evaluations, 6) is None
    assert [path.name for path in evaluations.iterdir()] == ["version_4.jsonl"]
    assert len(recorded(evaluations)) == 1 and not recorded(groups)
    recorder.write(make_group(0), "ready")
    assert (recorder.num_left_out, recorder.num_errors) == (3, 0)
    assert len(caplog.messages) == 2, "once for each folder"


def test_metadata_that_json_cannot_say_is_kept_as_text(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path).write(make_group(0, metadata={"image": b"\x00"}), "ready")
    assert "image" in recorded(tmp_path)[0]["prompt"]["metadata"]["repr"]


def test_a_disk_that_refuses_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path / "missing")
    recorder.write(make_group(0), "ready")
    recorder.write(make_group(1), "ready")
    assert (recorder.num_groups, recorder.num_errors) == (0, 2)


def with_half_a_pair() -> Group:
    """As a reward or a data set makes it that cuts a text in the middle of an emoji."""
    group = make_group(3, metadata={"source": ["fine", "\ud83d"], "\udc00": 1})
    failed = replace(group.trajectories[1], error="ValueError: \ud83d is no number")
    return replace(group, prompt=replace(group.prompt, answer="ä \ud83d"), trajectories=[group.trajectories[0], failed])


def test_half_a_surrogate_pair_is_escaped_and_the_group_kept(tmp_path: Path) -> None:
    recorder, group = TrajectoryRecorder(tmp_path), with_half_a_pair()
    recorder.write(group, "ready")
    item = RolloutRequest(group_id=4, prompt=group.prompt, start_version=2)
    recorder.write_failure(item, "dropped", reason="RewardFailed: \udfff")
    line, failure = recorded(tmp_path)
    assert line["prompt"]["answer"] == "ä \\ud83d"
    assert line["prompt"]["metadata"] == {"source": ["fine", "\\ud83d"], "\\udc00": 1}
    assert [one["error"] for one in line["trajectories"]] == ["", "ValueError: \\ud83d is no number"]
    assert line["rewards"] == [1.25, None]
    assert failure["reason"] == "RewardFailed: \\udfff"
    assert (recorder.num_groups, recorder.num_errors) == (1, 0)


def test_half_a_surrogate_pair_costs_no_answers_of_an_evaluation(tmp_path: Path) -> None:
    recorder, groups = TrajectoryRecorder(tmp_path), (make_group(0), with_half_a_pair(), make_group(1))
    path = recorder.begin_evaluation(tmp_path, 4)
    assert path is not None
    answers = [("", group.prompt, group.trajectories) for group in groups]
    recorder.write_answers(path, answers, version=4, status="failed", reason="first: \ud83d")
    assert [line["prompt"]["answer"] for line in recorded(tmp_path)] == ["19", "ä \\ud83d", "19"]
    assert {line["reason"] for line in recorded(tmp_path)} == {"first: \\ud83d"}
    assert recorder.num_errors == 0


def test_a_group_that_cannot_be_encoded_is_counted_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, group = TrajectoryRecorder(tmp_path), make_group(0)
    endless: dict[str, Any] = {}
    endless["exact"] = endless
    for parts in (endless, {"exact": object()}, {"exact": object()}):
        broken = replace(group.trajectories[0], reward_parts=parts)  # type: ignore[arg-type]
        recorder.write(replace(group, trajectories=[broken]), "ready")
    recorder.write(make_group(1), "ready")
    assert [line["group_id"] for line in recorded(tmp_path)] == [1]
    assert (recorder.num_groups, recorder.num_errors) == (1, 3)
    assert caplog.text.count("cannot be written") == 2, "once for each kind of error"


def test_a_baseline_is_recorded_apart_from_what_is_trained(tmp_path: Path) -> None:
    group = make_group(1)
    greedy = replace(group.trajectories[0], sample_index=2, reward=0.5, text="18")
    TrajectoryRecorder(tmp_path).write(replace(group, baseline=greedy), "ready")
    (line,) = recorded(tmp_path)
    assert [t["sample_index"] for t in line["trajectories"]] == [0, 1]
    assert (line["baseline"]["sample_index"], line["baseline"]["reward"], line["baseline"]["text"]) == (2, 0.5, "18")


def write_answers(recorder: TrajectoryRecorder, path: Path, **how: Any) -> None:
    group = make_group(0)
    told = {"version": 4, "status": "scored"} | how
    recorder.write_answers(path, [("", group.prompt, group.trajectories)], **told)


def test_the_answers_of_an_evaluation_are_recorded_as_those_of_a_group(tmp_path: Path) -> None:
    groups, evaluations = tmp_path / "trajectories", tmp_path / "evaluations"
    groups.mkdir()
    evaluations.mkdir()
    recorder = TrajectoryRecorder(groups, clock=lambda: 12.5)
    path = recorder.begin_evaluation(evaluations, 4)
    assert path is not None and path == evaluations / "version_4.jsonl"
    assert path.read_bytes() == b""
    write_answers(recorder, path, status="failed", reason="1 of 2 answers have no reward")
    recorder.write(make_group(0), "ready")
    (line,), (group,) = recorded(evaluations), recorded(groups)
    assert (line["status"], line["reason"]) == ("failed", "1 of 2 answers have no reward")
    assert (line["version"], line["time_s"]) == (4, 12.5)
    for name in ("prompt", "rewards", "trajectories"):
        assert line[name] == group[name]


def test_answers_are_numbered_within_their_prompt(tmp_path: Path) -> None:
    """Their own numbers are places in the whole evaluation."""
    recorder, group = TrajectoryRecorder(tmp_path), make_group(0)
    path = recorder.begin_evaluation(tmp_path, 4)
    assert path is not None
    placed = [replace(trajectory, sample_index=8 + i) for i, trajectory in enumerate(group.trajectories)]
    recorder.write_answers(path, [("", group.prompt, placed)], version=4, status="scored")
    assert [t["sample_index"] for t in recorded(tmp_path)[0]["trajectories"]] == [0, 1]


def test_every_evaluation_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(3):  # of processes
        recorder = TrajectoryRecorder(tmp_path)
        path = recorder.begin_evaluation(tmp_path, 4)
        assert path is not None
        write_answers(recorder, path, reason=str(number))
    names = ["version_4.jsonl", "version_4.2.jsonl", "version_4.3.jsonl"]
    assert [[json.loads(line)["reason"] for line in (tmp_path / n).read_text().splitlines()] for n in names] == [
        ["0"],
        ["1"],
        ["2"],
    ]


def test_answers_that_cannot_be_written_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TrajectoryRecorder(tmp_path)
    assert recorder.begin_evaluation(tmp_path / "missing", 4) is None
    write_answers(recorder, tmp_path / "missing" / "version_4.jsonl")
    unknown = replace(make_group(0).trajectories[0], timings={"generate_s": object()})  # type: ignore[dict-item]
    path = recorder.begin_evaluation(tmp_path, 4)
    assert path is not None
    prompt, good = make_group(0).prompt, make_group(0).trajectories
    answers = [("", prompt, good), ("", prompt, [unknown]), ("", prompt, good)]
    recorder.write_answers(path, answers, version=4, status="scored")
    assert len(recorded(tmp_path)) == 1, "after the first that cannot be written the rest is left out"
    assert (recorder.num_errors, recorder.num_groups) == (3, 0)
    assert caplog.text.count("is not complete") == 3 and "version_4.jsonl" in caplog.text


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    recorder, group = TrajectoryRecorder(tmp_path), make_group(0)
    path = recorder.begin_evaluation(tmp_path, 4)
    assert path is not None
    write_answers(recorder, path)
    size = path.stat().st_size
    path.write_bytes(b"")
    with file_limit(int(2.5 * size)):
        recorder.write_answers(path, [("", group.prompt, group.trajectories)] * 4, version=4, status="scored")
    assert len(recorded(tmp_path)) == 2
    assert recorder.num_errors == 1


def test_a_group_behind_one_that_a_full_disk_refused_can_be_read(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path)
    recorder.write(make_group(0), "ready")
    (path,) = tmp_path.iterdir()
    with file_limit(path.stat().st_size + 20):
        recorder.write(make_group(1), "ready")
    recorder.write(make_group(2), "ready")
    assert [line["group_id"] for line in recorded(tmp_path)] == [0, 2]
    assert (recorder.num_groups, recorder.num_errors) == (2, 1)


def test_files_of_somebody_else_in_the_folder_stop_nothing(tmp_path: Path) -> None:
    for name in ("groups_00003.jsonl", "groups_best.jsonl"):
        (tmp_path / name).write_text("{}\n")
    TrajectoryRecorder(tmp_path).write(make_group(1), "ready")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "groups_00003.jsonl",
        "groups_00004.jsonl",
        "groups_best.jsonl",
    ]
