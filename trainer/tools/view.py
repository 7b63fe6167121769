"""`python -m trainer view`: reads trajectories of a run.

Exit codes: 0 something is shown, 1 there is nothing to show, 2 the command line is wrong or RUN_DIR cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import io
import json
import os
import sys
from collections import deque
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from trainer.tools.run_records import InvalidRunDir, read_config, read_lines, sample_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


EXIT_SHOWN, EXIT_NOTHING, EXIT_REFUSED = 0, 1, 2
LAST, CHARACTERS = 4, 2000
EXAMPLES = """\
examples:
  %(prog)s runs/first                         the newest groups, each with its prompt and all responses
  %(prog)s runs/first --worst 5               the five responses with the lowest rewards
  %(prog)s runs/first --step 20 --best 5      the best of the groups that step 20 was the first that could train
  %(prog)s runs/first --failed --last 10      what failed last, and why
  %(prog)s runs/first --group 17 --chars 0    one group, nothing cut
  %(prog)s runs/first --evaluations --worst 5 held-out prompts with the lowest rewards
  %(prog)s runs/first --json | jq .rewards    one JSON object per group, for programs

A record does not hold the step that trained it. With mode.max_staleness=0 it is the step that --step asks for;
otherwise it is that step or one of the next max_staleness. A run that was resumed may show a group twice.

exit codes: 0 something is shown, 1 there is nothing to show, 2 the command line is wrong or RUN_DIR cannot be read
"""
BOLD, DIM, RED, CYAN = "1", "2", "31", "36"


class _Prompt(msgspec.Struct, kw_only=True):
    prompt_id: str
    text: str = ""
    answer: str = ""


class _Response(msgspec.Struct, kw_only=True):
    sample_index: int
    status: str
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, Any] = {}
    error: str = ""
    num_generated_tokens: int = 0
    versions: list[int] = []


class _Record(msgspec.Struct, kw_only=True):
    """Without tokens and log-probs, which are most of a line."""

    group_id: int | UnsetType = UNSET
    start_version: int | UnsetType = UNSET
    version: int | UnsetType = UNSET
    """Of an evaluation, which has no group."""
    set: str | UnsetType = UNSET
    status: str
    reason: str = ""
    prompt: _Prompt
    rewards: list[float | None]
    """One per response, rewards of turns included."""
    trajectories: list[_Response]
    baseline: _Response | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.trajectories):
            raise ValueError("there must be one reward per response")

    @property
    def step(self) -> int | UnsetType:
        """As `--step` counts."""
        return self.version if self.start_version is UNSET else self.start_version + 1

    @property
    def pairs(self) -> list[tuple[float | None, _Response]]:
        return list(zip(self.rewards, self.trajectories, strict=True))

    def only(self, pairs: Sequence[tuple[float | None, _Response]]) -> _Record:
        rewards, responses = [reward for reward, _ in pairs], [response for _, response in pairs]
        return msgspec.structs.replace(self, rewards=rewards, trajectories=responses, baseline=UNSET)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.evaluations and args.group is not None:
        parser.error("an evaluation has no groups; leave out --group, or --evaluations")
    try:
        return _show(args)
    except BrokenPipeError:  # `head`, or a pager that was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SHOWN
    except (InvalidRunDir, OSError) as error:
        return _report(str(error), EXIT_REFUSED)
    except KeyboardInterrupt:
        return _report("interrupted", 130)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer view",
        description=(__doc__ or "").splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--step", type=_at_least(0), metavar="N", help="groups that step N was the first that could train; with "
        "--evaluations, the evaluation of the policy after step N")  # fmt: skip
    add("--group", type=_at_least(0), metavar="ID", help="one group, with every attempt at it")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--last", type=_at_least(1), metavar="N", help=f"the newest N groups (default {LAST})")
    add("--best", type=_at_least(1), metavar="N", help="the N responses with the highest rewards, highest first")
    add("--worst", type=_at_least(1), metavar="N", help="the N responses with the lowest rewards, lowest first")
    add = parser.add_argument
    add("--failed", action="store_true", help="only responses and attempts that failed")
    add("--evaluations", action="store_true", help="responses to held-out prompts instead of training groups")
    add("--chars", type=_at_least(0), default=CHARACTERS, metavar="N",
        help=f"cut the middle of texts with more than N characters (default {CHARACTERS}); 0 cuts nothing")  # fmt: skip
    add("--json", action="store_true", help="one JSON object per group, with texts in full and without tokens")
    return parser


def _show(args: argparse.Namespace) -> int:
    files = sample_files(args.run_dir, "evaluations" if args.evaluations else "trajectories")
    if not files:
        return _report(_why_nothing(args), EXIT_NOTHING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    is_any = False
    for record in chosen(args, files):
        is_any = True
        sys.stdout.write(as_json(record) if args.json else format_record(record, args.chars, is_colored=is_colored))
    sys.stdout.flush()
    if is_any:
        return EXIT_SHOWN
    is_all = args.step is None and args.group is None and not (args.failed or args.best or args.worst)
    return _report(
        _why_nothing(args) if is_all else f"nothing that was recorded in {args.run_dir} matches", EXIT_NOTHING
    )


def chosen(args: argparse.Namespace, files: Sequence[Path]) -> Iterator[_Record]:
    """With only the responses to show; oldest first, or in the order of rewards."""
    found = (record for path in files for record in _matching(path, args))
    if pick := heapq.nlargest if args.best else heapq.nsmallest if args.worst else None:
        rated = ((pair[0], pair, record) for record in found for pair in record.pairs if pair[0] is not None)
        for _, pair, record in pick(args.best or args.worst, rated, key=itemgetter(0)):
            yield record.only([pair])
    elif args.last or (args.step is None and args.group is None and not args.failed):
        yield from _newest(args, files, args.last or LAST)
    else:
        yield from found


def _newest(args: argparse.Namespace, files: Sequence[Path], number: int) -> list[_Record]:
    """Reads no more files than it must."""
    found: list[_Record] = []
    for path in reversed(files):
        found = [*deque(_matching(path, args), maxlen=number - len(found)), *found]
        if len(found) == number:
            break
    return found


def _matching(path: Path, args: argparse.Namespace) -> Iterator[_Record]:
    """Of one file. Lines that cannot be read are counted on stderr."""
    unread: list[int] = []
    for record in read_lines(
        path, msgspec.json.Decoder(_Record).decode, damaged=lambda number, _: unread.append(number)
    ):
        if args.step not in (None, record.step) or args.group not in (None, record.group_id):
            continue
        failed = [pair for pair in record.pairs if pair[1].status == "failed"]
        if not args.failed:
            yield record
        elif failed or not record.trajectories:  # an attempt that raised has no response
            yield record.only(failed)
    if num := len(unread):
        sys.stderr.write(f"{path}: {num} line{'s' if num > 1 else ''} cannot be read; the others are\n")


def format_record(record: _Record, max_chars: int, *, is_colored: bool) -> str:
    """With at most `max_chars` characters of each text; 0: all."""

    def styled(text: str, style: str) -> str:
        text = _plain(text).replace("\n", "\n    ")  # of an error
        return f"\x1b[{style}m{text}\x1b[0m\n" if is_colored else f"{text}\n"

    why = f"{record.status}: {record.reason}" if record.reason else record.status
    if record.group_id is UNSET:
        of = f" {record.set}" if record.set else ""
        head = f"evaluation{of} of version {record.version}, {why}"
    else:
        head = f"group {record.group_id}, step {record.step} or later (version {record.start_version}), {why}"
    answer = f", answer: {record.prompt.answer}" if record.prompt.answer else ""
    lines = [styled(head, BOLD), styled(f"  {record.prompt.prompt_id}{answer}", DIM)]
    lines.append(_indented(record.prompt.text, max_chars))
    named = [(f"response {one.sample_index}", reward, one) for reward, one in record.pairs]
    if isinstance(record.baseline, _Response):
        named.append(("greedy response", record.baseline.reward, record.baseline))
    for name, reward, one in named:
        lines.append(styled(f"  {name}: {_described(reward, one)}", RED if one.status == "failed" else CYAN))
        lines.append(_indented(one.text, max_chars))
    return "".join([*lines, "\n"])


def as_json(record: _Record) -> str:
    """One line of ASCII, in which nothing acts upon a terminal."""
    return json.dumps(msgspec.to_builtins(record)) + "\n"


def _described(reward: float | None, one: _Response) -> str:
    parts = ", ".join(f"{name} {_number(value)}" for name, value in one.reward_parts.items())
    outcome = f"reward {_number(reward)}" + (f" ({parts})" if parts else "")
    if one.error:  # one that is trained all the same has a reward, see algorithm.on_failure
        outcome = f"failed: {one.error}" if one.status == "failed" else f"{outcome} in spite of: {one.error}"
    ends = sorted({min(one.versions), max(one.versions)}) if one.versions else ["none"]
    return f"{outcome}, {one.status}, {one.num_generated_tokens} tokens, versions {'-'.join(map(str, ends))}"


def _indented(text: str, max_chars: int) -> str:
    """The middle is cut out: a reward reads the end."""
    if 0 < max_chars < len(text):
        cut = f"\n... {len(text) - max_chars:,} characters left out (--chars 0 shows all) ...\n"
        text = _plain(text[: (max_chars + 1) // 2]) + cut + _plain(text[len(text) - max_chars // 2 :])
    else:
        text = _plain(text)
    return "".join(f"    {line}\n" for line in text.split("\n"))


def _plain(text: str) -> str:
    """What a terminal would act upon is escaped: a policy writes anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else str(value)


def _why_nothing(args: argparse.Namespace) -> str:
    with contextlib.suppress(InvalidRunDir):
        if not read_config(args.run_dir).telemetry.record_trajectories:
            return (
                f"{args.run_dir} has no samples: its config.yaml has telemetry.record_trajectories: false; start the "
                "run with telemetry.record_trajectories=true to keep them"
            )
    folder = args.run_dir / ("evaluations" if args.evaluations else "trajectories")
    return f"{folder} has no samples yet; {'no evaluation' if args.evaluations else 'no group'} has ended"


def _at_least(minimum: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text}")
        return int(text)

    return number


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code
