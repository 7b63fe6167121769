"""The contract of an own group filter: what a filter sees, wrong ones, the command line, and the document's example."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Group, Prompt
from tests.fakes.scripted_run import trajectory
from tests.unit.trainer.tools.test_plugin_contracts import broken
from trainer.algorithms.group_filter import FinishedGroup, GroupFilterError, own_group_filter
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.compose import load_config
from trainer.driver import loops, preflight
from trainer.errors import ConfigurationError
from trainer.tools import check_plugin
from trainer.tools.plugin_contracts import assert_contract, group_filter_checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import TrajectoryStatus

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs" / "data_selection.md").read_text()


PROMPT = Prompt(prompt_id="train/4", token_ids=np.array([1], np.int32), text="q", answer="a", metadata={"level": 3})


def group_of(rewards: Sequence[float], statuses: Sequence[TrajectoryStatus] | None = None) -> Group:
    given = ["completed"] * len(rewards) if statuses is None else statuses
    answers = [
        replace(trajectory(PROMPT, i, [(0, i + 1)], reward=reward), status=status)
        for i, (reward, status) in enumerate(zip(rewards, given, strict=True))
    ]
    return Group(group_id=7, prompt_id=PROMPT.prompt_id, trajectories=answers, start_version=0)


def test_a_filter_sees_the_judged_answers_and_the_prompt() -> None:
    seen = FinishedGroup.of(group_of([1.0, float("nan"), 0.5], ["truncated", "failed", "completed"]), PROMPT)
    assert seen.rewards_G.tolist() == [1.0, 0.5]
    assert seen.lengths_G.tolist() == [1, 3]
    assert seen.is_truncated_G.tolist() == [True, False]
    assert (seen.num_failed, seen.prompt.metadata["level"]) == (1, 3)


def mostly_wrong(group: FinishedGroup, *, wrong: str = "") -> Any:
    reason = "mostly_wrong" if group.rewards_G.mean() < 0.3 else None
    match wrong:
        case "":
            return reason
        case "bool":
            return reason is not None
        case "words":
            return "mostly wrong"
        case "path":
            return "mostly/wrong"
        case "built-in":
            return "zero_variance"
        case "empty":
            return ""
        case "random":
            return f"r{time.perf_counter_ns() % 1000}"
        case "in place":
            group.rewards_G.sort()
            return reason
        case "metadata":
            group.prompt.metadata.clear()  # type: ignore[attr-defined]
            return reason
        case "first":
            return "first" if group.rewards_G[0] > group.rewards_G[-1] else None
        case "all":
            return "everything"
        case "raises":
            return group.prompt.metadata["nowhere"]
        case "slow":
            time.sleep(0.02)
            return reason
        case _:
            raise ValueError(wrong)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("bool", "gave False"),
        ("words", "'mostly wrong'; allowed are None"),
        ("path", "'mostly/wrong'"),
        ("built-in", "other than rewards_failed and zero_variance"),
        ("empty", "gave ''"),
        ("random", "two calls give the same"),
        ("in place", "leaves the group alone"),
        ("metadata", "leaves the group alone"),
        ("first", "the order of answers"),
        ("all", "every group was filtered (everything)"),
        ("raises", "KeyError: 'nowhere'"),
        ("slow", "a call takes less"),
    ],
)
def test_a_wrong_filter_breaks_its_rule(wrong: str, rule: str) -> None:
    metadata = {"level": 3}
    assert_contract(group_filter_checks(mostly_wrong, metadata=metadata))
    assert rule in broken(group_filter_checks(partial(mostly_wrong, wrong=wrong), metadata=metadata))


def configured(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(group_filter=f"{__name__}.{name}")


def test_it_is_asked_after_the_built_in_filters() -> None:
    own = own_group_filter(configured("mostly_wrong"))
    assert own is not None
    reasons = [
        loops.filter_reason(group, PROMPT, dynamic_sampling=True, own=own)
        for group in (
            group_of([0.0, 0.0, 1.0, 0.0]),
            group_of([0.0, 0.0]),
            group_of([0.0, 1.0]),
            group_of([0.0, float("nan")], ["completed", "failed"]),
        )
    ]
    assert reasons == ["mostly_wrong", "zero_variance", "", "rewards_failed"]
    assert own_group_filter(AlgorithmConfig()) is None


def says_true(_group: FinishedGroup) -> bool:
    return True


def raises(group: FinishedGroup) -> object:
    return group.prompt.metadata["nowhere"]


@pytest.mark.parametrize(("name", "words"), [("says_true", "gave True"), ("raises", "raised KeyError: 'nowhere'")])
def test_a_filter_that_fails_in_a_run_is_told_with_its_group(name: str, words: str) -> None:
    own = own_group_filter(configured(name))
    assert own is not None
    with pytest.raises(GroupFilterError, match=rf"{name} {words}.* \(group 7, prompt train/4\)"):
        own(group_of([1.0, 0.0]), PROMPT)


def test_a_path_that_leads_nowhere_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'mostly_wrong'") as error:
        preflight.check_own_functions(load_config(["device=cpu", f"algorithm.group_filter={__name__}.mostly_rong"]))
    assert error.value.problems[0].key == "algorithm.group_filter"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the document, where Python finds it."""
    ((name, code),) = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    path = tmp_path / name.replace("my_package", "my_filters_for_test")
    path.parent.mkdir()
    path.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


@pytest.mark.usefixtures("package")
def test_the_example_of_the_document_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^python -m trainer\.check_plugin (.*)$", DOCUMENT, re.MULTILINE)
    line = shlex.split(command.replace("my_package", "my_filters_for_test"))
    assert check_plugin.main(line) == check_plugin.EXIT_KEPT, capsys.readouterr().out
    assert "all 6 checks passed" in capsys.readouterr().out


def test_columns_for_the_trial_come_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["group_filter", f"{__name__}.raises"]
    assert check_plugin.main(line) == check_plugin.EXIT_BROKEN
    assert "KeyError: 'nowhere'" in capsys.readouterr().out
    assert check_plugin.main([*line, "--metadata", '{"nowhere": null}']) == check_plugin.EXIT_KEPT
