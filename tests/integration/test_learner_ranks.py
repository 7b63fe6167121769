"""The learner on one and two real ranks (processes with gloo)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.fakes.learner import (
    TINY,
    drawn_config,
    gradients,
    make_learner,
    pack,
    process_group,
    run_config,
    run_ranks,
    save_tiny,
    sequences,
    weights,
    without_loss,
)
from trainer.errors import CheckpointError
from trainer.learner.checkpoint import begin, commit, find_latest, read_state

if TYPE_CHECKING:
    from pathlib import Path

STEPS_BEFORE, STEPS_AFTER = 3, 2


def _step(learner: Any, step: int) -> Any:
    """One step on the same sequences, however many ranks there are."""
    parts = sequences(8, seed=step)
    return learner.train_step([pack(parts[dist.get_rank() :: dist.get_world_size()])], step=step)


def _two_rank_job(directory: Path) -> dict[str, Any]:
    """Everything that needs two ranks, in one start of processes."""
    rank, out = dist.get_rank(), {}
    cfg = run_config(directory / "model")
    learner, parts = make_learner(cfg), sequences(12)
    splits = {
        "halves": ([pack(parts[:6])], [pack(parts[6:])]),
        "uneven": (
            [pack(parts[:1]), pack(parts[1:3]), pack(parts[3:4])],
            [pack(parts[4:8]), pack(parts[8:]), without_loss()],
        ),
        "one rank idle": ([pack(parts)], [without_loss()]),
    }
    out["gradients"] = {name: gradients(learner, split[rank]) for name, split in splits.items()}
    out["logprobs"] = learner.logprobs(pack(parts))
    out["metrics"] = {k: m.mean for k, m in _step(learner, 0).metrics.items()}
    learner.export_hf(directory / "export")
    out["exported"] = weights(learner)

    learner = make_learner(cfg)
    for step in range(STEPS_BEFORE):
        _step(learner, step)
    tmp = begin(directory / "checkpoints", STEPS_BEFORE) if rank == 0 else None
    dist.barrier()
    learner.save(directory / "checkpoints" / f"step_{STEPS_BEFORE}.tmp", step=STEPS_BEFORE)
    dist.barrier()
    if tmp is not None:
        commit(tmp, {"source": 17})
    dist.barrier()
    out["saved"] = weights(learner)
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        _step(learner, step)
    out["uninterrupted"] = weights(learner)
    resumed = make_learner(cfg)
    out["loaded_step"] = resumed.load(directory / "checkpoints" / f"step_{STEPS_BEFORE}")
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        _step(resumed, step)
    out["resumed"] = weights(resumed)
    out["random"] = weights(make_learner(drawn_config(directory / "hollow")))
    return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_tiny(path / "model")
    # 61 rows, 3 heads' worth of rows and one-row norms split unevenly over two ranks
    Qwen2Config(**TINY, architectures=["Qwen2ForCausalLM"]).save_pretrained(path / "hollow")
    return path


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(_two_rank_job, directory, world_size=2)


@pytest.fixture(scope="module")
def _one_rank(directory: Path, two_ranks: list[dict[str, Any]]) -> Any:
    with process_group(directory / "store_of_one"):
        yield


@pytest.fixture(scope="module")
def one_rank_gradients(directory: Path, _one_rank: None) -> dict[str, torch.Tensor]:
    return gradients(make_learner(run_config(directory / "model")), [pack(sequences(12))])


def _assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (got[name] - tensor).norm() / tensor.norm()
        assert error <= rtol, f"{name}: relative error {error}"


@pytest.mark.parametrize("split", ["halves", "uneven", "one rank idle"])
def test_gradients_on_two_ranks_equal_those_on_one(
    split: str, two_ranks: list[dict[str, Any]], one_rank_gradients: dict[str, torch.Tensor]
) -> None:
    for result in two_ranks:
        _assert_close(result["gradients"][split], one_rank_gradients, rtol=1e-6)


@pytest.mark.usefixtures("_one_rank")
def test_metrics_and_logprobs_do_not_depend_on_the_number_of_ranks(
    directory: Path, two_ranks: list[dict[str, Any]]
) -> None:
    learner = make_learner(run_config(directory / "model"))
    torch.testing.assert_close(
        torch.from_numpy(two_ranks[1]["logprobs"]), torch.from_numpy(learner.logprobs(pack(sequences(12))))
    )
    expected = {k: m.mean for k, m in _step(learner, 0).metrics.items()}
    assert two_ranks[0]["metrics"] == two_ranks[1]["metrics"]
    assert two_ranks[0]["metrics"] == pytest.approx(expected, rel=1e-5)
    assert expected["num_tokens"] == sum(len(p.token_ids) for p in sequences(8, seed=0))


def test_resumed_run_gives_the_same_bits_as_an_uninterrupted_one(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["loaded_step"] == STEPS_BEFORE
        assert all(tensor.equal(result["resumed"][name]) for name, tensor in result["uninterrupted"].items())
        assert not all(tensor.equal(result["saved"][name]) for name, tensor in result["uninterrupted"].items())


@pytest.mark.usefixtures("_one_rank")
def test_checkpoint_of_two_ranks_resumes_on_one(directory: Path, two_ranks: list[dict[str, Any]]) -> None:
    path = find_latest(directory / "checkpoints")
    assert path is not None and read_state(path) == {"source": 17}
    learner = make_learner(run_config(directory / "model"))
    assert learner.load(path) == STEPS_BEFORE
    assert all(tensor.equal(two_ranks[0]["saved"][name]) for name, tensor in weights(learner).items())
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        _step(learner, step)
    _assert_close(weights(learner), two_ranks[0]["uninterrupted"], rtol=1e-5)


@pytest.mark.usefixtures("_one_rank")
def test_export_of_two_ranks_loads_with_equal_weights(directory: Path, two_ranks: list[dict[str, Any]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory / "export")
    exported = two_ranks[0]["exported"]
    assert all(exported[name].equal(param) for name, param in model.named_parameters())


@pytest.mark.usefixtures("_one_rank")
def test_random_initialisation_does_not_depend_on_the_number_of_ranks(
    directory: Path, two_ranks: list[dict[str, Any]]
) -> None:
    expected = weights(make_learner(drawn_config(directory / "hollow")))
    assert all(tensor.equal(expected[name]) for name, tensor in two_ranks[1]["random"].items())


@pytest.mark.usefixtures("_one_rank", "two_ranks")
def test_truncated_or_foreign_checkpoint_is_refused(directory: Path, tmp_path: Path) -> None:
    learner = make_learner(run_config(directory / "model"))
    tmp = begin(tmp_path, 1)
    learner.save(tmp, step=1)
    path = commit(tmp, {})
    other = make_learner(run_config(save_tiny(tmp_path / "other", "llama")))
    with pytest.raises(CheckpointError, match=r"model\.path is another model"):
        other.load(path)
    (shard,) = (path / "learner").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated"):
        read_state(path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        learner.load(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        learner.load(path)
