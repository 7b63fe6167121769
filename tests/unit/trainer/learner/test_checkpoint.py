"""Checkpoint directories, and the size of what is in them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.fakes.full_disk import file_limit
from tests.fakes.learner import held_writes, make_learner, pack, run_config, sequences, with_lora
from trainer.config.algorithm import AlgorithmConfig, CriticConfig
from trainer.driver.memory_plan import MASTER_BYTES, MOMENTS_BYTES
from trainer.errors import CheckpointError
from trainer.files import replace_directory
from trainer.learner.checkpoint import (
    abandon,
    begin,
    commit,
    find_latest,
    locate,
    older_complete,
    prune,
    read_state,
    step_of,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def _save(directory: Path, step: int, content: bytes = b"weights") -> Path:
    tmp = begin(directory, step)
    (tmp / "learner").mkdir()
    (tmp / "learner" / "shard_0").write_bytes(content)
    return commit(tmp, {"step": step, "rng": [1, 2]})


def test_driver_state_comes_back(tmp_path: Path) -> None:
    (begin(tmp_path, 7) / "stale").write_bytes(b"of an interrupted save")
    _save(tmp_path, 7, b"old")
    path = _save(tmp_path, 7)  # a resumed run makes the same step again
    assert path == tmp_path / "step_7" and step_of(path) == 7
    assert read_state(path) == {"step": 7, "rng": [1, 2]}
    assert [p.name for p in tmp_path.iterdir()] == ["step_7"]
    files = json.loads((path / "complete.json").read_text())["files"]
    assert files.keys() == {"learner/shard_0", "driver.json"} and files["learner/shard_0"]["bytes"] == 7


def test_latest_is_the_highest_complete_step_by_number_not_by_name(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent") is None
    for step in (9, 100, 20):
        _save(tmp_path, step)
    (begin(tmp_path, 300) / "half").write_bytes(b"x")
    assert find_latest(tmp_path) == tmp_path / "step_100"


@pytest.mark.parametrize(
    "manifest", [None, '{"files": {}}', '{"files": {"learner/shard_0": {"bytes": 7}}}', "[]", '{"files": ']
)
def test_a_checkpoint_that_lost_its_manifest_is_damaged_and_still_the_newest(
    tmp_path: Path, manifest: str | None
) -> None:
    older, path = _save(tmp_path, 10), _save(tmp_path, 20)
    (path / "complete.json").unlink()
    if manifest is not None:
        (path / "complete.json").write_text(manifest)
    assert find_latest(tmp_path) == path
    with pytest.raises(CheckpointError, match=r"complete\.json is damaged" if manifest else "has no complete"):
        read_state(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "step_2")
    assert older_complete(path) == older and older_complete(older) is None
    assert abandon(tmp_path, resumed_from=older) == [tmp_path / "abandoned" / "step_20"]


@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/step_20"])
def test_a_run_directory_means_its_newest_checkpoint(tmp_path: Path, given: str) -> None:
    for step in (20, 3):
        _save(tmp_path / "run" / "checkpoints", step)
    assert locate(tmp_path / given) == tmp_path / "run" / "checkpoints" / "step_20"


def test_all_that_leads_to_a_file_is_on_disk_before_the_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr("trainer.files.os.fsync", fsync)
    _save(tmp_path, 7)
    tmp = tmp_path / "step_7.tmp"
    files = {tmp / "learner" / "shard_0", tmp / "driver.json", tmp / "complete.json"}
    assert set(synced) == {*files, tmp / "learner", tmp, tmp_path}
    assert synced[-1] == tmp_path, "the rename comes last"


def test_one_directory_in_place_of_another_is_there_whole_whenever_a_kill_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, replaced = tmp_path / "export", tmp_path / "export.replaced"

    def write(text: str) -> Path:
        written = tmp_path / "export.tmp"
        written.mkdir(exist_ok=True)
        (written / "model").write_text(text)
        return written

    replace_directory(write("first"), final)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target == final:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        replace_directory(write("second"), final)
    assert (replaced / "model").read_text() == "first"
    for text in ("third", "fourth"):
        replace_directory(write(text), final)
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
        assert (final / "model").read_text() == text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "is truncated: 6 bytes, expected 7"),
        (lambda f: f.write_bytes(b"WEIGHTS"), "is altered"),
        (lambda f: f.unlink(), "is missing"),
    ],
    ids=["truncated", "altered", "missing"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object, words: str) -> None:
    path = _save(tmp_path, 1)
    damage(path / "learner" / "shard_0")
    with pytest.raises(CheckpointError, match=rf"learner/shard_0 {words}"):
        read_state(path)


def test_pruning_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep_last must be >= 1 .* got 0 and 0"):
        prune(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match=r"keep_every >= 0, got 1 and -5"):
        prune(tmp_path, keep_last=1, keep_every=-5)


def test_what_cannot_be_deleted_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        _save(tmp_path, step)
    rmtree = shutil.rmtree

    def busy(path: Path, **keys: Any) -> None:
        if path.name.startswith("step_1.deleted"):
            raise OSError(f"{path.name} is busy")
        rmtree(path, **keys)

    with monkeypatch.context() as patch:
        patch.setattr("trainer.learner.checkpoint.shutil.rmtree", busy)
        for new in (1, 4):  # a step that is made once more has another name on its way out
            with pytest.raises(OSError, match=r"step_1\.deleted(\.2)? is busy"):
                prune(tmp_path, keep_last=1)
            _save(tmp_path, new)
        left = ["step_1.deleted", "step_1.deleted.2", "step_3", "step_4"]
        assert sorted(path.name for path in tmp_path.iterdir()) == left
        assert find_latest(tmp_path) == tmp_path / "step_4"
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


STEPS = (3, 5, 10, 15, 20, 30, 40)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [40]), (2, 20, [20, 30, 40]), (1, 100, [40]), (1, 5, STEPS[1:]), (9, 20, STEPS)],
)
def test_pruning_keeps_the_newest_and_the_multiples_of_keep_every(
    keep_last: int, keep_every: int, kept: Sequence[int], tmp_path: Path
) -> None:
    for step in STEPS:
        _save(tmp_path, step)
    begin(tmp_path, 41)  # a save in progress
    deleted = prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [step_of(path) for path in deleted] == [step for step in STEPS if step not in kept]
    assert {path.name for path in tmp_path.iterdir()} == {*(f"step_{step}" for step in kept), "step_41.tmp"}
    assert prune(tmp_path, keep_last=keep_last, keep_every=keep_every) == []


def test_continuing_from_an_older_checkpoint_moves_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (5, 10, 40, 50):
        _save(tmp_path, step)
    aside = tmp_path / "abandoned"
    link = tmp_path / "good"
    link.symlink_to(tmp_path / "step_10")
    assert abandon(tmp_path, resumed_from=link) == [aside / "step_40", aside / "step_50"]
    _save(tmp_path, 20)
    assert prune(tmp_path, keep_last=2) == [tmp_path / "step_5"]
    assert find_latest(tmp_path) == tmp_path / "step_20"
    assert abandon(tmp_path, resumed_from=tmp_path / "step_20") == []
    _save(tmp_path, 40, b"another branch")
    assert abandon(tmp_path, resumed_from=tmp_path / "step_20") == [aside / "step_40.2"], "what is there stays"
    assert step_of(aside / "step_40") == 40 and read_state(aside / "step_50")["step"] == 50, "one can resume from them"
    elsewhere = _save(tmp_path / "other", 30)  # of another branch, whatever the numbers
    abandon(tmp_path, resumed_from=elsewhere)
    assert find_latest(tmp_path) is None and elsewhere.exists()


def test_state_that_is_not_jsonable_is_refused_before_anything_is_renamed(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    with pytest.raises(CheckpointError, match="not JSON-able"):
        commit(tmp, {"x": object()})
    assert find_latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="not a started checkpoint"):
        commit(tmp_path / "elsewhere", {})


pytestmark = pytest.mark.usefixtures("one_rank")
COUNTER_BYTES = 8
PER_TENSOR_BYTES = 2048
"""At most, of what torch writes around a tensor, and of its row in the index."""


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "cpu_offload", "lora", "critic", "shared critic"])
def test_a_checkpoint_has_twelve_bytes_per_trained_parameter(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    cfg = run_config(tiny_dir, cpu_offload=kind == "cpu_offload")
    if kind == "bfloat16":
        cfg = replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16", rollout_dtype="bfloat16"))
    elif kind == "lora":
        cfg = with_lora(cfg)
    elif "critic" in kind:
        gae, critic = AlgorithmConfig(advantage_estimator="gae"), CriticConfig(shared_backbone="shared" in kind)
        cfg = replace(cfg, algorithm=gae, critic=critic)
    learner, tmp = make_learner(cfg), begin(tmp_path, 1)
    learner.save(tmp, step=1)
    optimizers = learner._optimizers.values()
    num_trained = sum(weight.numel() for optimizer in optimizers for weight in optimizer.weights().values())
    stored = FileSystemReader(tmp / "learner").read_metadata().state_dict_metadata
    nbytes = sum(one.size.numel() * one.properties.dtype.itemsize for one in stored.values())  # type: ignore[union-attr]
    assert nbytes - (len(optimizers) + 1) * COUNTER_BYTES == (MASTER_BYTES + MOMENTS_BYTES) * num_trained
    on_disk = sum(file.stat().st_size for file in (tmp / "learner").iterdir())
    assert 0 < on_disk - nbytes < PER_TENSOR_BYTES * len(stored)


def test_what_is_saved_in_the_background_is_of_its_step_and_one_copy_serves_every_checkpoint(
    tiny_dir: Path, tmp_path: Path
) -> None:
    learner, copies = make_learner(run_config(tiny_dir)), []
    for step in (1, 2):
        learner.train_step([pack(sequences(3, seed=step))], step=step)
        tmp, blocking = begin(tmp_path / "background", step), begin(tmp_path / "blocking", step)
        learner.save(blocking, step=step)
        with held_writes() as may_write:
            learner.save(tmp, step=step, in_background=True)
            for slot in learner._optimizers[""]._slots:
                slot.local.detach().zero_()
            may_write.set()
            learner.wait_saved()
        learner.load(tmp)
        assert [one.read_bytes() for one in sorted((tmp / "learner").glob("*.distcp"))] == [
            one.read_bytes() for one in sorted((blocking / "learner").glob("*.distcp"))
        ]
        copies.append({name: one.data_ptr() for name, one in learner._background._copy.items()})
    assert copies[0] == copies[1]


def test_a_disk_that_refuses_is_reported_by_whoever_waits_and_by_the_next_save(tiny_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(run_config(tiny_dir))
    tmp = begin(tmp_path, 1)
    with file_limit(1000):
        learner.save(tmp, step=1, in_background=True)
        with pytest.raises(CheckpointError, match=r"step_1\.tmp cannot be written: File too large"):
            learner.wait_saved()
    with pytest.raises(CheckpointError, match=r"step_1\.tmp cannot be written"):
        learner.save(begin(tmp_path, 2), step=2, in_background=True)
