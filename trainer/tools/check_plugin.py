"""`python -m trainer check`: tries a function of the user against its contract, without a run.

    python -m trainer check loss my_package.losses.my_loss [NUMBER=VALUE ...]
    python -m trainer check advantage my_package.estimators.my_estimator [NUMBER=VALUE ...]
    python -m trainer check group_filter my_package.filters.my_filter [NUMBER=VALUE ...] [--metadata JSON]
    python -m trainer check reward my_package.rewards.my_reward --prompt TEXT --response TEXT --answer TEXT

Prints every check, for a reward first its value for the given response. It is called in a separate process, as in a
run. Exit code 0 if all passed, 1 if one failed, 2 if the function cannot be loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Any, cast

from rollout.errors import DataError
from trainer.config.algorithm import load_own
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.tools.plugin_contracts import Check


EXIT_KEPT, EXIT_BROKEN, EXIT_UNUSABLE = 0, 1, 2
KEYS = {
    "loss": "algorithm.loss",
    "advantage": "algorithm.advantage_estimator",
    "group_filter": "algorithm.group_filter",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    line = _parser().parse_args(argv)
    with contextlib.ExitStack() as stack:
        try:
            checks = _checks(line, stack)
        except (ConfigurationError, DataError) as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_UNUSABLE
        from trainer.tools.plugin_contracts import format_outcome, run_checks

        failed = 0
        for rule, reason in run_checks(checks):
            failed += bool(reason)
            sys.stdout.write(f"{format_outcome(rule, reason)}\n")
            sys.stdout.flush()
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    sys.stdout.write(f"{line.kind} {line.path}: {verdict}\n")
    return EXIT_BROKEN if failed else EXIT_KEPT


def _checks(line: argparse.Namespace, stack: contextlib.ExitStack) -> list[Check]:
    """A process of theirs lives as long as `stack`. Raises ConfigurationError or DataError."""
    if line.kind == "reward":
        return _reward_checks(line, stack)
    numbers = dict(line.numbers)
    function = load_own(line.path, key=KEYS[line.kind], args=numbers)
    bound: Any = functools.partial(function, **numbers)
    match line.kind:
        case "loss":
            from trainer.tools.loss_contract import loss_checks

            return loss_checks(bound)
        case "advantage":
            from trainer.config.algorithm import declared_traits
            from trainer.tools.plugin_contracts import advantage_checks

            return advantage_checks(bound, traits=declared_traits(function))
        case "group_filter":
            from trainer.tools.plugin_contracts import group_filter_checks

            return group_filter_checks(bound, metadata=line.metadata)
        case _:
            raise ValueError(f"kind must be loss, advantage, group_filter or reward, got {line.kind!r}")


def _reward_checks(line: argparse.Namespace, stack: contextlib.ExitStack) -> list[Check]:
    from rollout.reward.call import RewardRequest
    from trainer.tools.plugin_contracts import ContractError, RewardRunner, reward_checks

    response = line.answer if line.response is None else line.response
    item = RewardRequest(prompt=line.prompt, response=response, answer=line.answer, metadata=line.metadata)
    runner = stack.enter_context(RewardRunner(line.path, timeout_s=line.timeout))
    with contextlib.suppress(ContractError):  # which the first check reports
        result = runner.score(item)
        parts = f", parts {dict(result.parts)}" if result.parts else ""
        sys.stdout.write(f"response {response!r:.60}: reward = {result.reward}{parts}\n")
    return reward_checks(runner, item=item)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer check", description="Try your own function against its contract.",
        epilog="Exit code: 0 all checks passed, 1 a check failed, 2 the function cannot be loaded.",
    )  # fmt: skip
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, key in KEYS.items():
        one = kinds.add_parser(kind, help=f"a function for {key}")
        one.add_argument("path", help="dotted path, package.module.function")
        one.add_argument("numbers", nargs="*", type=_number, metavar="NAME=VALUE", help=f"as in algorithm.{kind}_args")
    reward = kinds.add_parser("reward", help="a function for task.reward.name")
    reward.add_argument("path", help="as in task.reward.name")
    reward.add_argument("--prompt", default="1+1=", help="default %(default)s")
    reward.add_argument("--answer", default="2", help="ground truth of the prompt; default %(default)s")
    reward.add_argument("--response", help="a right response; default: the answer")
    reward.add_argument("--timeout", type=_seconds, default=10.0, metavar="S", help="of one call; default %(default)s")
    for kind in ("group_filter", "reward"):
        one, about = kinds.choices[kind], "other columns of the data set"
        one.add_argument("--metadata", type=_mapping, default={}, metavar="JSON", help=about)
    return parser


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, float(value)


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be finite and > 0, got {text}")
    return value


def _mapping(text: str) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return cast("dict[str, object]", value)
