"""Runs with real workers, routing, restarts and weight sync around scripted engines: which tokens came in which order.

Every seed is a world of its own: engines that die, fall silent or miss a commit, shared devices, requests that move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes.scripted_replica import Workload
from tests.golden import seams
from tests.golden.clocks import virtual_clocks
from tests.golden.net import Part
from tests.simulation.fleet import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SMALL: dict[str, Any] = {"num_steps": 12, "groups_per_step": 3, "max_response_tokens": 120}
TROUBLE: dict[str, Any] = {"reward_error_frac": 0.05, "group_error_frac": 0.05, "dynamic_sampling": True}
TAIL, CHUNKS = Workload(tail=1.1, stream_interval=16), Workload(tail=0.7, stream_interval=7)


def cases() -> Mapping[str, Any]:
    plans: dict[str, dict[str, Any]] = {
        "steady": {"seed": 1, "num_workers": 2, "max_staleness": 2},
        "sync": {"seed": 2, "max_staleness": 0, "workload": CHUNKS, "eval_every": 3},
        "deaths, silence and missed commits": {"seed": 3, "death_every_s": 6.0, "restart_s": 20.0, "workload": TAIL},
        "all engines die": {"seed": 4, "death_every_s": 5.0, "all_die_frac": 0.5, "restart_s": 10.0, **TROUBLE},
        "workers die": {"seed": 5, "worker_death_every_s": 7.0, "num_workers": 2, "max_staleness": 3},
        "colocated": {"seed": 6, "shares_devices": True, "num_arena_slots": 1, "eval_every": 4, "workload": TAIL},
        "colocated, deaths": {"seed": 7, "shares_devices": True, "death_every_s": 10.0, "restart_s": 5.0},
        "repacking": {"seed": 8, "repack_below": 4, "num_replicas": 5, "workload": CHUNKS, "max_staleness": 2},
        "limits and aborts": {"seed": 9, "most_requests": 2, "aborts_at_commit": True, "pause_s": 3.0, **TROUBLE},
        "no restart is left": {"seed": 11, "death_every_s": 5.0, "restart_s": 2.0, "max_restarts": 1, "num_steps": 25},
        "slow pulls, evaluation": {"seed": 10, "failed_pull_frac": 0.2, "sync_s": 5.0, "eval_every": 2},
    }  # fmt: skip
    return {name: Plan(**{**SMALL, **plan}) for name, plan in plans.items()}


def play(plan: Plan, folder: Path) -> Any:
    with virtual_clocks():
        return seams.simulated(plan, folder / "run")


WORLDS = Part(name="worlds", cases=cases, play=play)
