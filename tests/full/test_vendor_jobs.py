"""The default job on hosts that have, as far as their drivers tell, devices of AMD or Ascend (see `vendor_host`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.fakes.drivers.build import compiler, vendor_host
from tests.fakes.trainer_process import TrainerProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(compiler() is None, reason="no C compiler `cc` to build the fake driver libraries with"),
]


@pytest.mark.parametrize("name", ["rocm", "npu"])
def test_the_default_job_trains_and_syncs_over_ipc(name: str, tiny_cache: Path, tmp_path: Path) -> None:
    """Asynchronous, with FSDP2 over two devices and an engine on a third: every sync opens handles of the learners."""
    job = TrainerProcess(
        tmp_path / "run",
        f"device={name}",
        "trainer.total_steps=2",
        "trainer.groups_per_step=4",
        "rollout.group_size=4",
        "trainer.stop_at_accuracy=null",
        "trainer.startup_timeout_s=600",
        "rollout.engine_args={distributed_executor_backend: uni, kv_cache_memory_bytes: 134217728}",
        cache=tiny_cache,
        host=vendor_host(name, tmp_path / "driver", num_devices=4),
    )
    with contextlib.closing(job):
        assert job.wait() == 0, job.text[-4000:]
        assert job.summary["version"] == 2
        log = (job.run_dir / "log.txt").read_text()
        assert "learner 0 by ipc, learner 1 by ipc" in log
        for line in job.lines:
            assert line["sync/num_retries"] == 0
            assert line["staleness/max"] > 0 or abs(line["learner/ratio_mean"] - 1) < 1e-3
