"""Reward processes: every way a user's function can misbehave costs its own item, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.errors import DataError, RewardError
from rollout.reward.call import RewardResult
from rollout.reward.pool import RewardPipeline
from rollout.reward.process import DRIVER_ONLY
from rollout.types import Prompt
from tests.fakes.process_life import is_running

if TYPE_CHECKING:
    from collections.abc import Sequence

BEHAVIOUR = """
import os, sys, time, json

def reward(*, prompt, response, answer, metadata):
    print("user code may print")
    match response.split():
        case ["value", number]: return float(number)
        case ["dict"]: return {"reward": 0.5, "format": 1, "length": 2.0}
        case ["dict_without_reward"]: return {"score": 1.0}
        case ["raise"]: raise KeyError("missing thing")
        case ["exit"]: sys.exit(3)
        case ["die"]: os._exit(7)
        case ["spin"]:
            while True: pass
        case ["sleep", seconds]: time.sleep(float(seconds)); return 1.0
        case ["text"]: return "1.0"
        case ["none"]: return None
        case ["pid"]: return float(os.getpid())
        case ["torch"]: return float("torch" in sys.modules or "ray" in sys.modules)
        case ["main"]: return float(any(name.startswith("pytest") for name in sys.modules))
        case ["metadata"]: return float(metadata["level"]) + len(prompt) + len(answer)
        case ["grandchild", path, leaves]:
            import subprocess
            program = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(program, start_new_session=leaves == "leaves")
            open(path, "w").write(str(child.pid))
            while True: pass
        case ["chain", path]:
            while True:
                with open(path, "a") as file:
                    file.write(f"{os.getpid()}\\n")
                if child := os.fork():
                    os.waitpid(child, 0)
                time.sleep(0.003)
        case ["orphan", path]:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    open(path, "w").write(str(os.getpid()))
                    time.sleep(600)
                os._exit(0)
            while not (os.path.exists(path) and open(path).read()): time.sleep(0.02)
            os.kill(os.getpid(), 11)

        case ["nonsense"]: return write_everywhere(b'{"reward": "x", garbage\\n[1, 2]\\n"text"\\nnull\\n')
        case ["forged"]: return write_everywhere(b'{"reward": {"reward": 99.0}}\\n{"loaded": true}\\n')
        case ["stop_guards", path]:
            inner = os.getppid()
            outer = int(open(f"/proc/{inner}/stat").read().rpartition(")")[2].split()[1])
            child = os.fork()
            if child == 0:
                os.setsid()
                os.execve("/bin/sleep", ["sleep", "600"], {})
            open(path, "w").write(f"{inner} {outer} {os.getpid()} {child}")
            os.kill(outer, 19), os.kill(inner, 19)
            while True: time.sleep(1)
        case ["has_key", name]: return float(name in os.environ)

def write_everywhere(text):
    for descriptor in range(3, 40):
        try: os.write(descriptor, text)
        except OSError: pass
    return 0.5

def other(*, prompt, response, answer, metadata):
    return -5.0
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    path = tmp_path / "behaviour.py"
    path.write_text(BEHAVIOUR)
    return f"{path}:reward"


def a_prompt(**changes: object) -> Prompt:
    values: dict[str, object] = {
        "prompt_id": "train/17",
        "token_ids": np.array([1, 2], np.int32),
        "text": "12+7=",
        "answer": "19",
        "metadata": {"level": 3},
    }
    return Prompt(**(values | changes))  # type: ignore[arg-type]


def values(outcomes: Sequence[RewardResult | RewardError]) -> list[object]:
    return [o.reward if isinstance(o, RewardResult) else type(o) for o in outcomes]


def wait_until_gone(pids: Sequence[int], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


async def test_user_function_gets_prompt_answer_and_metadata(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        assert await rewards.score(a_prompt(), "value 0.1") == RewardResult(reward=0.1)
        assert (await rewards.score(a_prompt(), "metadata")).reward == 3 + len("12+7=") + len("19")
        assert await rewards.score(a_prompt(), "dict") == RewardResult(reward=0.5, parts={"format": 1.0, "length": 2.0})


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"raised KeyError: 'missing thing'\n.*behaviour\.py.*line \d+, in reward"),
        ("exit", "raised SystemExit: 3"),
        ("die", "exit code 7"),
        ("value nan", "returned nan"),
        ("value inf", "returned inf"),
        ("text", r"returned str '1\.0'"),
        ("none", "returned NoneType None"),
        ("dict_without_reward", "without the key"),
    ],
)
async def test_a_bad_call_is_an_error_that_names_reward_prompt_and_cause(
    function: str, response: str, message: str
) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        with pytest.raises(RewardError, match=f"(?s)behaviour.*train/17.*{message}"):
            await rewards.score(a_prompt(), response)
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


@pytest.mark.parametrize("response", ["nonsense", "forged"])
async def test_nonsense_in_the_pipe_of_the_answers_costs_its_own_item(function: str, response: str) -> None:
    batch = ["value 1", response, "value 2"]
    async with RewardPipeline(function, timeout_s=5.0, num_processes=1) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), batch)
        assert values(outcomes) == [1.0, RewardError, 2.0]
        assert "must not write to descriptors" in str(outcomes[1])
        assert (await rewards.score(a_prompt(), "value 3")).reward == 3.0


async def test_a_reward_that_stops_its_guards_ends_with_all_that_it_started(function: str, tmp_path: Path) -> None:
    async with RewardPipeline(function, timeout_s=1.0, num_processes=1) as rewards:
        with pytest.raises(RewardError, match="longer than 1 s"):
            await rewards.score(a_prompt(), f"stop_guards {tmp_path / 'pids'}")
        await asyncio.to_thread(wait_until_gone, [int(pid) for pid in (tmp_path / "pids").read_text().split()])
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


async def test_what_the_run_alone_needs_does_not_reach_a_reward(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DRIVER_ONLY, "JUDGE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    async with RewardPipeline(function, timeout_s=5.0, num_processes=1) as rewards:
        batch = [f"has_key {name}" for name in (*DRIVER_ONLY, "JUDGE_API_KEY")]
        assert values(await rewards.score_batch(a_prompt(), batch)) == [0.0] * len(DRIVER_ONLY) + [1.0]


async def test_a_hang_in_a_batch_marks_only_its_own_item(function: str) -> None:
    batch = ["value 1", "spin", "value 2", "die", "raise", "value 3"]
    async with RewardPipeline(function, timeout_s=5.0, num_processes=1) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), batch)
    assert values(outcomes) == [1.0, RewardError, 2.0, RewardError, RewardError, 3.0]
    assert "longer than 5 s" in str(outcomes[1])


async def test_no_answer_waits_for_a_process_for_ever_and_the_others_go_on(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1, queue_timeout_s=0.5) as rewards:
        busy = asyncio.create_task(rewards.score(a_prompt(), "sleep 1.2"))
        await asyncio.sleep(0.1)
        with pytest.raises(RewardError, match=r"behaviour.*train/17.*no reward process was free for 0\.5 s") as caught:
            await rewards.score(a_prompt(), "value 1")
        assert "task.reward.num_processes" in str(caught.value)
        assert "task.reward.queue_timeout_s" in str(caught.value)
        assert (await busy).reward == 1.0
        assert (await rewards.score(a_prompt(), "value 2")).reward == 2.0, "its place in the queue is free again"


async def test_the_limit_holds_for_each_item_not_for_the_batch(function: str) -> None:
    async with RewardPipeline(function, timeout_s=5.0, num_processes=1) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), ["sleep 0.6"] * 9)
    assert values(outcomes) == [1.0] * 9


async def test_a_batch_runs_in_one_process_and_batches_run_side_by_side(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=2) as rewards:
        batches = await asyncio.gather(
            *(rewards.score_batch(a_prompt(), ["sleep 0.3", "pid", "pid"]) for _ in range(2))
        )
    pids = [values(batch)[1:] for batch in batches]
    assert all(first == second for first, second in pids)
    assert pids[0] != pids[1]


async def test_a_blocked_event_loop_does_not_turn_an_answer_into_a_hang(function: str) -> None:
    async with RewardPipeline(function, timeout_s=0.3, num_processes=1) as rewards:
        call = asyncio.create_task(rewards.score(a_prompt(), "value 4"))
        await asyncio.sleep(0.01)
        time.sleep(2.0)
        assert (await call).reward == 4.0


async def test_reward_processes_import_neither_torch_nor_the_parents_main_module(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        assert values(await rewards.score_batch(a_prompt(), ["torch", "main"])) == [0.0, 0.0]


async def test_prompt_may_name_its_own_reward(function: str) -> None:
    other = function.replace(":reward", ":other")
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        assert (await rewards.score(a_prompt(reward=other), "value 1")).reward == -5.0
        assert (await rewards.score(a_prompt(reward="arithmetic"), " 19\n")).reward == 1.0
        outcomes = await rewards.score_batch(a_prompt(reward="arithmetics"), ["a", "b"])
        assert values(outcomes) == [RewardError, RewardError]
        assert "did you mean 'arithmetic'" in str(outcomes[0])


async def test_relative_files_are_looked_for_where_the_run_was_started(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    async with RewardPipeline("behaviour.py:reward", timeout_s=10.0, num_processes=1, directory=tmp_path) as rewards:
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0
        assert (await rewards.score(a_prompt(reward="./behaviour.py:other"), "value 1")).reward == -5.0
        with pytest.raises(RewardError, match=rf"no file {tmp_path}/absent.py \(paths are relative to {tmp_path}\)"):
            await rewards.score(a_prompt(reward="absent.py:reward"), "value 1")


async def test_cancelled_call_does_not_leak_its_answer_into_the_next(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        call = asyncio.create_task(rewards.score_batch(a_prompt(), ["sleep 0.2", "value 8", "value 9"]))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


async def test_a_cancelled_first_call_does_not_tell_of_the_next_reward(function: str, tmp_path: Path) -> None:
    slow, judge = tmp_path / "slow.py", tmp_path / "judge.py"
    slow.write_text(
        f"import time\nopen({str(tmp_path / 'began')!r}, 'w').close()\ntime.sleep(1)\ndef reward(**_): return 3.0\n"
    )
    judge.write_text("async def reward(**_): return 4.0\n")
    async with RewardPipeline(function, timeout_s=30.0, num_processes=1) as rewards:
        call = asyncio.create_task(rewards.score(a_prompt(reward=f"{slow}:reward"), ""))
        async with asyncio.timeout(30):
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await rewards.score(a_prompt(reward=f"{judge}:reward"), "")).reward == 4.0
        assert (await rewards.score(a_prompt(reward=f"{slow}:reward"), "")).reward == 3.0


async def test_a_reward_that_does_not_import_holds_up_no_other_and_is_tried_once_in_a_while(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, tries, go = tmp_path / "broken.py", tmp_path / "tries", tmp_path / "go"
    broken.write_text(
        f"import os, time\nopen({str(tries)!r}, 'a').write('x')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\nraise OSError('of the import')\n"
    )
    async with RewardPipeline(function, timeout_s=30.0, num_processes=2) as rewards:
        bad = [asyncio.create_task(rewards.score(a_prompt(reward=f"{broken}:reward"), "")) for _ in range(5)]
        async with asyncio.timeout(30):
            while not tries.exists():
                await asyncio.sleep(0.02)
        other = a_prompt(reward=function.replace(":reward", ":other"))
        async with asyncio.timeout(30):
            assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0
            assert (await rewards.score(other, "")).reward == -5.0
        assert not any(call.done() for call in bad), "the import is still under way"
        go.touch()
        outcomes = await asyncio.gather(*bad, return_exceptions=True)
        assert all("of the import" in str(outcome) for outcome in outcomes)
        assert "of the import" in str((await rewards.score_batch(a_prompt(reward=f"{broken}:reward"), [""]))[0])
        assert tries.read_text() == "x"
        broken.write_text("def reward(**_): return 6.0\n")
        monkeypatch.setattr("rollout.reward.pool.RETRY_S", 0.0)
        assert (await rewards.score(a_prompt(reward=f"{broken}:reward"), "")).reward == 6.0


async def test_the_first_call_of_a_reward_does_not_wait_for_a_process_for_ever(function: str) -> None:
    async with RewardPipeline(function, timeout_s=60.0, num_processes=1, queue_timeout_s=0.5) as rewards:
        busy = asyncio.create_task(rewards.score(a_prompt(), "spin"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            with pytest.raises(RewardError, match="no reward process was free"):
                await rewards.score(a_prompt(reward=function.replace(":reward", ":other")), "")
        busy.cancel()


async def test_close_kills_busy_processes_and_answers_their_callers(function: str) -> None:
    rewards = RewardPipeline(function, timeout_s=60.0, num_processes=2)
    await rewards.start()
    pids = [int((await rewards.score(a_prompt(), "pid")).reward)]
    calls = [asyncio.create_task(rewards.score_batch(a_prompt(), ["spin", "value 1"])) for _ in range(4)]
    await asyncio.sleep(0.2)
    await rewards.close()
    wait_until_gone(pids, timeout_s=10.0)
    for outcome in [o for batch in await asyncio.gather(*calls) for o in batch]:
        assert isinstance(outcome, RewardError)
        assert "was closed" in str(outcome)
    assert "was closed" in str((await rewards.score_batch(a_prompt(), ["value 1"]))[0])


@pytest.mark.parametrize("session", ["stays", "leaves"])
async def test_a_hang_takes_what_the_reward_started_with_it(function: str, tmp_path: Path, session: str) -> None:
    pid_file = tmp_path / "grandchild.pid"
    async with RewardPipeline(function, timeout_s=5.0, num_processes=1) as rewards:
        with pytest.raises(RewardError, match="longer than"):
            await rewards.score(a_prompt(), f"grandchild {pid_file} {session}")
        wait_until_gone([int(pid_file.read_text())])


async def test_what_forks_again_and_again_is_ended_too(function: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "chain.pids"
    async with RewardPipeline(function, timeout_s=1.0, num_processes=1) as rewards:
        with pytest.raises(RewardError, match="longer than"):
            await rewards.score(a_prompt(), f"chain {pid_file}")
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) > 10
    wait_until_gone(pids)
    assert len(pid_file.read_text().split()) == len(pids)


async def test_a_crash_takes_orphans_with_it_and_says_its_signal(function: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "orphan.pid"
    async with RewardPipeline(function, timeout_s=20.0, num_processes=1) as rewards:
        with pytest.raises(RewardError, match="its process ended by signal SIGSEGV"):
            await rewards.score(a_prompt(), f"orphan {pid_file}")
        wait_until_gone([int(pid_file.read_text())])


async def test_a_function_that_does_not_import_stops_the_start_and_leaves_no_process(tmp_path: Path) -> None:
    path, pid_file = tmp_path / "broken.py", tmp_path / "pid"
    path.write_text(f"import os\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\nimport no_such_module\n")
    rewards = RewardPipeline(f"{path}:reward", timeout_s=5.0, num_processes=1)
    with pytest.raises(DataError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        await rewards.start()
    wait_until_gone([int(pid_file.read_text())])


async def test_an_import_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("rollout.reward.process.LOAD_TIMEOUT_S", 1.0)
    with pytest.raises(DataError, match=r"the import of .*slow\.py:reward took longer than 1 s"):
        await RewardPipeline(f"{path}:reward", timeout_s=5.0, num_processes=1).start()


@pytest.mark.parametrize(
    ("deadly", "size", "message"),
    [
        (signal.SIGSTOP, 0, r"hung between two calls: to take the next one took longer than 0\.5 s"),
        (signal.SIGSTOP, 1 << 20, "hung between two calls"),  # more than the pipe holds
        (signal.SIGKILL, 0, "ended by signal SIGKILL$"),
    ],
)
async def test_an_idle_process_that_hangs_or_dies_costs_one_item_and_is_no_failed_import(
    function: str, deadly: signal.Signals, size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards, asyncio.timeout(20):
        pid = int((await rewards.score(a_prompt(), "pid")).reward)
        with monkeypatch.context() as patched:
            patched.setattr("rollout.reward.process.LOAD_TIMEOUT_S", 0.5)
            os.kill(pid, deadly)
            call = asyncio.create_task(rewards.score_batch(a_prompt(), ["pid" + " " * size, "value 2", "value 3"]))
            await asyncio.sleep(0)  # its time runs; the process that takes the place has all the time that it needs
        outcomes = await call
        assert values(outcomes) == [RewardError, 2.0, 3.0]
        with pytest.raises(RewardError, match=message):
            raise outcomes[0]  # type: ignore[misc]
        assert "import" not in str(outcomes[0])
        wait_until_gone([pid])


async def test_a_process_lost_after_the_import_is_no_failed_import_at_the_start_either(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = RewardPipeline(function, timeout_s=10.0, num_processes=1)
    await rewards.start()
    pid = int((await rewards.score(a_prompt(), "pid")).reward)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("rollout.reward.process.LOAD_TIMEOUT_S", 0.5)
    with pytest.raises(DataError, match=r"behaviour\.py:reward' was imported, but then its process hung"):
        await rewards.start()
    wait_until_gone([pid])


async def test_inline_reward_starts_no_process() -> None:
    async with RewardPipeline("arithmetic", timeout_s=1.0, num_processes=2) as rewards:
        assert values(await rewards.score_batch(a_prompt(), ["19", " 19 ", "1 9", "20", ""])) == [1, 1, 0, 0, 0]
        children = subprocess.run(
            ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True
        ).stdout
        assert "rollout.reward.child" not in children


PARENT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from rollout.reward.pool import RewardPipeline
from rollout.reward.process import DRIVER_ONLY
from rollout.types import Prompt

async def main():
    prompt = Prompt(prompt_id="p", token_ids=np.zeros(1, np.int32), text="", answer="")
    rewards = RewardPipeline(sys.argv[1], timeout_s=600.0, num_processes=2)
    await rewards.start()
    busy = asyncio.create_task(rewards.score(prompt, f"grandchild {sys.argv[2]} leaves"))
    pids = [p.pid for p in rewards._processes]
    other = int((await rewards.score(prompt, "pid")).reward)
    while not (Path(sys.argv[2]).exists() and Path(sys.argv[2]).read_text()):
        await asyncio.sleep(0.02)
    print(*pids, other, Path(sys.argv[2]).read_text(), flush=True)
    await busy

asyncio.run(main())
"""


@pytest.mark.parametrize("which", [0, 1])
async def test_if_one_guard_is_killed_the_other_ends_what_a_reward_has_started(
    function: str, tmp_path: Path, which: int
) -> None:
    pid_file = tmp_path / "grandchild.pid"
    async with RewardPipeline(function, timeout_s=60.0, num_processes=1) as rewards:
        call = asyncio.create_task(rewards.score(a_prompt(), f"grandchild {pid_file} leaves"))
        async with asyncio.timeout(30):
            while not pid_file.exists() or not pid_file.read_text():
                await asyncio.sleep(0.02)
        program = int(pid_file.read_text())
        reward = parent_of(program)
        guards = parent_of(parent_of(reward)), parent_of(reward)
        assert parent_of(guards[0]) == os.getpid()
        os.kill(guards[which], signal.SIGKILL)
        with pytest.raises(RewardError):
            await call
        wait_until_gone([program, reward, *guards])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_reward_processes_and_what_they_started_die_with_a_killed_parent(
    function: str, tmp_path: Path, deadly: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, function, str(tmp_path / "grandchild.pid")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(deadly)
        parent.wait(10)
        wait_until_gone(pids)
