"""Writes down what was answered in an evaluation, so that anybody can look at it and check its numbers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.pipeline.evaluation_result import Answered
    from trainer.pipeline.telemetry import Telemetry

log = logging.getLogger(__name__)


async def keep_answers(
    telemetry: Telemetry, answers: Sequence[Answered], *, version: int, failed: str = ""
) -> str | None:
    """Begin to write them, where trajectories are recorded. Returns the file's name in the run directory once it is
    there and empty; None if there is none. Nobody waits for the rest but the end of the process.

    Args:
        answers: none if the evaluation failed before it had all of them.
        failed: why the evaluation gives no number; empty if it gives one.
    """
    recorder, folder = telemetry.recorder, telemetry.run_dir.answers
    if recorder is None or not answers:
        return None
    loop = asyncio.get_running_loop()
    path = await loop.run_in_executor(telemetry.thread, recorder.begin_evaluation, folder, version)
    if path is None:
        return None
    name = f"{folder.name}/{path.name}"
    if path.name != f"version_{version}.jsonl":
        log.info("version %d has been evaluated before; what was answered this time is in %s", version, name)
    told = [(one.eval_set, one.prompt, one.trajectories) for one in answers]
    status = "failed" if failed else "scored"
    telemetry.slow_thread.submit(
        partial(recorder.write_answers, path, told, version=version, status=status, reason=failed)
    )
    return name
