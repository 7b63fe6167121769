"""Waits beside evaluations are told from waits for generation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.unit.trainer.advise.test_advise import SETUP, play, taking_turns
from trainer.config.convert import to_plain
from trainer.config.schema import RunConfig
from trainer.tools.advise import diagnose, in_words, main
from trainer.tools.run_records import read_counted

if TYPE_CHECKING:
    from pathlib import Path


def write_run(run_dir: Path, *, waits_s: tuple[float, float], beside_s: tuple[float, float], replicas: int = 1) -> None:
    """Learning and generation take 4 s a step, at once. Odd and even steps wait `waits_s` more for groups, of that
    `beside_s` beside an evaluation, with engines that are hardly ever idle."""
    run_dir.mkdir()
    data: dict[str, Any] = to_plain(RunConfig())
    data["learner"]["num_ranks"], data["rollout"]["num_replicas"] = 4, replicas
    data["rollout"]["tensor_parallel_size"], data["device"]["name"] = 4, "cuda"
    data["trainer"]["eval_every"] = 2
    (run_dir / "config.yaml").write_text(yaml.safe_dump(data))
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            wait_s, evaluation_s = waits_s[step % 2 - 1], beside_s[step % 2 - 1]
            record = {
                "step": step, "perf/step_s": 4 + wait_s, "learner/step_s": 4.0, "wait/learner_for_data_s": wait_s,
                "wait/learner_for_evaluation_s": evaluation_s, "wait/learner_for_sync_s": 0.0, "sync/pack_s": 0.0,
                "buffer/forced_wait_s": 0.0, "wait/engines_idle_s": 0.1, "wait/producer_for_slots_s": 0.0,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def test_waits_beside_evaluations_ask_for_fewer_of_them_and_not_for_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", waits_s=(0.2, 10.0), beside_s=(0.0, 10.0))
    assert main([str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "evaluation_waits"
    assert found["recommendation"]["keys"] == {"trainer.eval_every": 4}
    assert found["recommendation"]["step_s"] == pytest.approx(9.1 - 5 / 2, rel=0.05)
    assert found["shares"]["learner_waits_for_data"] == pytest.approx(0.1 / 9.1, rel=0.1)
    assert found["shares"]["learner_waits_for_evaluation"] == pytest.approx(5 / 9.1, rel=0.05)
    assert found["generation_s"] == pytest.approx(4.0, rel=0.05), "engines that answer an evaluation generate no groups"
    assert main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "and for evaluations" in text and "Advice: trainer.eval_every=4" in text
    assert "task.eval_size" in text and "a second engine" in text
    assert "generation is the slower side" not in text


def test_a_wait_beside_an_evaluation_that_has_one_of_several_engines_is_its_doing_in_part(tmp_path: Path) -> None:
    write_run(tmp_path / "run", waits_s=(8.0, 8.0), beside_s=(8.0, 8.0), replicas=4)
    (line, *_) = read_counted(tmp_path / "run").lines
    assert (line.evaluation_wait_s, line.data_wait_s) == (2.0, 6.0)


def test_evaluations_that_are_the_smaller_wait_are_named_beside_the_advice() -> None:
    lines = [
        replace(line, data_wait_s=line.data_wait_s - 1.0, evaluation_wait_s=1.0, engines_idle_s=0.0)
        for line in play(9.0, 3.0)[0]
    ]
    told = diagnose(lines[5:], SETUP, trace=None)
    assert told.findings.verdict == "learner_waits"
    assert told.findings.other_s == pytest.approx(1.0), "no split of the devices makes it shorter"
    assert any("11% of the time the learner waited for them" in limit for limit in told.findings.limits)
    little = diagnose([replace(line, evaluation_wait_s=0.1) for line in lines[5:]], SETUP, trace=None)
    assert "valuations limit" not in in_words(little, SETUP)
    assert "for evaluations" not in in_words(little, SETUP)


def test_evaluations_at_the_start_alone_leave_no_period_to_change() -> None:
    lines = [replace(line, data_wait_s=0.0, evaluation_wait_s=6.0, engines_idle_s=0.0) for line in play(9.0, 3.0)[0]]
    told = diagnose(lines[5:], SETUP, trace=None).recommendation
    assert (told.keys, told.step_s) == ({}, None)
    assert "task.eval_size" in told.why


def test_another_division_of_the_devices_comes_with_what_is_not_known_of_it() -> None:
    def unknown(generate_s: float, learn_s: float, **setup: Any) -> str:
        lines, _, _ = play(generate_s, learn_s)
        return in_words(diagnose(lines[5:], replace(SETUP, **setup), trace=None), replace(SETUP, **setup))

    split = unknown(9.0, 3.0)
    assert "`python -m trainer --dry-run learner.num_ranks=2 rollout.num_replicas=6`" in split
    assert "What communication" in split
    assert "--dry-run rollout.num_replicas=2`" in unknown(9.0, 3.0, num_ranks=1, num_replicas=1)
    assert "--dry-run" not in unknown(5.0, 5.0), "nothing is to be changed"
    turns = replace(SETUP, max_staleness=0, takes_turns=True)
    slow = [replace(line, step_s=16.0, engines_idle_s=7.0) for line in taking_turns(9.0, 3.0)]
    assert "--dry-run mode=async mode.max_staleness=1 " in in_words(diagnose(slow, turns, trace=None), turns)
