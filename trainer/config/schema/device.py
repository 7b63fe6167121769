"""`device`: which accelerator, and how the processes on it are set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key

DeviceName = Literal["auto", "cpu", "cuda", "rocm", "npu"]

OTHER_WORDS = {
    "gpu": "device=auto takes the GPU that is present; by name it is device=cuda (NVIDIA) or device=rocm (AMD)"
}
"""What to write instead of a word that names no device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    name: DeviceName = key("auto", "Accelerator; `auto` takes the first that is present: cuda, rocm, npu, cpu.")
    peak_tflops: float | None = key(
        None,
        "Dense TFLOP/s of one learner device in `model.compute_dtype`, which `perf/mfu` compares with; null is the "
        "data sheet's bfloat16 for B200, H200, H100, H800, H20, A100, A800, L40S, MI300X and MI325X, and no "
        "`perf/mfu` for any other.",
        gt=0,
    )
    env: dict[str, str] = key(
        factory=dict, doc="Extra environment variables for every learner and engine process; they win over ours."
    )
    cpu_threads: int = key(
        1, "Compute threads per learner rank and per engine on `cpu`; ignored on accelerators.", ge=1
    )
