"""How long an engine's watchdog lets it stay paused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fakes.scripted_run import config
from trainer.driver import actors as compose
from trainer.driver.placement import plan_placement
from weight_sync.device.select import get_backend


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(120.0, 300.0), (900.0, 1800.0)])
def test_no_engine_is_ended_while_a_sync_may_still_try_again(
    timeout_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    actor = SimpleNamespace(remote=lambda _spec, *, pause_limit_s: limits.append(pause_limit_s))
    monkeypatch.setattr(compose, "engine_actor", lambda: SimpleNamespace(options=lambda **_: actor))
    cfg = config(weight_sync={"timeout_s": timeout_s})
    placement = plan_placement(cfg, resource=None)
    compose.new_engine(cfg, placement, get_backend("cpu"), name="replica_0", version=0)
    assert limits == [limit_s]
