"""Combinations of values around `mode`: staleness, and devices that learners and engines share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.conflicts import conflict, value_of
from trainer.config.keys import value_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig
    from trainer.errors import Problem

_STALENESS = {"sync": 0, "one_step_off": 1}
_IN_TURNS: dict[str, tuple[object, str]] = {
    "mode.in_flight": ("abort", "a sleeping engine has no cache, so its requests are given back and go on afterwards"),
    "weight_sync.commit": ("inplace", "nothing is generated while a version moves, so a shadow copy gains nothing"),
    "weight_sync.num_slots": (1, "the next version is packed when the last one is live, so a second slot stays empty"),
}
"""Keys that have one useful value where devices are shared."""
_WITHIN_A_DEVICE = {"auto", "ipc", "shm", "gloo"}


def mode_problems(config: RunConfig) -> Iterator[Problem]:
    wanted = _STALENESS.get(config.mode.name)
    if wanted is not None and config.mode.max_staleness != wanted:
        allowed = (
            f"must be {wanted} with mode.name={config.mode.name}; what the file of --config-name or the command line "
            "says wins over the group"
        )
        do = f"say mode.max_staleness={wanted} beside it, or mode=async, which takes any"
        yield conflict(config, "mode.max_staleness", allowed, do, "mode.name")
    if config.mode.shares_devices:
        yield from _shared_devices(config)


def pairing_problems(config: RunConfig) -> Iterator[Problem]:
    """On shared accelerators: every device has one rank and one engine worker. A CPU has no devices to pair on."""
    rollout = config.rollout
    num_workers = rollout.num_replicas * rollout.tensor_parallel_size
    if config.mode.shares_devices and config.learner.num_ranks != num_workers:
        allowed = (
            f"must be rollout.num_replicas * rollout.tensor_parallel_size = {rollout.num_replicas} * "
            f"{rollout.tensor_parallel_size} = {num_workers} with mode.name={config.mode.name}: every device has one "
            "learner rank and one engine worker"
        )
        also = "rollout.num_replicas", "rollout.tensor_parallel_size", "mode.name"
        yield conflict(config, "learner.num_ranks", allowed, "change one of them", *also)


def _shared_devices(config: RunConfig) -> Iterator[Problem]:
    chosen = f"mode.name={config.mode.name}"
    for key, (value, why) in _IN_TURNS.items():
        if value_of(config, key) != value:
            allowed = f"must be {value_text(value)} with {chosen}: {why}"
            yield conflict(config, key, allowed, "the group mode=colocated sets it", "mode.name")
    trainer = config.trainer
    if config.task.eval_path and (trainer.eval_every or trainer.eval_at_start) and not trainer.eval_blocking:
        allowed = f"must be true with {chosen}: engines cannot evaluate while they sleep"
        yield conflict(config, "trainer.eval_blocking", allowed, "the group mode=colocated sets it", "mode.name")
    if config.weight_sync.transport not in _WITHIN_A_DEVICE:
        allowed = f"connects two devices, and with {chosen} learner and engine are on one"
        yield conflict(config, "weight_sync.transport", allowed, "use auto or ipc", "mode.name")
