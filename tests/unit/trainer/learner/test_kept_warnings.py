"""Warnings of a learner's process that travel to the driver."""

from __future__ import annotations

import logging

from trainer.learner.actor import captured_warnings


def test_our_own_warnings_are_kept_while_the_block_runs_and_those_of_others_are_not() -> None:
    own, other = logging.getLogger("trainer.learner.packed_inputs"), logging.getLogger("transformers")
    with captured_warnings() as kept:
        own.warning("no kernel for %s", "npu")
        own.info("ready")
        other.warning("deprecated")
    own.warning("too late")
    assert kept == ["no kernel for npu"]
