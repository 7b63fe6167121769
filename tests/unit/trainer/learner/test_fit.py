"""How many tokens a micro-batch gets: devices whose memory grows along a line are played."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainer.config.schema import RunConfig
from trainer.errors import LearnerError
from trainer.learner import fit
from trainer.learner.fit import (
    ENOUGH_TOKENS,
    MOST_TOKENS,
    SMALL,
    choose,
    fit_micro_batch,
    fitting_tokens,
    on_grid,
    usable_beside_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.data.batch import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")


class Device:
    """Takes `fixed` bytes and `per_token` more; beyond `fails_from` tokens it is out of memory, and where others left
    fewer than are needed, it only `has` some."""

    def __init__(self, *, fixed: int, per_token: int, fails_from: int = 1 << 30, has: int = 1 << 60) -> None:
        self._fixed, self._per_token, self._fails_from, self._has = fixed, per_token, fails_from, has
        self.tried: list[int] = []
        self.taken: list[int] = []

    def peak_bytes(self, num_tokens: int) -> int:
        self.tried.append(num_tokens)
        if num_tokens >= self._fails_from:
            raise torch.OutOfMemoryError
        return self._fixed + self._per_token * num_tokens

    def can_take(self, num_bytes: int) -> bool:
        self.taken.append(num_bytes)
        return num_bytes <= self._has

    def is_room(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except torch.OutOfMemoryError:
            return False
        return True

    def fit(self, *, limit: int, longest: int = 1024, earlier: int | None = None) -> int:
        cfg = RunConfig()
        cfg = replace(
            cfg,
            task=replace(cfg.task, max_prompt_tokens=longest // 2),
            rollout=replace(cfg.rollout, max_response_tokens=longest - longest // 2),
        )
        given: dict[str, Any] = {"cfg": cfg, "earlier": earlier, "is_room": self.is_room, "can_take": self.can_take}
        tokens, stays = fitting_tokens(self.peak_bytes, limit_bytes=limit, beside_bytes=None, **given)
        assert stays, "devices of its own"
        return tokens


@pytest.mark.parametrize(
    ("limit", "more", "expected"),
    [
        (1000 + 10 * 20000, {}, 16384),  # rounded down, so that a little more or less gives the same
        (1000 + 10 * 24577, {}, 24576),
        (1000 + 10 * 24575, {}, 16384),
        (1 << 40, {}, MOST_TOKENS),
        (1000 + 10 * 5000, {"longest": 5001}, 5001),  # the longest sequence must be trained
        (1000 + 10 * 20000, {"earlier": 12288}, 12288),  # a resumed run repeats its numbers
        (1000 + 10 * 20000, {"earlier": 19000}, 19000),
        (1000 + 10 * 20000, {"earlier": 32768}, 16384),
    ],
)
def test_tokens_fill_the_limit_and_are_rehearsed(limit: int, more: dict[str, Any], expected: int) -> None:
    device = Device(fixed=1000, per_token=10)
    assert device.fit(limit=limit, **more) == expected
    assert device.tried == [*SMALL, expected]


def test_what_does_not_fit_is_halved_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(fixed=1000, per_token=10, fails_from=9000)
    assert device.fit(limit=1000 + 10 * 16384) == 8192
    assert "16384 tokens did not fit on the device of a rank; it is 8192 now" in caplog.text
    device = Device(fixed=1000, per_token=10, fails_from=8000)
    with pytest.raises(LearnerError, match=r"8192 tokens \(learner\.max_tokens_per_micro_batch\) does not fit"):
        device.fit(limit=1000 + 10 * 16384)
    caplog.clear()
    with pytest.raises(LearnerError, match="99999 tokens"):  # nothing to lower: the longest sequence must fit
        Device(fixed=1000, per_token=10, fails_from=9000).fit(limit=1000 + 10 * 99999, longest=99999)
    assert not caplog.text
    device = Device(fixed=1000, per_token=10, has=1000 + 10 * 9000)
    assert device.fit(limit=1000 + 10 * 16384) == 8192
    assert device.tried == [*SMALL, 8192] and device.taken == [1000 + 10 * 16384, 1000 + 10 * 8192]
    with pytest.raises(LearnerError, match="8192 tokens"):
        Device(fixed=1000, per_token=10, has=1000 + 10 * 8000).fit(limit=1000 + 10 * 16384)
    with pytest.raises(LearnerError, match="4096 tokens"):
        Device(fixed=1000, per_token=10, fails_from=3000).fit(limit=1 << 30)


class Learner:
    """Rehearses on a device of 100,000 bytes, of which a token takes 10."""

    layout = SimpleNamespace(shares_prefix=False)

    def __init__(self) -> None:
        self.rehearsed: list[int] = []

    def rehearse(self, batch: MicroBatch) -> None:
        self.rehearsed.append(len(batch.token_ids))
        if self.max_memory_allocated() > 100_000:
            raise torch.OutOfMemoryError("tried 1 GiB")

    # as torch's module for the device, and as its backend
    torch_device = "accelerator"

    def reset_peak_memory_stats(self) -> None: ...

    def release_cached(self) -> None: ...

    def max_memory_allocated(self) -> int:
        return 1000 + 10 * self.rehearsed[-1]

    def memory_info(self) -> tuple[int, int]:
        return 0, 100_000


COLOCATED: dict[str, Any] = {"name": "colocated"}


@pytest.mark.parametrize(
    ("tokens", "mode", "arena_bytes", "rehearsed", "stays"),
    [
        ("auto", {}, 0, [*SMALL, 8192], True),
        ("auto", {}, 10_000, [*SMALL, 6144], True),
        ("auto", {}, 30_000, [*SMALL, 4096], True),
        (9000, {}, 0, [9000], True),
        (9950, {}, 0, [], None),
        # An engine that sleeps keeps something; one that stays awake has half of the device.
        ("auto", COLOCATED, 3000, [*SMALL, 6144], False),
        (3000, COLOCATED, 3000, [3000], True),
        (3000, COLOCATED | {"offload": "always"}, 3000, [3000], False),
        (3150, COLOCATED, 3000, [3150], False),
        (3150, COLOCATED | {"offload": "never"}, 3000, [], None),
        ("auto", COLOCATED | {"offload": "never"}, 3000, [*SMALL, 3072], True),
        ("auto", COLOCATED | {"offload": "never"}, 34_500, [], None),
    ],
)
def test_a_device_is_filled_beside_what_others_take(
    tokens: Any,
    mode: dict[str, Any],
    arena_bytes: int,
    rehearsed: list[int],
    stays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg, device = RunConfig(), Learner()
    cfg = replace(
        cfg,
        mode=replace(cfg.mode, **mode),
        task=replace(cfg.task, max_prompt_tokens=50),
        rollout=replace(cfg.rollout, max_response_tokens=50, gpu_memory_utilization=0.5),
        learner=replace(cfg.learner, max_tokens_per_micro_batch=tokens),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _name: device)
    monkeypatch.setattr(fit, "take_block", lambda *_: None)
    seam: Any = device
    if not rehearsed:
        with pytest.raises(LearnerError, match=rf"{100 if tokens == 'auto' else tokens} tokens.* lower "):
            fit_micro_batch(seam, cfg, seam, arena_bytes=arena_bytes, earlier=None)
        return
    assert fit_micro_batch(seam, cfg, seam, arena_bytes=arena_bytes, earlier=None) == (rehearsed[-1], stays)
    assert device.rehearsed == rehearsed


@pytest.mark.parametrize(
    ("most", "beside", "changes", "expected"),
    [
        (70_000, 70_000, {}, (MOST_TOKENS, True)),
        (70_000, 33_000, {}, (ENOUGH_TOKENS, True)),  # of more it would gain less than it loses by leaving
        (70_000, 30_000, {}, (MOST_TOKENS, False)),
        (20_000, 16_384, {}, (16_384, True)),
        (20_000, 16_383, {}, (16_384, False)),
        (70_000, 40_000, {"longest": 40_001}, (MOST_TOKENS, False)),
        (70_000, 50_000, {"earlier": 65_536}, (65_536, False)),  # a resumed run repeats its numbers
        (70_000, 50_000, {"earlier": 49_152}, (49_152, True)),
        (70_000, 33_000, {"engine_args": {"kv_cache_memory_bytes": 1}}, (MOST_TOKENS, False)),
    ],
)
def test_a_learner_stays_on_a_shared_device_if_it_has_room_for_enough_tokens_beside_the_engine(
    most: int, beside: int, changes: dict[str, Any], expected: tuple[int, bool]
) -> None:
    cfg, longest = RunConfig(), changes.get("longest", 1000)
    cfg = replace(
        cfg,
        mode=replace(cfg.mode, name="colocated"),
        task=replace(cfg.task, max_prompt_tokens=1),
        rollout=replace(cfg.rollout, max_response_tokens=longest - 1, engine_args=changes.get("engine_args", {})),
    )
    beside_engine = usable_beside_engine(cfg, 1 << 40)
    assert choose(cfg, most, None if beside_engine is None else beside, earlier=changes.get("earlier")) == expected


def test_grid_has_two_numbers_per_power_of_two() -> None:
    assert [on_grid(n) for n in (0.2, 1, 2, 3, 4, 5.9, 6, 48000, 49152, 65535)] == [
        1, 1, 2, 3, 4, 4, 6, 32768, 49152, 49152,
    ]  # fmt: skip
