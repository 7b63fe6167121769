"""`python -m trainer.view`: reads trajectories of a run.

Exit codes: 0 something is shown, 1 there is nothing to show, 2 the command line is wrong or RUN_DIR cannot be read.
"""

from __future__ import annotations

import argparse
import heapq
import io
import json
import os
import sys
from collections import deque
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import yaml
from msgspec import UNSET, UnsetType

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


class InvalidRunDir(Exception):
    """The directory holds no run; the message says what is missing."""


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
    """What is shown of a line. Tokens and log-probs, which are most of it, are skipped."""

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
        """What `--step` asks for."""
        return self.version if self.start_version is UNSET else self.start_version + 1


class _File(NamedTuple):
    numbers: list[int]
    """Of its name; files are in the order of these."""
    path: Path


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
        prog="python -m trainer.view",
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
    add("--evaluations", action="store_true", help="answers to held-out prompts instead of training groups")
    add("--chars", type=_at_least(0), default=CHARACTERS, metavar="N",
        help=f"cut the middle of texts with more than N characters (default {CHARACTERS}); 0 cuts nothing")  # fmt: skip
    add("--json", action="store_true", help="one JSON object per group, with texts in full and without tokens")
    return parser


def _show(args: argparse.Namespace) -> int:
    files = files_of(args.run_dir, "evaluations" if args.evaluations else "trajectories")
    if not files:
        return _report(_why_nothing(args), EXIT_NOTHING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    is_any = False
    for record in chosen(args, [file.path for file in files]):
        is_any = True
        sys.stdout.write(as_json(record) if args.json else format_record(record, args.chars, is_colored=is_colored))
    sys.stdout.flush()
    if is_any:
        return EXIT_SHOWN
    is_all = args.step is None and args.group is None and not (args.failed or args.best or args.worst)
    return _report(
        _why_nothing(args) if is_all else f"nothing that was recorded in {args.run_dir} matches", EXIT_NOTHING
    )


def files_of(run_dir: Path, folder: str) -> list[_File]:
    """The files in one folder of a run, oldest first. Raises InvalidRunDir if the directory holds no run."""
    do = "give the run directory, which the run named at its start"
    if not run_dir.is_dir():
        raise InvalidRunDir(f"{run_dir} is not a directory; {do}")
    if not (run_dir / "config.yaml").is_file() and not (run_dir / folder).is_dir():
        raise InvalidRunDir(f"{run_dir} holds no run: it has no config.yaml and no {folder}/; {do}")
    # groups_00003.jsonl; version_20.jsonl, version_20.2.jsonl. Other names are not ours.
    found: list[_File] = []
    for path in (run_dir / folder).glob("*_*.jsonl"):
        numbers = path.stem.removeprefix("groups_").removeprefix("version_").split(".")
        if all(number.isdecimal() for number in numbers):
            found.append(_File([int(number) for number in numbers], path))
    return sorted(found)


def chosen(args: argparse.Namespace, paths: Sequence[Path]) -> Iterator[_Record]:
    """What to show, with only the responses to show; oldest first, or in the order of rewards."""
    found = (record for path in paths for record in _matching(path, args))
    if pick := heapq.nlargest if args.best else heapq.nsmallest if args.worst else None:
        rated = ((pair[0], pair, record) for record in found for pair in _pairs(record) if pair[0] is not None)
        for _, pair, record in pick(args.best or args.worst, rated, key=itemgetter(0)):
            yield _only(record, [pair])
    elif args.last or (args.step is None and args.group is None and not args.failed):
        yield from _newest(args, paths, args.last or LAST)
    else:
        yield from found


def records_of(path: Path) -> Iterator[_Record]:
    """Of one file. A last line without an end is still being written, or was torn by a crash. Other lines that cannot
    be read are counted on stderr."""
    decoder, num_unread = msgspec.json.Decoder(_Record), 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    num_unread += 1
    if num_unread:
        sys.stderr.write(f"{path}: {num_unread} line{'s' if num_unread > 1 else ''} cannot be read; the others are\n")


def format_record(record: _Record, most: int, *, is_colored: bool) -> str:
    """At most `most` characters of each text, or all with 0."""

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
    lines.append(_indented(record.prompt.text, most))
    named = [(f"response {one.sample_index}", reward, one) for reward, one in _pairs(record)]
    if isinstance(record.baseline, _Response):
        named.append(("greedy response", record.baseline.reward, record.baseline))
    for name, reward, one in named:
        lines.append(styled(f"  {name}: {_described(reward, one)}", RED if one.status == "failed" else CYAN))
        lines.append(_indented(one.text, most))
    return "".join([*lines, "\n"])


def as_json(record: _Record) -> str:
    """One line of ASCII: JSON allows what a terminal would act upon to stand as it is."""
    return json.dumps(msgspec.to_builtins(record)) + "\n"


def _newest(args: argparse.Namespace, paths: Sequence[Path], number: int) -> list[_Record]:
    """Looks into no more files than it must."""
    found: list[_Record] = []
    for path in reversed(paths):
        found = [*deque(_matching(path, args), maxlen=number - len(found)), *found]
        if len(found) == number:
            break
    return found


def _matching(path: Path, args: argparse.Namespace) -> Iterator[_Record]:
    for record in records_of(path):
        if args.step not in (None, record.step) or args.group not in (None, record.group_id):
            continue
        if not args.failed:
            yield record
            continue
        failed = [pair for pair in _pairs(record) if pair[1].status == "failed"]
        if failed or not record.trajectories:  # an attempt that raised has no response
            yield _only(record, failed)


def _pairs(record: _Record) -> list[tuple[float | None, _Response]]:
    return list(zip(record.rewards, record.trajectories, strict=True))


def _only(record: _Record, pairs: Sequence[tuple[float | None, _Response]]) -> _Record:
    rewards, responses = [reward for reward, _ in pairs], [response for _, response in pairs]
    return msgspec.structs.replace(record, rewards=rewards, trajectories=responses, baseline=UNSET)


def _described(reward: float | None, one: _Response) -> str:
    parts = ", ".join(f"{name} {_number(value)}" for name, value in one.reward_parts.items())
    told = f"reward {_number(reward)}" + (f" ({parts})" if parts else "")
    if one.error:
        told = f"failed: {one.error}"
    ends = sorted({min(one.versions), max(one.versions)}) if one.versions else ["none"]
    return f"{told}, {one.status}, {one.num_generated_tokens} tokens, versions {'-'.join(map(str, ends))}"


def _indented(text: str, most: int) -> str:
    """The middle is cut out: how a response ends is what its reward reads."""
    if 0 < most < len(text):
        cut = f"\n... {len(text) - most:,} characters left out (--chars 0 shows all) ...\n"
        begin, end = _plain(text[: (most + 1) // 2]), _plain(text[len(text) - most // 2 :])
        text = begin + cut + end
    else:
        text = _plain(text)
    return "".join(f"    {line}\n" for line in text.split("\n"))


def _plain(text: str) -> str:
    """What a terminal would act upon is escaped: a policy writes anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else str(value)


def _why_nothing(args: argparse.Namespace) -> str:
    folder = args.run_dir / ("evaluations" if args.evaluations else "trajectories")
    if _records(args.run_dir) is False:
        return (
            f"{args.run_dir} has no samples: its config.yaml says telemetry.record_trajectories: false; start the run "
            "with telemetry.record_trajectories=true to keep them"
        )
    return f"{folder} has no samples yet; {'no evaluation' if args.evaluations else 'no group'} has ended"


def _records(run_dir: Path) -> object:
    """`telemetry.record_trajectories` of the run; None if nobody can know."""
    try:
        return yaml.safe_load((run_dir / "config.yaml").read_bytes())["telemetry"]["record_trajectories"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
        return int(text)

    return number


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
