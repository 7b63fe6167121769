"""Built-in functions keep the contracts and wrong ones break the rule that they should; `trainer.check_plugin`; and the
examples of the documents."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from rollout.reward.call import RewardRequest
from rollout.reward.registry import BUILTIN_REWARDS
from rollout.types import Group, Prompt
from tests.fakes.scripted_run import trajectory
from trainer.algorithms.advantages import step_advantages
from trainer.algorithms.group_filter import FinishedGroup, GroupFilterError, own_group_filter
from trainer.algorithms.losses import loss_stats, policy_loss, ratio_and_log
from trainer.config.algorithm import (
    ESTIMATORS,
    OWN_TRAITS,
    SELECTING_LOSSES,
    AdvantageName,
    AggregationName,
    AlgorithmConfig,
    EstimatorTraits,
    LossName,
)
from trainer.config.compose import load_config
from trainer.driver import loops, preflight
from trainer.errors import ConfigurationError
from trainer.tools import check_plugin
from trainer.tools.loss_contract import loss_checks
from trainer.tools.plugin_contracts import (
    Check,
    ContractError,
    RewardRunner,
    advantage_checks,
    assert_contract,
    format_outcome,
    group_filter_checks,
    reward_checks,
    run_checks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.types import TrajectoryStatus

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[4]
LOSSES, FILTERS = ((ROOT / "docs" / name).read_text() for name in ("add_a_loss.md", "data_selection.md"))
BUILT_IN, WRONG = "trainer.algorithms.losses", "tests.fakes.wrong_rewards"


def broken(checks: Sequence[Check]) -> str:
    return "\n".join(format_outcome(rule, reason) for rule, reason in run_checks(checks) if reason)


# Losses


@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_built_in_loss_keeps_the_contract(loss: LossName) -> None:
    built_in = partial(policy_loss, config=AlgorithmConfig(loss=loss))
    assert_contract(loss_checks(built_in, selects=loss in SELECTING_LOSSES))


def policy_gradient(inputs: Any, *, wrong: Callable[..., Any] = lambda inputs, loss_L, ratio_L: loss_L) -> Any:
    ratio_L, _ = ratio_and_log(inputs)
    return wrong(inputs, -inputs.advantages_L * ratio_L, ratio_L), loss_stats(inputs)


def no_stats(inputs: Any) -> Any:
    return policy_gradient(inputs)[0]


def with_stats(change: Callable[[Any, int], Any], inputs: Any) -> Any:
    loss_L, stats = policy_gradient(inputs)
    return loss_L, change(stats, len(loss_L))


WRONG_LOSSES: dict[str, tuple[str, Callable[..., Any]]] = {
    "sign": ("becomes likelier", lambda i, loss_L, _: -loss_L),
    "mean": ("one float32 per loss token", lambda i, loss_L, _: loss_L.mean()),
    "spread": ("any order and any micro-batch", lambda i, loss_L, _: 0 * loss_L + loss_L.sum() / max(len(loss_L), 1)),
    "mixes sequences": ("any order and any micro-batch", lambda i, loss_L, _: loss_L - 0.1 * loss_L.sum()),
    "shifted by one": ("becomes likelier", lambda i, _, ratio_L: -i.advantages_L.roll(1) * ratio_L),
    "nan": ("are finite", lambda i, loss_L, _: loss_L / (i.advantages_L - 1.0)),
    "divides by advantage": ("are finite", lambda i, loss_L, _: loss_L * (i.advantages_L / i.advantages_L)),
    "no bound": ("stays finite", lambda i, *_: -i.advantages_L * (i.logprobs_L - i.old_logprobs_L).exp()),
    "no gradient": ("has no gradient", lambda i, loss_L, _: loss_L.detach()),
    "other input": ("nothing else", lambda i, loss_L, _: torch.zeros_like(loss_L, requires_grad=True) * 1),
    "own parameter": ("nothing else", lambda i, loss_L, _: loss_L * torch.ones((), requires_grad=True)),
    "half precision": ("bfloat16", lambda i, loss_L, _: loss_L.bfloat16()),
    "random": ("same bits", lambda i, loss_L, _: loss_L * (1 + torch.rand(()))),
    "in place": ("leave the inputs alone", lambda i, loss_L, _: (i.advantages_L.mul_(2.0), loss_L)[1]),
}  # fmt: skip
WRONG_STATS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no stats": ("LossStats", no_stats),
    "means": ("statistics", partial(with_stats, lambda s, n: replace(s, ratio_sum=s.ratio_sum / n))),
    "fractions": ("must count tokens", partial(with_stats, lambda s, n: replace(s, clipped_low=torch.tensor(0.5)))),
}


@pytest.mark.parametrize("name", [*WRONG_LOSSES, *WRONG_STATS])
def test_a_wrong_loss_breaks_its_rule(name: str) -> None:
    assert_contract(loss_checks(policy_gradient))
    rule, wrong = WRONG_LOSSES[name] if name in WRONG_LOSSES else WRONG_STATS[name]
    assert rule in broken(loss_checks(partial(policy_gradient, wrong=wrong) if name in WRONG_LOSSES else wrong))


# Estimators


# gae is no function of rewards alone, and zero is none of rewards.
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in {"gae", "zero"}])
def test_a_built_in_estimator_keeps_the_contract(name: Any) -> None:
    estimator = partial(step_advantages, config=AlgorithmConfig(advantage_estimator=name))
    assert_contract(advantage_checks(estimator, traits=ESTIMATORS[name]))


def minus_mean(groups: Any) -> Any:
    return [group.rewards_G - group.rewards_G.mean() for group in groups]


def minus_step_mean(groups: Any) -> Any:
    return [group.rewards_G - np.mean([r for g in groups for r in g.rewards_G]) for group in groups]


def in_place(groups: Any) -> Any:
    advantages = minus_mean(groups)
    for group in groups:
        group.rewards_G[:] = 0.0
    return advantages


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("never gets less", lambda groups: [-a for a in minus_mean(groups)]),
        ("check the sign", lambda groups: [-np.abs(group.rewards_G - 0.6) for group in groups]),
        ("nothing is learned", lambda groups: [0 * a for a in minus_mean(groups)]),
        ("are finite", lambda groups: [a / a.std() for a in minus_mean(groups)]),
        ("other groups do not matter", minus_step_mean),
        ("order of responses", lambda groups: [group.rewards_G - group.rewards_G[0] for group in groups]),
        ("order of groups", lambda groups: [group.rewards_G - groups[0].rewards_G.mean() for group in groups]),
        ("one advantage per response", lambda groups: [a.mean() for a in minus_mean(groups)]),
        ("a list of one array", lambda groups: np.concatenate(minus_mean(groups))),
        ("same bits", lambda groups: [a + np.random.default_rng().random(a.shape) for a in minus_mean(groups)]),
        ("leave the groups alone", in_place),
    ],
)
def test_a_wrong_estimator_breaks_its_rule(rule: str, wrong: Callable[..., Any]) -> None:
    traits = EstimatorTraits(needs_peers=True)
    assert_contract(advantage_checks(minus_mean, traits=traits))
    with np.errstate(invalid="ignore"):
        assert rule in broken(advantage_checks(wrong, traits=traits))
    # Spanning the step is allowed by declaration and by default.
    assert_contract(advantage_checks(minus_step_mean, traits=OWN_TRAITS))


# Rewards


ITEM = RewardRequest(prompt="1+1=", response="2", answer="2", metadata={"level": [1]})


def tried(name: str, *, timeout_s: float = 20.0) -> str:
    """What a reward breaks of its contract."""
    with RewardRunner(name, timeout_s=timeout_s) as runner:
        return broken(reward_checks(runner, item=ITEM))


@pytest.mark.parametrize("name", [*BUILTIN_REWARDS, f"{WRONG}.exact", f"{WRONG}.exact_async"])
def test_a_reward_that_keeps_the_contract_passes(name: str) -> None:
    assert tried(name) == ""


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("sign", "at least as much as an empty one"),
        ("nan", "must be finite"),
        ("empty", "IndexError"),
        ("parts", "same named parts"),
        ("drawn", "two calls"),
        ("metadata", "leaves metadata alone"),
        ("metadata_async", "metadata was {'level': [1]} and is {}; work on a copy"),
        ("text", "a reward is a finite number"),
        ("exits", "its process ended with exit code 0"),
    ],
)
def test_a_wrong_reward_breaks_its_rule(wrong: str, rule: str) -> None:
    assert rule in tried(f"{WRONG}.{wrong}")


def test_a_reward_that_hangs_is_ended_at_its_limit() -> None:
    told = tried(f"{WRONG}.hangs", timeout_s=0.5)
    assert "with the key reward, within 0.5 s" in told
    assert "response ' ': the call took longer than 0.5 s" not in told, "the first that hangs ends a check"
    assert "response '': the call took longer than 0.5 s" in told
    assert "leaves metadata alone" not in told, "the right response does not hang"


def test_every_failure_is_told_at_once_and_user_errors_name_their_line() -> None:
    def fails() -> None:
        raise KeyError("lost")

    def breaks() -> None:
        raise ContractError("got 3")

    checks = [Check(rule="a", run=fails), Check(rule="b", run=lambda: None), Check(rule="c", run=breaks)]
    with pytest.raises(ContractError, match=r"2 of 3 checks failed") as error:
        assert_contract(checks)
    assert "KeyError: 'lost'" in str(error.value)
    assert "test_plugin_contracts.py:" in str(error.value)
    assert "got 3" in str(error.value)
    assert [bool(reason) for _, reason in run_checks(checks)] == [True, False, True]


# Group filters


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


def mostly_wrong(group: FinishedGroup) -> Any:
    return "mostly_wrong" if group.rewards_G.mean() < 0.3 else None


def after(change: Callable[[FinishedGroup], object], group: FinishedGroup) -> Any:
    change(group)
    return mostly_wrong(group)


def raises(group: FinishedGroup) -> object:
    return group.prompt.metadata["nowhere"]


def says_true(_group: FinishedGroup) -> bool:
    return True


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("gave False", lambda group: mostly_wrong(group) is not None),
        ("'mostly wrong'; allowed are None", lambda _: "mostly wrong"),
        ("'mostly/wrong'", lambda _: "mostly/wrong"),
        ("other than rewards_failed and zero_variance", lambda _: "zero_variance"),
        ("gave ''", lambda _: ""),
        ("two calls give the same", lambda _: f"r{time.perf_counter_ns() % 1000}"),
        ("leaves the group alone", partial(after, lambda group: group.rewards_G.sort())),
        ("leaves the group alone", partial(after, lambda group: group.prompt.metadata.clear())),  # type: ignore[attr-defined]
        ("the order of responses", lambda group: "first" if group.rewards_G[0] > group.rewards_G[-1] else None),
        ("every group was filtered (everything)", lambda _: "everything"),
        ("KeyError: 'nowhere'", raises),
        ("a call takes less", partial(after, lambda _: time.sleep(0.02))),
    ],
)
def test_a_wrong_filter_breaks_its_rule(rule: str, wrong: Callable[..., Any]) -> None:
    metadata = {"level": 3}
    assert_contract(group_filter_checks(mostly_wrong, metadata=metadata))
    assert rule in broken(group_filter_checks(wrong, metadata=metadata))


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


# The command and the documents


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the document, where Python finds them."""
    blocks = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", LOSSES, re.DOTALL | re.MULTILINE)
    for name, code in blocks:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    ((name, code),) = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", FILTERS, re.DOTALL | re.MULTILINE)
    (tmp_path / name).write_text(code)
    reward = re.search(r"^```python\n(def reward.*?)^```", (ROOT / "docs" / "add_a_reward.md").read_text(), re.S | re.M)
    assert reward is not None
    (tmp_path / "my_package" / "rewards.py").write_text(reward[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


def test_the_document_lists_every_loss_aggregation_and_advantage() -> None:
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", LOSSES, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert {*get_args(LossName), *get_args(AggregationName), *get_args(AdvantageName)} <= listed


def test_the_commands_of_the_document_pass(package: Path, capsys: Capture) -> None:
    commands = re.findall(r"^python -m trainer\.check_plugin (.*)$", LOSSES + FILTERS, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert check_plugin.main(shlex.split(command)) == check_plugin.EXIT_KEPT, capsys.readouterr().out
    assert capsys.readouterr().out.count("checks passed") == 4


def test_the_test_of_the_document_passes(package: Path) -> None:
    tests = importlib.import_module("test_my_package")
    found = [getattr(tests, name) for name in dir(tests) if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_a_broken_promise_is_told_with_exit_code_1(package: Path, capsys: Capture) -> None:
    losses = package / "my_package" / "losses.py"
    losses.write_text(losses.read_text().replace("loss_L = -(", "loss_L = ("))
    assert check_plugin.main(["loss", "my_package.losses.tempered_loss"]) == check_plugin.EXIT_BROKEN
    out = capsys.readouterr().out
    assert "FAIL  a good token becomes likelier" in out
    assert out.splitlines()[-1] == "loss my_package.losses.tempered_loss: 1 of 9 checks failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["loss", f"{BUILT_IN}.ppo_clip"], "did you mean 'ppo_clip_loss'"),
        (["loss", f"{BUILT_IN}.ppo_clip_loss"], "missing a required"),
        (["loss", f"{BUILT_IN}.dro_loss", "alpha=1"], "'dro_beta'"),
        (["advantage", "nowhere.estimator"], "nowhere"),
        (["reward", "nowhere:reward"], "nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_exit_code_2(arguments: list[str], words: str, capsys: Capture) -> None:
    assert check_plugin.main(arguments) == check_plugin.EXIT_UNUSABLE
    assert words in capsys.readouterr().err


def test_numbers_and_columns_come_from_the_command_line(capsys: Capture) -> None:
    assert check_plugin.main(["loss", f"{BUILT_IN}.dro_loss", "dro_beta=0.1"]) == check_plugin.EXIT_KEPT
    with pytest.raises(SystemExit):
        check_plugin.main(["loss", f"{BUILT_IN}.dro_loss", "dro_beta"])
    assert "NAME=VALUE" in capsys.readouterr().err
    line = ["group_filter", f"{__name__}.raises"]
    assert check_plugin.main(line) == check_plugin.EXIT_BROKEN
    assert check_plugin.main([*line, "--metadata", '{"nowhere": null}']) == check_plugin.EXIT_KEPT


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hangs", "the call took longer than 0.5 s; its process was killed"),
        ("exits", "its process ended with exit code 0"),
    ],
)
def test_a_reward_that_hangs_or_ends_its_process_is_a_broken_one(name: str, words: str, capsys: Capture) -> None:
    arguments = ["reward", f"tests.fakes.wrong_rewards.{name}", "--timeout", "0.5"]
    assert check_plugin.main(arguments) == check_plugin.EXIT_BROKEN
    assert words in capsys.readouterr().out


def test_a_reward_is_shown_for_the_response_of_the_user(capsys: Capture) -> None:
    for name, response, shown in (
        ("exact", "7", "response '7': reward = 0.0, parts {'long': 0.0}"),
        ("sign", "2", "response '2': reward = -1.0"),
    ):
        check_plugin.main(["reward", f"tests.fakes.wrong_rewards.{name}", "--answer", "2", "--response", response])
        assert capsys.readouterr().out.splitlines()[0] == shown
    assert check_plugin.main(["reward", "tests.fakes.wrong_rewards.nan"]) == check_plugin.EXIT_BROKEN
    assert "returned nan; a reward must be finite" in capsys.readouterr().out


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "-1", "soon"])
def test_a_limit_that_is_none_is_refused(timeout: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        check_plugin.main(["reward", "zero", f"--timeout={timeout}"])
    assert ended.value.code == check_plugin.EXIT_UNUSABLE
    assert "--timeout" in capsys.readouterr().err


def test_it_is_a_program(package: Path) -> None:
    command = [sys.executable, "-m", "trainer.check_plugin", "advantage", "my_package.estimators.median_baseline"]
    done = subprocess.run(
        command, cwd=package, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all 7 checks passed" in done.stdout
