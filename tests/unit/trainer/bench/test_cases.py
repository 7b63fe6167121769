from __future__ import annotations

import pytest

from trainer.tools.bench_workload import BadCase, Case, overrides_of, parse_case, with_overrides, workload

W1 = workload("w1", is_tiny=False)


def case(text: str, tp: int = 1) -> Case:
    return parse_case(text, tensor_parallel_size=tp)


@pytest.mark.parametrize(
    ("text", "tp", "name", "sizes"),
    [
        ("async:2+2", 1, "async 2+2", (2, 2, 4)),
        ("sync:1+3", 1, "sync 1+3", (1, 3, 4)),
        ("sync:4+4", 2, "sync 4+4", (4, 2, 8)),
        ("colocated:4", 1, "colocated 4", (4, 4, 4)),
        ("colocated:4", 2, "colocated 4", (4, 2, 4)),
        ("fast=async:3+1", 1, "fast", (3, 1, 4)),
    ],
)
def test_a_case_is_a_mode_and_a_division_of_the_devices(
    text: str, tp: int, name: str, sizes: tuple[int, int, int]
) -> None:
    found = case(text, tp)
    assert (found.name, (found.num_ranks, found.num_replicas, found.num_devices)) == (name, sizes)


@pytest.mark.parametrize(
    "text", ["async", "async:4", "async:2+0", "colocated:2+2", "fast:2+2", "sync:2+two", "=sync:1+1"]
)
def test_a_case_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(BadCase, match="case"):
        case(text)


def test_engines_must_go_up_into_their_devices() -> None:
    with pytest.raises(BadCase, match="3 engine devices"):
        case("async:1+3", 2)


def test_a_setting_reaches_its_mode_its_name_or_all() -> None:
    cases = with_overrides(
        [case("async:2+2"), case("x=async:3+1"), case("sync:2+2")],
        ["async:a=1", "x:mode.max_staleness=4", "all:b=2", "sync 2+2:c=3"],
    )
    assert [c.overrides for c in cases] == [("a=1", "b=2"), ("a=1", "mode.max_staleness=4", "b=2"), ("b=2", "c=3")]
    assert [c.max_staleness for c in cases] == [1, 4, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [(["colocated:a=1"], "reaches no case"), (["a=1"], "WHICH:KEY=VALUE"), (["sync:a"], "WHICH:KEY=VALUE")],
)
def test_a_setting_that_does_nothing_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(BadCase, match=message):
        with_overrides([case("sync:2+2")], settings)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(BadCase, match="two cases are called sync 2"):
        with_overrides([case("sync:2+2"), case("sync:2+2")], [])


def test_a_staleness_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadCase, match="number >= 0, got 'two'"):
        with_overrides([case("async:2+2")], ["async:mode.max_staleness=two"])


def test_a_staleness_is_found_in_every_way_to_write_it() -> None:
    (found,) = with_overrides([case("async:2+2")], ["all:mode.max_staleness=3", "async:++mode.max_staleness=2"])
    assert found.max_staleness == 2


@pytest.mark.parametrize("key", ["trainer.total_steps", "++trainer.total_steps"])
def test_the_number_of_steps_is_not_for_a_setting_to_say(key: str) -> None:
    with pytest.raises(BadCase, match="give --steps N"):
        with_overrides([case("async:2+2")], [f"async:{key}=20"])


@pytest.mark.parametrize(
    ("text", "settings", "seats"),
    [
        ("sync:2+2", [], 256),
        ("sync:1+3", [], 256),
        ("colocated:1", [], 256),
        ("colocated:4", [], 256),
        ("async:2+2", [], 512),
        ("async:2+2", ["async:mode.max_staleness=0"], 256),
        ("async:3+1", ["all:mode.max_staleness=8"], 512),
    ],
)
def test_every_engine_has_seats_for_all_answers_that_can_be_under_way(
    text: str, settings: list[str], seats: int
) -> None:
    (found,) = with_overrides([case(text)], settings)
    assert f"rollout.max_num_seqs={seats}" in overrides_of(found, W1, num_steps=8, device="cpu")


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("async:mode=sync", "--case MODE:SPLIT"),
        ("all:learner.num_ranks=4", "--case MODE:SPLIT"),
        ("all:++rollout.tensor_parallel_size=2", "--tp"),
        ("all:trainer.groups_per_step=8", "is the workload's"),
        ("all:rollout.group_size=2", "is the workload's"),
        ("all:device=cpu", "--device"),
    ],
)
def test_what_the_figures_are_reckoned_by_is_not_for_a_setting_to_say(setting: str, instead: str) -> None:
    with pytest.raises(BadCase, match=instead):
        with_overrides([case("async:2+2")], [setting])


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ([], ["model.random_weights=true"]),
        (["all:model.path=/models/own"], []),
        (["all:++model.path=/models/own", "all:model.random_weights=true"], ["model.random_weights=true"]),
        (["all:model.compute_dtype=float32"], ["model.random_weights=true"]),
    ],
)
def test_weights_are_drawn_only_for_the_model_of_the_workload(settings: list[str], drawn: list[str]) -> None:
    (found,) = with_overrides([case("async:2+2")], settings)
    overrides = overrides_of(found, W1, num_steps=8, device="cpu")
    assert [text for text in overrides if text.startswith("model.random_weights")] == drawn


def test_overrides_of_a_case_come_last() -> None:
    (found,) = with_overrides([case("async:2+2")], ["async:rollout.max_num_seqs=64"])
    assert overrides_of(found, W1, num_steps=8, device="cpu")[-1] == "rollout.max_num_seqs=64"
