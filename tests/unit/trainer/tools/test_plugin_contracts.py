"""A user's function -> the rules of its contract that it breaks; `python -m trainer check`; examples of documents."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

import trainer.__main__ as trainer
from rollout.reward.call import RewardRequest
from rollout.reward.registry import BUILTIN_REWARDS
from rollout.types import Group, Prompt
from tests.fakes.scripted_run import trajectory
from trainer.algorithms.advantages import step_advantages
from trainer.algorithms.group_filter import FinishedGroup, own_group_filter
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


def policy_gradient(inputs: Any, *, wrong: Callable[..., Any] = lambda inputs, loss_L, ratio_L: loss_L) -> Any:
    ratio_L, _ = ratio_and_log(inputs)
    return wrong(inputs, -inputs.advantages_L * ratio_L, ratio_L), loss_stats(inputs)


def no_stats(inputs: Any) -> Any:
    return policy_gradient(inputs)[0]


def with_stats(change: Callable[[Any, int], Any], inputs: Any) -> Any:
    loss_L, stats = policy_gradient(inputs)
    return loss_L, change(stats, len(loss_L))


def minus_mean(groups: Any) -> Any:
    return [group.rewards_G - group.rewards_G.mean() for group in groups]


def minus_step_mean(groups: Any) -> Any:
    return [group.rewards_G - np.mean([r for g in groups for r in g.rewards_G]) for group in groups]


def in_place(groups: Any) -> Any:
    advantages = minus_mean(groups)
    for group in groups:
        group.rewards_G[:] = 0.0
    return advantages


def mostly_wrong(group: FinishedGroup) -> Any:
    return "mostly_wrong" if group.rewards_G.mean() < 0.3 else None


def after(change: Callable[[Any], object], group: FinishedGroup) -> Any:
    change(group)
    return mostly_wrong(group)


def raises(group: FinishedGroup) -> object:
    return group.prompt.metadata["nowhere"]


def checks_of(kind: str, function: Any, *, timeout_s: float = 20.0) -> str:
    """The broken rules."""
    match kind:
        case "loss":
            return broken(loss_checks(function))
        case "advantage":
            return broken(advantage_checks(function, traits=EstimatorTraits(needs_peers=True)))
        case "filter":
            return broken(group_filter_checks(function, metadata={"level": 3}))
    item = RewardRequest(prompt="1+1=", response="2", answer="2", metadata={"level": [1]})
    with RewardRunner(function, timeout_s=timeout_s) as runner:
        return broken(reward_checks(runner, item=item))


KEPT: dict[str, Callable[[], str]] = {
    **{f"loss {name}": partial(lambda name: broken(loss_checks(
        partial(policy_loss, config=AlgorithmConfig(loss=name)), selects=name in SELECTING_LOSSES)), name)
       for name in get_args(LossName)},
    # gae is no function of rewards alone, and zero is none of rewards.
    **{f"advantage {name}": partial(lambda name: broken(advantage_checks(
        partial(step_advantages, config=AlgorithmConfig(advantage_estimator=name)), traits=ESTIMATORS[name])), name)
       for name in ESTIMATORS if name not in {"gae", "zero"}},
    **{f"reward {name}": partial(checks_of, "reward", name)
       for name in (*BUILTIN_REWARDS, f"{WRONG}.exact", f"{WRONG}.exact_async")},
    "a policy gradient": partial(checks_of, "loss", policy_gradient),
    "a filter": partial(checks_of, "filter", mostly_wrong),
    "a baseline of the group": partial(checks_of, "advantage", minus_mean),
    # Spanning the step is allowed by declaration and by default.
    "a baseline of the step": lambda: broken(advantage_checks(minus_step_mean, traits=OWN_TRAITS)),
}  # fmt: skip


@pytest.mark.parametrize("check", KEPT.values(), ids=KEPT)
def test_what_keeps_the_contract_passes(check: Callable[[], str]) -> None:
    assert check() == ""


WRONG_LOSSES: list[tuple[str, Callable[..., Any]]] = [
    ("becomes likelier", lambda i, loss_L, _: -loss_L),
    ("becomes likelier", lambda i, _, ratio_L: -i.advantages_L.roll(1) * ratio_L),
    ("one float32 per loss token", lambda i, loss_L, _: loss_L.mean()),
    ("any order and any micro-batch", lambda i, loss_L, _: 0 * loss_L + loss_L.sum() / max(len(loss_L), 1)),
    ("any order and any micro-batch", lambda i, loss_L, _: loss_L - 0.1 * loss_L.sum()),
    ("are finite", lambda i, loss_L, _: loss_L / (i.advantages_L - 1.0)),
    ("are finite", lambda i, loss_L, _: loss_L * (i.advantages_L / i.advantages_L)),
    ("stays finite", lambda i, *_: -i.advantages_L * (i.logprobs_L - i.old_logprobs_L).exp()),
    ("has no gradient", lambda i, loss_L, _: loss_L.detach()),
    ("nothing else", lambda i, loss_L, _: torch.zeros_like(loss_L, requires_grad=True) * 1),
    ("nothing else", lambda i, loss_L, _: loss_L * torch.ones((), requires_grad=True)),
    ("bfloat16", lambda i, loss_L, _: loss_L.bfloat16()),
    ("same bits", lambda i, loss_L, _: loss_L * (1 + torch.rand(()))),
    ("leave the inputs alone", lambda i, loss_L, _: (i.advantages_L.mul_(2.0), loss_L)[1]),
]
BREAKS: dict[str, list[tuple[str, Any]]] = {
    "loss": [
        *((rule, partial(policy_gradient, wrong=wrong)) for rule, wrong in WRONG_LOSSES),
        ("LossStats", no_stats),
        ("statistics", partial(with_stats, lambda s, n: replace(s, ratio_sum=s.ratio_sum / n))),
        ("must count tokens", partial(with_stats, lambda s, n: replace(s, clipped_low=torch.tensor(0.5)))),
    ],
    "advantage": [
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
    "filter": [
        ("gave False", lambda group: mostly_wrong(group) is not None),
        ("'mostly wrong'; return None", lambda _: "mostly wrong"),
        ("'mostly/wrong'", lambda _: "mostly/wrong"),
        ("other than rewards_failed and zero_variance", lambda _: "zero_variance"),
        ("gave ''", lambda _: ""),
        ("two calls give the same", lambda _: f"r{time.perf_counter_ns() % 1000}"),
        ("leaves the group alone", partial(after, lambda group: group.rewards_G.sort())),
        ("leaves the group alone", partial(after, lambda group: group.prompt.metadata.clear())),
        ("the order of responses", lambda group: "first" if group.rewards_G[0] > group.rewards_G[-1] else None),
        ("every group was filtered (everything)", lambda _: "everything"),
        ("KeyError: 'nowhere'", raises),
        ("a call takes less", partial(after, lambda _: time.sleep(0.02))),
    ],
    "reward": [
        (rule, f"{WRONG}.{name}")
        for name, rule in {
            "sign": "at least as much as an empty one",
            "nan": "must be finite",
            "empty": "IndexError",
            "parts": "same named parts",
            "drawn": "two calls",
            "metadata": "leaves metadata alone",
            "metadata_async": "metadata was {'level': [1]} and is {}; work on a copy",
            "text": "a reward is a finite number",
            "exits": "its process ended with exit code 0",
        }.items()
    ],
}


@pytest.mark.parametrize(
    ("kind", "rule", "wrong"), [(kind, *row) for kind, rows in BREAKS.items() for row in rows], ids=str
)
def test_a_wrong_function_breaks_its_rule(kind: str, rule: str, wrong: Any) -> None:
    with np.errstate(invalid="ignore"):
        assert rule in checks_of(kind, wrong)


def test_a_reward_that_hangs_is_ended_at_its_limit() -> None:
    outcome = checks_of("reward", f"{WRONG}.hangs", timeout_s=0.5)
    assert "with the key reward, within 0.5 s" in outcome and "its process was killed" in outcome
    assert "response ' ': the call took longer than 0.5 s" not in outcome, "the first that hangs ends a check"
    assert "response '': the call took longer than 0.5 s" in outcome
    assert "leaves metadata alone" not in outcome, "the right response does not hang"


def test_every_failure_is_reported_at_once_and_user_errors_name_their_line() -> None:
    def fails() -> None:
        raise KeyError("lost")

    def breaks() -> None:
        raise ContractError("got 3")

    checks = [Check(rule="a", run=fails), Check(rule="b", run=lambda: None), Check(rule="c", run=breaks)]
    with pytest.raises(ContractError, match=r"2 of 3 checks failed") as error:
        assert_contract(checks)
    assert all(words in str(error.value) for words in ("KeyError: 'lost'", "test_plugin_contracts.py:", "got 3"))


# Group filters in a run


PROMPT = Prompt(prompt_id="train/4", token_ids=np.array([1], np.int32), text="q", answer="a", metadata={"level": 3})


def group_of(rewards: Sequence[float], statuses: Sequence[TrajectoryStatus] | None = None) -> Group:
    given = ["completed"] * len(rewards) if statuses is None else statuses
    samples = [
        replace(trajectory(PROMPT, i, [(0, i + 1)], reward=reward), status=status)
        for i, (reward, status) in enumerate(zip(rewards, given, strict=True))
    ]
    return Group(group_id=7, prompt_id=PROMPT.prompt_id, trajectories=samples, start_version=0)


def test_a_filter_sees_the_scored_responses_and_the_prompt_after_the_built_in_filters() -> None:
    seen = FinishedGroup.of(group_of([1.0, float("nan"), 0.5], ["truncated", "failed", "completed"]), PROMPT)
    assert (seen.rewards_G.tolist(), seen.lengths_G.tolist()) == ([1.0, 0.5], [1, 3])
    assert (seen.is_truncated_G.tolist(), seen.num_failed) == ([True, False], 1)
    assert seen.prompt.metadata["level"] == 3
    custom = own_group_filter(AlgorithmConfig(group_filter=f"{__name__}.mostly_wrong"))
    assert custom is not None
    for group, reason in (
        (group_of([0.0, 0.0, 1.0, 0.0]), "mostly_wrong"),
        (group_of([0.0, 0.0]), "zero_variance"),
        (group_of([0.0, 1.0]), ""),
        (group_of([0.0, float("nan")], ["completed", "failed"]), "rewards_failed"),
    ):
        assert loops.filter_reason(group, PROMPT, dynamic_sampling=True, custom=custom) == reason
    assert own_group_filter(AlgorithmConfig()) is None


def test_a_path_that_leads_nowhere_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'mostly_wrong'") as error:
        preflight.check_own_functions(load_config(["device=cpu", f"algorithm.group_filter={__name__}.mostly_rong"]))
    assert error.value.problems[0].key == "algorithm.group_filter"


# The command and the documents


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the documents, where Python finds them."""
    (tmp_path / "my_package").mkdir()
    for name, code in re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", LOSSES + FILTERS, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, module)
    reward = re.search(r"^```python\n(def reward.*?)^```", (ROOT / "docs" / "add_a_reward.md").read_text(), re.S | re.M)
    assert reward is not None
    (tmp_path / "my_package" / "rewards.py").write_text(reward[1])
    return tmp_path


def test_the_document_lists_every_loss_aggregation_and_advantage() -> None:
    rows = re.findall(r"^\| (`.*?) \|", LOSSES, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {*get_args(LossName), *get_args(AggregationName), *get_args(AdvantageName)} <= listed


def test_commands_and_tests_of_the_documents_pass(package: Path, capsys: Capture) -> None:
    commands = re.findall(r"^python -m trainer check (.*)$", LOSSES + FILTERS, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert trainer.main(["check", *shlex.split(command)]) == check_plugin.EXIT_KEPT, capsys.readouterr().out
    assert capsys.readouterr().out.count("checks passed") == 4
    module = importlib.import_module("test_my_package")
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    losses = package / "my_package" / "losses.py"
    losses.write_text(losses.read_text().replace("loss_L = -(", "loss_L = ("))
    for name in ("my_package", "my_package.losses"):
        del sys.modules[name]
    assert check_plugin.main(["loss", "my_package.losses.tempered_loss"]) == check_plugin.EXIT_BROKEN
    out = capsys.readouterr().out
    assert "FAIL  a good token becomes likelier" in out
    assert out.splitlines()[-1] == "loss my_package.losses.tempered_loss: 1 of 9 checks failed"


KEEPS, BREAKS_IT, UNUSABLE = check_plugin.EXIT_KEPT, check_plugin.EXIT_BROKEN, check_plugin.EXIT_UNUSABLE


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (f"loss {BUILT_IN}.ppo_clip", UNUSABLE, "did you mean 'ppo_clip_loss'"),
        (f"loss {BUILT_IN}.ppo_clip_loss", UNUSABLE, "missing a required"),
        (f"loss {BUILT_IN}.dro_loss alpha=1", UNUSABLE, "'dro_beta'"),
        (f"loss {BUILT_IN}.dro_loss dro_beta", UNUSABLE, "NAME=VALUE"),
        (f"loss {BUILT_IN}.dro_loss dro_beta=0.1", KEEPS, "all 9 checks passed"),
        ("advantage nowhere.estimator", UNUSABLE, "nowhere"),
        (f"group_filter {__name__}.raises", BREAKS_IT, "KeyError"),
        (f"group_filter {__name__}.raises --metadata '{{\"nowhere\": null}}'", KEEPS, "passed"),
        ("reward nowhere:reward", UNUSABLE, "nowhere"),
        *((f"reward zero --timeout={limit}", UNUSABLE, "--timeout") for limit in ("nan", "inf", "0", "-1", "soon")),
        (f"reward {WRONG}.exact --response 7", KEEPS, "response '7': reward = 0.0, parts {'long': 0.0}\n"),
        (f"reward {WRONG}.sign --answer 2 --response 2", BREAKS_IT, "response '2': reward = -1.0\n"),
    ],
)
def test_the_command_reports_with_its_exit_code(arguments: str, code: int, words: str, capsys: Capture) -> None:
    try:
        ended = check_plugin.main(shlex.split(arguments))
    except SystemExit as error:
        ended = error.code
    assert ended == code
    shown = capsys.readouterr()
    assert words in (shown.err if code == UNUSABLE else shown.out)
