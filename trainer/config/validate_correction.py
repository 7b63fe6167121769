"""Combinations of the off-policy correction and the loss that mean nothing, or something else than they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.algorithm import LOSSES_WITHOUT_RATIO, UNBOUNDED_LOSSES, held_ratio
from trainer.config.conflicts import conflict, ineffective
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.algorithm import CorrectionConfig
    from trainer.config.schema import RunConfig
    from trainer.errors import Problem


def correction_problems(config: RunConfig) -> Iterator[Problem]:
    """Of the section `algorithm.correction`, and of losses that go with none or some of it."""
    correction, prefix = config.algorithm.correction, "algorithm.correction"
    objective = f"{prefix}.objective={correction.objective}"
    yield from _loss_problems(config)
    yield from _clamped_loss(config)
    if correction.objective == "loglinear" and config.mode.max_staleness == 0:
        allowed = "interpolates over the age of tokens, which is always 0 with mode.max_staleness=0"
        yield conflict(config, f"{prefix}.objective", allowed, "use bypass or decoupled", "mode.max_staleness")
    if correction.objective == "bypass" and not correction.clamp.is_active and not correction.mask.is_active:
        why = f"with {objective} only clamp and mask read it, and neither has a bound"
        also = f"{prefix}.objective", f"{prefix}.clamp", f"{prefix}.mask"
        yield from ineffective(config, f"{prefix}.level", why, *also)
    for action, key in (("mask", "metric"), ("reject", "metric"), ("reject", "level")):
        if not getattr(correction, action).is_active:
            bounds = f"{prefix}.{action}.lower", f"{prefix}.{action}.upper"
            yield from ineffective(config, f"{prefix}.{action}.{key}", "no bound is set", *bounds)
    yield from _bounds(config, "clamp", "ratio")
    yield from _bounds(config, "mask", correction.mask.metric)
    yield from _bounds(config, "reject", correction.reject.metric)
    yield from _clamped_beyond_mask(config)


def _loss_problems(config: RunConfig) -> Iterator[Problem]:
    """Losses to which the chosen objective gives nothing to act on."""
    loss, correction, key = config.algorithm.loss, config.algorithm.correction, "algorithm.correction.objective"
    if loss in LOSSES_WITHOUT_RATIO:
        why, do = f"algorithm.loss={loss} holds no ratio", "use algorithm.loss=importance_sampling"
        if correction.objective != "bypass":
            yield conflict(config, key, f"must be bypass: {why}", do, "algorithm.loss")
        elif loss == "reinforce" and config.mode.max_staleness > 0 and not _leaves_out(correction):
            allowed = f"takes samples of mode.max_staleness={config.mode.max_staleness} for its own: {why}"
            do = f"use mode=sync, {do.removeprefix('use ')}, or a correction that masks or rejects"
            yield conflict(config, "algorithm.loss", allowed, do, "mode.max_staleness", "algorithm.correction")
    elif correction.objective == "decoupled" and not is_own(loss) and loss not in UNBOUNDED_LOSSES:
        allowed = (
            "has one update per batch, so the ratio to the policy at the start of the step is always 1, and "
            f"algorithm.loss={loss} cannot bound it"
        )
        do = "use algorithm.loss=importance_sampling with this correction, or objective bypass or loglinear"
        yield conflict(config, key, allowed, do, "algorithm.loss")


def _leaves_out(correction: CorrectionConfig) -> bool:
    return correction.mask.is_active or correction.reject.is_active


def _clamped_loss(config: RunConfig) -> Iterator[Problem]:
    """`clamp` puts another ratio in the place of the one that the loss holds: it must be the same one."""
    loss, correction, prefix = config.algorithm.loss, config.algorithm.correction, "algorithm.correction"
    if loss in LOSSES_WITHOUT_RATIO:
        for bound in ("lower", "upper"):
            why = f"algorithm.loss={loss} holds no ratio to clamp"
            yield from ineffective(config, f"{prefix}.clamp.{bound}", why, "algorithm.loss")
        return
    if correction.objective != "bypass" or not correction.clamp.is_active:
        return
    held, also = held_ratio(loss), ("algorithm.loss", f"{prefix}.objective")
    if held is None:
        why, do = _OWN_BOUNDS[loss]
        for bound in ("lower", "upper"):
            allowed = f"must be null with {prefix}.objective=bypass: algorithm.loss={loss} {why}"
            if getattr(correction.clamp, bound) is not None:
                yield conflict(config, f"{prefix}.clamp.{bound}", allowed, do, *also)
    elif correction.level != held:
        allowed = (
            f"must be {held} with a clamp and {prefix}.objective=bypass: that is the ratio that "
            f"algorithm.loss={loss} holds"
        )
        yield conflict(config, f"{prefix}.level", allowed, f"use {held}, or no clamp", f"{prefix}.clamp", *also)


_OWN_BOUNDS: Mapping[str, tuple[str, str]] = {
    "cispo": ("bounds its weight itself", "set algorithm.clip_high, and algorithm.clip_low below 1"),
    "sapo": ("closes a gate of its own", "use null, or algorithm.loss=ppo_clip"),
}
"""Losses that hold a ratio within a bound of their own: which one, and what to do."""


def _bounds(config: RunConfig, action: str, metric: str) -> Iterator[Problem]:
    """Bounds that cut nothing, or also the tokens on which both policies agree."""
    prefix, also = f"algorithm.correction.{action}", f"algorithm.correction.{action}.metric"
    bounds = getattr(config.algorithm.correction, action)
    lower, upper = bounds.lower, bounds.upper
    agreed = 1.0 if metric == "ratio" else 0.0
    others = () if action == "clamp" else (also,)
    if lower is not None and metric != "k1" and lower <= 0:
        yield conflict(config, f"{prefix}.lower", f"has no effect: {metric} is never below 0", "use null", *others)
    elif lower is not None and lower >= agreed:
        allowed = f"must be below {agreed:g}, the {metric} where both policies agree"
        yield conflict(config, f"{prefix}.lower", allowed, "lower it, or use null", *others)
    if upper is not None and upper <= agreed:
        allowed = f"must be above {agreed:g}, the {metric} where both policies agree"
        yield conflict(config, f"{prefix}.upper", allowed, "raise it, or use null", *others)


def _clamped_beyond_mask(config: RunConfig) -> Iterator[Problem]:
    clamp, mask, prefix = config.algorithm.correction.clamp, config.algorithm.correction.mask, "algorithm.correction"
    if mask.metric != "ratio":
        return
    if clamp.upper is not None and mask.upper is not None and clamp.upper >= mask.upper:
        allowed = f"has no effect: {prefix}.mask.upper={mask.upper:g} takes those tokens out"
        yield conflict(config, f"{prefix}.clamp.upper", allowed, "lower it, or use null", f"{prefix}.mask.upper")
    if clamp.lower is not None and mask.lower is not None and clamp.lower <= mask.lower:
        allowed = f"has no effect: {prefix}.mask.lower={mask.lower:g} takes those tokens out"
        yield conflict(config, f"{prefix}.clamp.lower", allowed, "raise it, or use null", f"{prefix}.mask.lower")
