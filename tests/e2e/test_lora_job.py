"""A short run with adapters, from the command line to the exported model: real Ray, vLLM, FSDP2 and weight sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.trainer_process import TrainerProcess

STEPS = 5


def test_a_lora_run_moves_adapters_only_and_exports_them(start: Callable[..., TrainerProcess], tmp_path: Path) -> None:
    process = start(
        tmp_path / "run", "model.lora.rank=8", "model.lora.alpha=16", "learner.lr=3e-3", f"trainer.total_steps={STEPS}",
        "trainer.groups_per_step=16", "trainer.eval_at_start=false", "trainer.eval_every=0",
        "trainer.eval_at_end=false", "trainer.stop_at_accuracy=null",
    )  # fmt: skip
    assert process.wait() == 0, process.text[-4000:]
    with safe_open(tmp_path / "run" / "export" / "adapter" / "adapter_model.safetensors", framework="pt") as adapter:
        tensors = [adapter.get_tensor(name) for name in adapter.keys()]  # noqa: SIM118 - it is no dict
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert any(t.any() for t in tensors if t.shape[1] == 8), "B has left zero"
    lines = process.lines
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    synced = {line["sync/bytes"] for line in lines if "sync/bytes" in line}
    assert synced == {sum(t.numel() * t.element_size() for t in tensors)}, "one engine gets the adapter, nothing else"
    # The engine's log-probs under its adapter are the learner's, up to one step of staleness.
    assert max(line["learner/kl_behaviour"] for line in lines) < 0.05
