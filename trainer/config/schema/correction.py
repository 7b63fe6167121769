"""`algorithm.correction`: what is done about samples that the policy being trained would not have made like this.

"Ratio" means learner over engine: the probability of a token under the old policy that the objective chooses (for
`bypass` the policy being trained) over the probability that the engine sampled it with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key

Level = Literal["token", "sequence", "sequence_mean"]
Metric = Literal["ratio", "k1", "k2", "k3", "tv"]
Objective = Literal["bypass", "decoupled", "loglinear"]

_METRICS = (
    "the ratio r itself, the KL estimates k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r, or "
    "tv = |r - 1| / 2, the total variation."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampConfig:
    lower: float | None = key(None, "Smallest importance weight; null for no bound.", gt=0)
    upper: float | None = key(None, "Largest importance weight (TIS); null for no bound.", gt=0)

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskConfig:
    metric: Metric = key("ratio", f"What the bounds are of: {_METRICS}")
    lower: float | None = key(None, "Tokens with less of the metric carry no loss; null for no bound.")
    upper: float | None = key(None, "Tokens with more of the metric carry no loss (MIS, IcePop); null for no bound.")

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectConfig:
    level: Level = key(
        "sequence_mean",
        "What has to keep within the bounds: the metric of every single token, its sum over the answer (for `ratio` "
        "the product), or its mean (for `ratio` the geometric mean).",
    )
    metric: Metric = key("ratio", f"What the bounds are of: {_METRICS}")
    lower: float | None = key(None, "Answers with less of the metric carry no loss; null for no bound.")
    upper: float | None = key(None, "Answers with more of the metric carry no loss; null for no bound.")

    @property
    def is_active(self) -> bool:
        return self.lower is not None or self.upper is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    objective: Objective = key(
        "bypass",
        "Old policy of the loss. `bypass`: the one that sampled. `decoupled`: the learner's at the start of the step "
        "(a batch is one step, so no forward pass is needed, and a loss with a bound of its own is refused), with its "
        "ratio to the sampling policy as weight of the token. `loglinear`: the same, but interpolated between the two "
        "by the age of the token (A-3PO).",
    )
    level: Level = key(
        "token",
        "Ratio that `clamp` and `mask` look at, and that `decoupled` and `loglinear` weigh with: of the token, of the "
        "whole answer (product), or the geometric mean over the answer. A clamp with `bypass` needs the one that the "
        "loss holds.",
    )
    clamp: ClampConfig = key(factory=ClampConfig, doc="Keep importance weights within bounds.")
    mask: MaskConfig = key(factory=MaskConfig, doc="Tokens out of bounds carry no loss.")
    reject: RejectConfig = key(factory=RejectConfig, doc="Answers out of bounds carry no loss at all.")
