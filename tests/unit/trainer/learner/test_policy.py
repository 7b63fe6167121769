"""The learner's step against plain models: gradients, optimizer, metrics, corrections, and the warm-up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.fakes.learner import (
    assert_gradients,
    gradients,
    logprobs,
    make_learner,
    pack,
    reference_logprobs,
    run_config,
    save_tiny,
    sequences,
    weights,
    without_loss,
)
from trainer.algorithms.losses import policy_loss
from trainer.config.algorithm import (
    AlgorithmConfig,
    ClampConfig,
    CorrectionConfig,
    KlConfig,
    MaskConfig,
    RejectConfig,
)
from trainer.config.schema import LoraConfig, RunConfig
from trainer.errors import TrainingDiverged
from trainer.learner.attention import padded_layout
from trainer.learner.fit import largest_micro_batch
from trainer.learner.packed_inputs import PackedInputs, loss_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer.data.batch import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_training_on_policy_reports_ratio_one_and_learns_the_rewarded_tokens(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir, lr=3e-3)), pack(sequences(6))
    before, mask = logprobs(learner, batch), batch.loss_mask
    batch = replace(batch, behavior_logprobs=before)
    first = {name: metric.mean for name, metric in learner.train_step([batch], step=0).metrics.items()}
    expected = {
        "ratio_mean": 1, "ratio_max": 1, "kl_behavior": 0, "clip_low_frac": 0, "clip_high_frac": 0,
        "loss": -batch.advantages[mask].mean(), "num_loss_tokens": mask.sum(), "num_tokens": len(mask),
    }  # fmt: skip
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert 0 < first["entropy"] < math.log(61)
    for step in range(1, 6):
        result = learner.train_step([batch], step=step)
    after = logprobs(learner, batch)
    assert ((after - before) * batch.advantages)[mask].sum() > 0
    assert result.metrics["ratio_max"].mean > 1.01 and result.metrics["kl_behavior"].mean > 0
    assert result.seconds.keys() == {"forward", "backward", "optimizer", "step"}


@pytest.mark.parametrize(
    ("saver", "again"),
    [
        ({"cpu_offload": True}, set()),
        ({"activation_checkpointing": True}, {"aten::mm", "aten::silu", ATTENTION}),
        ({"activation_checkpointing": "selective"}, {"aten::silu"}),
    ],
)
def test_memory_savers_do_not_change_gradients(saver: dict[str, Any], again: set[str], tiny_dir: Path) -> None:
    batch, counts, found = pack(sequences(6)), [], []
    for one in ({}, saver):
        with _Counting() as counting:
            found.append(gradients(make_learner(run_config(tiny_dir, **one)), [batch]))
        counts.append(counting.names)
    assert all(tensor.equal(found[1][name]) for name, tensor in found[0].items())
    assert {name for name in ("aten::mm", "aten::silu", ATTENTION) if counts[1][name] > counts[0][name]} == again


class _Counting(TorchDispatchMode):
    """Operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **({} if kwargs is None else kwargs))


def test_bfloat16_compute_keeps_float32_masters_and_stays_close(tiny_dir: Path) -> None:
    cfg, batch = run_config(tiny_dir), pack(sequences(6))
    half = make_learner(replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16")))
    np.testing.assert_allclose(logprobs(half, batch), logprobs(make_learner(cfg), batch), atol=0.25)
    half.train_step([batch], step=0)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("extra", [{}, {"lora": LoraConfig(rank=8)}], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rank_without_sharding_makes_the_steps_of_fsdp2(
    extra: dict[str, Any], checkpointing: bool, tiny_dir: Path
) -> None:
    """Bit for bit, with tied embeddings, over several micro-batches (float32 sums of bfloat16 gradients); weights that
    are offloaded to the host are sharded as those of several ranks are."""
    cfg, batches = run_config(tiny_dir, lr=1e-2, activation_checkpointing=checkpointing), [*map(pack, _thirds())]
    cfg = replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16", **extra))
    plain = make_learner(cfg)
    sharded = make_learner(replace(cfg, learner=replace(cfg.learner, cpu_offload=True)))
    assert isinstance(sharded._built.policy, FSDPModule) and not isinstance(plain._built.policy, FSDPModule)
    for step in range(2):
        norms = [one.train_step(batches, step=step).metrics["grad_norm"].mean for one in (plain, sharded)]
        assert norms[0] == norms[1] > 0
    expected = weights(sharded)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(plain).items())
    copies = plain._built.policy.compute_weights
    assert copies is not None and all(one.copy.untyped_storage().nbytes() == 0 for one in copies._copied)


def _thirds() -> list[list[MicroBatch]]:
    parts = sequences(9)
    return [parts[:3], parts[3:6], parts[6:]]


def test_gradient_is_clipped_by_the_norm_that_is_reported(tiny_dir: Path) -> None:
    batch = pack(sequences(6))
    norm = math.sqrt(
        sum(g.square().sum().item() for g in gradients(make_learner(run_config(tiny_dir)), [batch]).values())
    )
    clipped = make_learner(run_config(tiny_dir, max_grad_norm=norm / 4, beta1=0.0))
    assert clipped.train_step([batch], step=0).metrics["grad_norm"].mean == pytest.approx(norm, rel=1e-5)
    moments = [t for n, t in clipped._optimizers[""].state().items() if n.startswith("exp_avg.")]
    applied = math.sqrt(sum(t.square().sum().item() for t in moments))
    assert applied == pytest.approx(norm / 4, rel=1e-4)


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_one_too_many_raises(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir, max_skipped_steps=2)), pack(sequences(3))
    learner.train_step([batch], step=0)  # there are moments that could move the weights
    poisoned = replace(batch, advantages=np.where(batch.loss_mask, np.inf, 0).astype(np.float32))

    def state() -> dict[str, torch.Tensor]:
        optimizer = {name: tensor.clone() for name, tensor in learner._optimizers[""].state().items()}
        return {**weights(learner), **optimizer, "num_updates": torch.tensor(learner._optimizers[""].num_updates)}

    for row in range(2):  # a step that goes well forgives those before it
        before = state()
        for step in range(2):
            result = learner.train_step([poisoned], step=step)
            assert result.metrics["skipped_steps"].sum == 1 and not math.isfinite(result.metrics["grad_norm"].mean)
            assert not result.is_policy_changed
            assert all(tensor.equal(before[name]) for name, tensor in state().items())
        if row == 0:
            assert learner.train_step([batch], step=2).metrics["skipped_steps"].sum == 0
            assert state()["num_updates"] == 2
    with pytest.raises(TrainingDiverged, match=r"gradient norm of step 5 is .* after 2 skipped steps"):
        learner.train_step([poisoned], step=5)
    assert all(tensor.equal(before[name]) for name, tensor in state().items())
    assert all(torch.isfinite(tensor).all() for tensor in weights(learner).values())


def test_an_update_that_is_not_finite_is_skipped_and_the_others_are_made(tiny_dir: Path) -> None:
    good, bad = pack(sequences(3)), pack(sequences(3, seed=1))
    bad = replace(bad, advantages=np.where(bad.loss_mask, np.inf, 0).astype(np.float32))
    learner, plain = (make_learner(run_config(tiny_dir, max_skipped_steps=0)) for _ in range(2))
    result = learner.train_step([good, bad], step=0, updates=[(1, 2), (0, 1), (1, 2), (0, 1)])
    ratios = [plain.train_step([good], step=0).metrics["ratio_max"].mean for _ in range(2)]
    assert all(tensor.equal(weights(plain)[name]) for name, tensor in weights(learner).items())
    found = {name: metric.mean for name, metric in result.metrics.items()}
    assert (found["skipped_steps"], found["skipped_updates"], found["num_updates"]) == (0, 2, 2)
    assert result.is_policy_changed and math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])
    assert found["ratio_max"] == max(ratios)
    with pytest.raises(TrainingDiverged, match=r"gradient norm of step 1 is .* after 0 skipped steps"):
        learner.train_step([bad], step=1, updates=[(0, 1), (0, 1)])


def test_means_are_over_all_updates_and_the_first_one_is_on_policy(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir, lr=1e-2)), pack(sequences(6))
    batch = replace(batch, behavior_logprobs=logprobs(learner, batch))
    result = learner.train_step([batch], step=0, updates=[(0, 1)] * 3)
    found = {name: metric.mean for name, metric in result.metrics.items()}
    assert found["first_ratio_mean"] == found["first_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert found["mismatch/fresh"] == pytest.approx(0, abs=1e-5) and found["first_clip_high_frac"] == 0
    assert found["ratio_max"] > 1.05 and found["kl_behavior"] > 1e-4
    assert (found["num_tokens"], found["num_loss_tokens"]) == (len(batch.token_ids), batch.loss_mask.sum())
    once = make_learner(run_config(tiny_dir)).train_step([batch], step=0)
    assert result.model_flops == 3 * (once.model_flops or 0.0)


@pytest.mark.parametrize("case", ["no response", "all rejected"])
def test_a_step_in_which_no_token_carries_loss_moves_no_weight(case: str, tiny_dir: Path) -> None:
    cfg, batch = run_config(tiny_dir, weight_decay=0.5), pack(sequences(3))
    learner = make_learner(_corrected(cfg, reject=RejectConfig(upper=1e6)))
    learner.train_step([batch], step=0)  # there are moments that could move the weights
    before, num_updates = weights(learner), learner._optimizers[""].num_updates
    far = replace(batch, behavior_logprobs=np.where(batch.loss_mask, -30, 0).astype(np.float32))
    result = learner.train_step([without_loss() if case == "no response" else far], step=1)
    assert not result.is_policy_changed and "lr" not in result.metrics
    assert result.metrics["skipped_steps"].sum == 0, "nothing is wrong with its gradient"
    assert all(tensor.equal(before[name]) for name, tensor in weights(learner).items())
    assert learner._optimizers[""].num_updates == num_updates
    assert learner.train_step([batch], step=2).is_policy_changed


def test_malformed_batches_are_refused(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir)), pack(sequences(2))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        learner.train_step([], step=0)
    with pytest.raises(ValueError, match="first token of a sequence"):
        learner.train_step([replace(batch, loss_mask=np.ones_like(batch.loss_mask))], step=0)
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        learner.train_step([replace(batch, cu_seqlens=batch.cu_seqlens[:-1])], step=0)
    with pytest.raises(ValueError, match="sampled by version 4, but version 3 is trained"):
        learner.train_step([replace(batch, versions=np.where(batch.loss_mask, 4, -1))], step=3)


def _corrected(cfg: RunConfig, **correction: Any) -> RunConfig:
    return replace(cfg, algorithm=replace(cfg.algorithm, correction=CorrectionConfig(**correction)))


def test_the_proximal_policy_is_the_one_that_the_step_starts_with(tiny_dir: Path) -> None:
    cfg, parts = run_config(tiny_dir, lr=1e-2), sequences(4)
    learner = make_learner(_corrected(cfg, objective="decoupled"))
    batch = pack(parts)
    learner.train_step([batch], step=0)
    before, mask = logprobs(learner, batch), batch.loss_mask
    result = learner.train_step([pack(parts[:2]), pack(parts[2:])], step=1)
    weight = np.exp(before - batch.behavior_logprobs)[mask]
    assert result.metrics["correction_weight_mean"].mean == pytest.approx(weight.mean(), rel=1e-5)
    assert result.metrics["correction_weight_max"].mean == pytest.approx(weight.max(), rel=1e-5)
    ess = weight.sum() ** 2 / (weight**2).sum() / mask.sum()
    assert result.metrics["correction_ess_frac"].mean == pytest.approx(ess, rel=1e-4)
    assert result.metrics["ratio_max"].mean == pytest.approx(1, abs=1e-5)
    assert result.seconds.keys() == {"forward", "backward", "optimizer", "step"}, "it costs no forward pass"


def test_a_rejected_response_counts_as_zero_and_stays_in_the_denominator(tiny_dir: Path) -> None:
    plain = make_learner(run_config(tiny_dir))
    parts = [replace(part, behavior_logprobs=logprobs(plain, part)) for part in sequences(8)]
    shifted = parts[2].behavior_logprobs - np.float32(3) * parts[2].loss_mask
    parts[2] = replace(parts[2], behavior_logprobs=shifted)
    rejecting = _corrected(run_config(tiny_dir), reject=RejectConfig(upper=2.0))
    got = gradients(make_learner(rejecting), [pack(parts)])
    # The weights of the others are still shares of all tokens, the rejected ones included.
    kept = [pack([part for i, part in enumerate(parts) if i != 2])]
    assert_gradients(got, gradients(plain, kept), tolerance=1e-5)


def test_loss_and_metrics_equal_their_formulas(tiny_dir: Path) -> None:
    cfg = _corrected(
        run_config(tiny_dir, lr=1e-2), clamp=ClampConfig(upper=1.2), mask=MaskConfig(metric="k2", upper=0.1)
    )
    keys = {"dual_clip": 1.5, "clip_ratio_low": 0.1, "entropy_coef": 0.3, "kl": KlConfig(coef=0.7)}
    learner, parts = make_learner(replace(cfg, algorithm=replace(cfg.algorithm, **keys))), sequences(8)
    learner.train_step([pack(parts)], step=0)  # away from the reference
    rng, batch = np.random.default_rng(5), pack(parts)
    mask, new = batch.loss_mask, logprobs(learner, batch)
    noise, ages = rng.normal(0, 0.4, len(mask)), rng.integers(0, 3, len(mask))
    batch = replace(
        batch,
        behavior_logprobs=np.where(mask, new + noise, 0).astype(np.float32),
        versions=np.where(mask, 3 - ages, -1).astype(np.int32),
    )
    x, age, adv = -noise[mask], ages[mask], batch.advantages[mask]
    r, ref = np.exp(x), reference_logprobs(learner, batch)[mask]
    entropy = plain_entropy(tiny_dir, weights(learner), parts)
    low, high = (adv < 0) & (r < 0.9), (adv > 0) & (r > 1.2)
    surrogate = np.where(low, 0.9, np.where(high, 1.2, r)) * -adv
    dual = (adv < 0) & (surrogate > -adv * 1.5)
    surrogate = np.where(dual, -adv * 1.5, surrogate)
    is_out, k3, of_reference = x**2 / 2 > 0.1, r - 1 - x, np.exp(ref - new[mask]) - 1 - (ref - new[mask])
    weight = np.where(is_out, 0, np.minimum(r, 1.2))
    token_loss = surrogate * weight / r + (0.7 * of_reference - 0.3 * entropy) * ~is_out
    expected = {
        "loss": (batch.loss_weights[mask] * token_loss).sum(), "ratio_mean": r.mean(), "ratio_max": r.max(),
        "clip_low_frac": low.mean(), "clip_high_frac": high.mean(), "clip_dual_frac": dual.mean(),
        "kl_behavior": k3.mean(), "kl_reference": of_reference.mean(), "entropy": entropy.mean(),
        "mismatch/fresh": np.abs(x[age == 0]).mean(), "mismatch/stale": np.abs(x[age > 0]).mean(),
        "mismatch/fresh_kl": k3[age == 0].mean(), "mismatch/stale_kl": k3[age > 0].mean(),
        "correction_weight_mean": weight.mean(), "correction_weight_max": weight.max(),
        "correction_ess_frac": weight.sum() ** 2 / (weight**2).sum() / len(r),
        "correction_clamped_frac": (r > 1.2).mean(), "correction_masked_frac": is_out.mean(),
    }  # fmt: skip
    assert min(expected[name] for name in expected if name.endswith("frac")) > 0
    metrics = learner.train_step([batch], step=3).metrics
    assert {name: metrics[name].mean for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def plain_entropy(directory: Path, params: dict[str, torch.Tensor], parts: Sequence[MicroBatch]) -> np.ndarray:
    """Of the distributions that the loss tokens were drawn from: a full softmax, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model.load_state_dict(params, strict=False)
    found = []
    for part in parts:
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.from_numpy(part.token_ids.astype(np.int64))[None]).logits[0] / 0.8, -1)
        found.append(-(logp.exp() * logp).sum(-1).numpy()[np.flatnonzero(part.loss_mask) - 1])
    return np.concatenate(found)


def test_a_correction_has_metrics_only_where_it_is_active(tiny_dir: Path) -> None:
    batch = pack(sequences(3))
    plain = make_learner(run_config(tiny_dir)).train_step([batch], step=0).metrics
    assert not [name for name in plain if name.startswith("correction_") or "stale" in name]
    masking = make_learner(_corrected(run_config(tiny_dir), mask=MaskConfig(lower=0.5, upper=2.0)))
    masked = masking.train_step([batch], step=0).metrics
    assert {name for name in masked if name.startswith("correction_")} == {
        "correction_weight_mean", "correction_weight_max", "correction_ess_frac", "correction_masked_frac",
    }  # fmt: skip
    nothing = masking.train_step([without_loss()], step=1).metrics
    assert nothing["correction_ess_frac"].mean == nothing["correction_masked_frac"].mean == 0


def test_compiling_ahead_changes_no_number_of_a_later_step(tiny_dir: Path) -> None:
    cfg = run_config(tiny_dir, max_tokens_per_micro_batch=100)
    cfg = replace(
        cfg, task=replace(cfg.task, max_prompt_tokens=5), rollout=replace(cfg.rollout, max_response_tokens=30)
    )
    warm, plain = make_learner(cfg), make_learner(cfg)
    warm.rehearse(largest_micro_batch(cfg, 100))
    assert all(param.grad is None for param in warm.model.parameters())
    for step in range(2):
        batch = [pack(sequences(4, seed=step))]
        assert warm.train_step(batch, step=step).metrics == plain.train_step(batch, step=step).metrics
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(warm).items())


OBJECTIVES: list[dict[str, Any]] = [
    {"loss": "ppo_clip", "kind": "llama"},
    {"loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    {"loss": "gmpo", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4, "entropy_coef": 0.3},
    {"loss": "cispo"},
    {"loss": "kl_cov"},
    {"loss": "ppo_clip", "entropy_coef": 0.05},
    {"loss": "reinforce", "entropy_coef": 2.0},
]


def with_selection(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    rng = np.random.default_rng(5)
    return [replace(p, cov_selected=p.loss_mask & (rng.random(len(p.loss_mask)) < 0.3)) for p in parts]


def packed(parts: Sequence[MicroBatch]) -> MicroBatch:
    return replace(pack(parts), cov_selected=np.concatenate([p.cov_selected for p in parts]))  # type: ignore[arg-type]


def plain_gradients(
    directory: Path, parts: Sequence[MicroBatch], algorithm: AlgorithmConfig
) -> dict[str, torch.Tensor]:
    """Full softmax, autograd through everything, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for part in parts:
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        positions = torch.from_numpy(np.flatnonzero(part.loss_mask))
        logp = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)[positions - 1]
        chosen_L = logp.gather(1, ids[positions, None]).squeeze(1)
        loss_L, _ = policy_loss(loss_inputs(part, chosen_L), config=algorithm)
        loss_L = loss_L + algorithm.entropy_coef * (logp.exp() * logp).sum(-1)
        (loss_L * torch.from_numpy(part.loss_weights[part.loss_mask])).sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("keys", OBJECTIVES, ids=lambda keys: keys["loss"])
def test_gradients_equal_a_plain_model_for_every_split(keys: dict[str, Any], tiny_dir: Path, tmp_path: Path) -> None:
    algorithm = dict(keys)
    directory = save_tiny(tmp_path, algorithm.pop("kind")) if "kind" in keys else tiny_dir
    cfg = replace(run_config(directory), algorithm=AlgorithmConfig(**algorithm))
    parts = with_selection(sequences(9))
    expected = plain_gradients(directory, parts, cfg.algorithm)
    learner = make_learner(cfg)
    empty = without_loss()
    empty = replace(empty, cov_selected=np.zeros_like(empty.loss_mask))
    for split in ([parts], [parts[5:], parts[:5]], [[p] for p in parts]):
        got = gradients(learner, [*(packed(s) for s in split), empty])
        assert_gradients(got, expected, tolerance=5e-5)


def limited(*, prompt: int, response: int, loss: str = "ppo_clip") -> RunConfig:
    cfg = RunConfig()
    return replace(
        cfg,
        task=replace(cfg.task, max_prompt_tokens=prompt),
        rollout=replace(cfg.rollout, max_response_tokens=response),
        algorithm=replace(cfg.algorithm, loss=loss),
    )


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (100, [30, 30, 30, 10]),
        (92, [30, 30, 30, 2]),  # the shortest sequence that predicts a token
        (91, [30, 30, 30]),  # what is left is too short for one
        (15, [15]),
    ],
)
def test_the_largest_micro_batch_is_made_of_the_longest_sequences(limit: int, lengths: list[int]) -> None:
    batch = largest_micro_batch(limited(prompt=20, response=10), limit)
    assert np.diff(batch.cu_seqlens).tolist() == lengths and len(batch.token_ids) == sum(lengths)
    expected = [(np.arange(n) >= (20 if limit > 30 else 10)) | (np.arange(n) == n - 1) for n in lengths]
    np.testing.assert_array_equal(batch.loss_mask, np.concatenate(expected))
    np.testing.assert_array_equal(batch.versions, np.where(batch.loss_mask, 0, -1))
    assert not batch.loss_weights.any() and batch.cov_selected is None
    selected = largest_micro_batch(limited(prompt=20, response=10, loss="clip_cov"), limit).cov_selected
    assert selected is not None and len(selected) == sum(lengths)


@pytest.mark.parametrize(
    ("limit", "lengths"), [(30, [30]), (31, [30, 21]), (55, [30, 30, 30, 25]), (60, [30, 30, 30, 30]), (6, [6])]
)
def test_the_largest_micro_batch_of_one_prompt_computes_as_many_tokens(limit: int, lengths: list[int]) -> None:
    batch = largest_micro_batch(limited(prompt=20, response=10), limit, shares_prefix=True)
    assert np.diff(batch.cu_seqlens).tolist() == lengths and batch.prefix_lens is not None
    assert batch.prefix_lens.tolist() == [0] + [20] * (len(lengths) - 1)
    inputs = PackedInputs.of(batch, device=torch.device("cpu"), layout=padded_layout)
    assert inputs.token_ids_1T.shape[1] == limit
