"""`task.eval_sets` as a configuration: a map of sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.config.compose import load_config
from trainer.config.describe import describe_rollout
from trainer.config.docs import configuration_markdown
from trainer.config.plain import to_plain, to_run_config
from trainer.config.rules import RESERVED_NAMES
from trainer.config.schema import EvalSetConfig
from trainer.errors import ConfigurationError
from trainer.telemetry.metrics import METRICS, find_row

if TYPE_CHECKING:
    from pathlib import Path

SAMPLED = "trainer.eval_temperature=1"
HARD = "task.eval_sets.hard.path=builtin:arithmetic"


def refused(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["device=cpu", *overrides])
    return {problem.key: problem.allowed for problem in caught.value.problems}


def test_sets_are_written_whole_or_key_by_key_and_come_back_from_a_file() -> None:
    whole = load_config(["device=cpu", SAMPLED, "task.eval_sets={hard: {path: 'builtin:arithmetic', samples: 8}}"])
    single = load_config(["device=cpu", SAMPLED, HARD, "task.eval_sets.hard.samples=8"])
    assert whole == single
    assert whole.task.eval_sets == {"hard": EvalSetConfig(path="builtin:arithmetic", samples=8)}
    again, problems = to_run_config(to_plain(whole))
    assert (again, problems) == (whole, [])


def test_a_path_with_special_characters_needs_no_second_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1],b.jsonl").write_text("")
    config = load_config(["device=cpu", "task.eval_sets.odd.path=a[1],b.jsonl"])
    assert config.task.eval_sets["odd"].path == "a[1],b.jsonl"


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ((HARD, "task.eval_sets.hard.smaples=8"), "task.eval_sets.hard.smaples", "unknown key"),
        ((HARD, "task.eval_sets.hard.size=many"), "task.eval_sets.hard.size", "expected integer"),
        ((HARD, "task.eval_sets.hard.samples=0"), "task.eval_sets.hard.samples", "must be >= 1"),
        (("task.eval_sets.hard=builtin:arithmetic",), "task.eval_sets.hard", "expected a section with the keys path"),
        (("task.eval_sets.hard.size=3",), "task.eval_sets.hard.path", "must name held-out prompts"),
        (("task.eval_sets.hard.path=./gone.jsonl",), "task.eval_sets.hard.path", "does not exist"),
        (("task.eval_sets.hard.path=builtin:other",), "task.eval_sets.hard.path", "the only built-in task"),
        (("task.eval_sets.reward.path=builtin:arithmetic",), "task.eval_sets", "and none of accuracy, num_prompts"),
        (("task.eval_sets._hard.path=builtin:arithmetic",), "task.eval_sets", "a name is of letters"),
        ((HARD, "task.eval_path="), "task.eval_sets", "stand beside task.eval_path, which is empty"),
        (
            (HARD, "trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false"),
            "task.eval_sets",
            "has no effect: nothing is evaluated",
        ),
        ((HARD, "task.eval_sets.hard.samples=2"), "task.eval_sets.hard.samples", "must be 1 with trainer.eval_temp"),
        (
            (HARD, SAMPLED, "trainer.eval_samples=8", "trainer.eval_pass_k=4", "task.eval_sets.hard.samples=3"),
            "task.eval_sets.hard.samples",
            "must be at least trainer.eval_pass_k=4",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides: tuple[str, ...], key: str, allowed: str) -> None:
    found = refused(*overrides)
    assert key in found, found
    assert allowed in found[key]


def test_sets_of_a_file_go_back_where_the_command_line_turns_evaluation_off(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [tiny, _self_]\ntask: {eval_sets: {hard: {path: 'builtin:arithmetic'}}}\n"
    )
    mine = ["device=cpu", "--config-dir", str(tmp_path), "--config-name", "mine"]
    assert list(load_config(mine).task.eval_sets) == ["hard"]
    off = ["trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false"]
    config = load_config([*mine, *off, "trainer.stop_at_accuracy=null"])
    assert config.task.eval_sets == {}


def test_a_misspelt_key_of_a_set_is_corrected_from_those_of_sets() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean task\.eval_sets\.hard\.samples\?"):
        load_config(["device=cpu", HARD, "task.eval_sets.hard.smaples=8"])


def test_the_built_in_set_as_one_of_several_reads_its_own_key() -> None:
    ours = ["task.train_path=a/b", "task.eval_path=a/b", "task.max_operand=20"]
    assert "task.max_operand" in refused(*ours)
    load_config(["device=cpu", *ours, HARD])


def test_no_name_of_a_set_makes_the_metric_of_another() -> None:
    ours = [metric.name.split("/") for metric in METRICS if metric.name.startswith("eval/")]
    families = {words[1] for words in ours if words[-1] == "*"}
    assert families == set(RESERVED_NAMES)
    accuracy = find_row("eval/hard/accuracy")
    assert accuracy is not None and accuracy.name == "eval/accuracy"
    assert find_row("eval/hard/pass_at/8") is not None and find_row("eval/hard/reward/part/format") is not None
    assert find_row("eval/hard/acuracy") is None and find_row("train/hard/accuracy") is None


def test_the_start_of_a_run_and_the_documentation_name_them() -> None:
    sets = "task.eval_sets={hard: {path: 'builtin:arithmetic', samples: 8}, all: {path: 'builtin:arithmetic'}}"
    told = describe_rollout(load_config(["device=cpu", SAMPLED, "trainer.eval_samples=2", sets]))
    assert (
        "evaluation on builtin:arithmetic: 2 answers per prompt at temperature 1, pass@2, also on hard (8 answers), all"
        in told
    )
    assert "| `task.eval_sets.NAME.samples` | integer or null, >= 1 |" in configuration_markdown()
