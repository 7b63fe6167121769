"""What is refused before anything is started or written, and how the inputs are loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from tests.fakes.scripted_run import prompt_set
from trainer.__main__ import main
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.compose import load_config
from trainer.driver import models, preflight, run
from trainer.driver.checkpointing import origin
from trainer.driver.datasets import DataSets
from trainer.errors import ConfigurationError
from trainer.learner.checkpoint import begin, commit
from trainer.tools.bench_workload import workload, write_inputs
from weight_sync.device.select import build

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def tiny(*overrides: str) -> RunConfig:
    return load_config(["device=cpu", *overrides])


def test_the_default_run_is_ready_without_making_the_model(tmp_path: Path) -> None:
    checked = preflight.preflight(tiny())
    assert checked.backend.name == "cpu"
    assert checked.resumed is None
    assert len(checked.inputs.train.prompts) == 50 * 50 - 250
    assert [len(one.prompts) for one in checked.inputs.evaluation] == [250]
    assert list(tmp_path.iterdir()) == []


def test_training_and_held_out_prompts_are_disjoint() -> None:
    loaded = preflight.check_inputs(tiny())
    assert not {p.text for p in loaded.train.prompts} & {p.text for p in loaded.evaluation[0].prompts}
    prompt = loaded.evaluation[0].prompts[0]
    assert build_tokenizer().decode(prompt.token_ids) == prompt.text


def test_one_directory_for_both_sets_is_refused_where_splits_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(DataError, match="both read"):
        preflight.check_inputs(tiny("task.train_path=data", "task.eval_path=data"))
    same = ["task.train_path=data/test.jsonl", "task.eval_path=data/test.jsonl"]
    assert len(preflight.check_inputs(tiny(*same)).evaluation[0].prompts) == 1, "one that is named for both is meant so"


def test_rows_that_are_left_out_are_counted_by_data_set_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row, long = '{"prompt": "1+1=", "answer": "2"}\n', '{"prompt": "' + "1+" * 20 + '1=", "answer": "21"}\n'
    (tmp_path / "train.jsonl").write_text(3 * row + long)
    (tmp_path / "held_out.jsonl").write_text(row + long)
    data = ["task.train_path=train.jsonl", "task.eval_path=held_out.jsonl"]
    cfg = tiny(*data, "task.overlong_prompts=filter", "task.max_prompt_tokens=16")
    loaded = preflight.check_inputs(cfg)
    caplog.clear()
    with caplog.at_level("INFO"):
        preflight.log_inputs(cfg, loaded)
    shared = (
        "1 of 1 prompts of task.eval_path are among those of task.train_path: their accuracy says nothing of unseen "
    )
    shared += "problems; remove them from the training set"
    left_out = "rows of {} that were left out: {} that repeat an earlier one (task.dedup), 1 over {}=16"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "1 training prompts, 1 held out"),
        ("WARNING", left_out.format("task.train_path", 2, "task.max_prompt_tokens")),
        ("WARNING", left_out.format("task.eval_path", 0, "task.max_prompt_tokens")),
        ("WARNING", shared),
        ("INFO", "weights: those of builtin:tiny"),
    ]
    assert preflight.check_inputs(tiny()).left_out == ()


BROKEN_REWARD = "def reward(*, prompt, response, answer, metadata): raise KeyError('gold')\n"


@pytest.mark.parametrize("model", ["nowhere", "empty"])
def test_a_missing_model_a_bad_column_and_a_broken_reward_are_told_together(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is missed without torch (`nowhere`), or once it is read (`empty`)."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty" / "model.safetensors").write_text("")
    (tmp_path / "reward.py").write_text(BROKEN_REWARD)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    wrong = ["device=cpu", f"model.path=./{model}", "task.reward.name=reward.py:reward"]
    assert main(wrong) == 2
    on_screen = capsys.readouterr().err
    assert f"model.path = ./{model}" in on_screen and "KeyError: 'gold'" in on_screen
    assert main([*wrong, "task.train_path=rows.jsonl"]) == 2
    on_screen = capsys.readouterr().err
    assert f"model.path = ./{model}" in on_screen and "the columns are: question, answer" in on_screen


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (["task.reward.name=nowhere.py:f"], DataError, "nowhere.py"),
        (["task.reward.name=math_"], DataError, "math_"),
        (["model.tokenizer_path=./empty"], ConfigurationError, "model.tokenizer_path"),
        (["task.train_path=./rows.jsonl"], DataError, "question"),
        (["task.max_prompt_tokens=2"], DataError, "max_prompt_tokens"),
        (
            ["rollout.stop_token_ids=[5, 4000]"],
            ConfigurationError,
            "must be below 98, the number of tokens",
        ),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_left(
    overrides: list[str], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    before = sorted(tmp_path.rglob("*"))
    cfg = replace(tiny(), run_dir="")
    try:
        cfg = tiny(*overrides)
    except ConfigurationError as error:
        assert kind is ConfigurationError or words in str(error)
        return
    with pytest.raises(kind, match=words):
        run.run(cfg, started_at=0.0)
    assert sorted(tmp_path.rglob("*")) == before


def with_vocabulary(folder: Path, size: int) -> None:
    """Makes `folder/model`, and a held-out set: of the two sets only this one has the token 33, which is `>`."""
    write_inputs(workload("w1", is_tiny=True), folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": size}))
    (folder / "model" / "pytorch_model.bin").touch()
    (folder / "held_out.jsonl").write_text('{"prompt": "1+1>", "answer": "2"}\n')


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.path", []),
        ("critic.path", ["algorithm=ppo", "model.path=some/hub-model"]),
        ("algorithm.kl.reference_model", ["algorithm=opd", "model.path=some/hub-model"]),
    ],
)
def test_a_prompt_with_a_token_that_a_model_has_not_is_refused(key: str, overrides: list[str], tmp_path: Path) -> None:
    """The highest token of the built-in prompts is `=`, 32."""
    overrides = [*overrides, f"{key}={tmp_path / 'model'}", f"model.tokenizer_path={tmp_path / 'model'}"]
    with_vocabulary(tmp_path, 33)
    preflight.check_inputs(tiny(*overrides))
    held_out = ["task.eval_path=held_out.jsonl"]
    with pytest.raises(ConfigurationError, match=r"has no token 33, .* its vocabulary is 0 to 32"):
        preflight.check_inputs(tiny(*overrides, *held_out))
    with_vocabulary(tmp_path, 32)
    with pytest.raises(ConfigurationError, match=r"has no token 32, .* its vocabulary is 0 to 31") as caught:
        preflight.check_inputs(tiny(*overrides))
    assert caught.value.problems[0].key == key


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(preflight, "_version_of", versions.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: list(requires))


def test_a_missing_engine_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    with pytest.raises(ConfigurationError, match=r'pip install -e "\.\[cpu\]"'):
        preflight.preflight(tiny())
    installed(monkeypatch, {"vllm": "0.1.0"})
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.1\.0"):
        preflight.preflight(tiny())


@pytest.mark.parametrize(
    ("torch", "torchvision", "requires", "is_refused"),
    [
        ("2.9.0", "0.24.0", ["numpy", "torch ==2.9.0"], False),
        ("2.9.0+cu128", "0.24.0+cu128", ["torch (==2.9.0)"], False),
        ("2.9.1", "0.24.0", ["torch==2.9.0", "gdown ; extra == 'gdown'"], True),
        ("2.9.0+cu128", "0.24.0+cpu", ["torch==2.9.0"], True),
        ("2.9.0a0+1f2e.nv25", "0.24.0a0+98ab", ["torch"], False),
        ("2.9.0+other1", "0.24.0+gitab12", ["torch==2.9.0+other1"], False),
    ],
)
def test_a_torchvision_of_another_torch_is_named_without_an_import_of_either(
    torch: str, torchvision: str, requires: tuple[str, ...], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"torch": torch, "torchvision": torchvision}, requires)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    problems = list(preflight.torchvision_problems())
    assert len(problems) == is_refused
    if problems:
        assert f"torchvision {torchvision} with torch {torch}" in str(problems[0])
        assert "pip uninstall torchvision" in str(problems[0])


def test_an_unusable_device_is_a_configuration_error() -> None:
    cfg = load_config(["device=cpu"])
    with pytest.raises(ConfigurationError, match="device"):
        preflight.preflight(replace(cfg, device=replace(cfg.device, name="npu")))


@pytest.mark.parametrize("key", ["model.lora.rank=8", "+rollout.engine_args.speculative_config={method: ngram}"])
def test_engines_that_load_weights_need_a_model_that_has_them(key: str, tmp_path: Path) -> None:
    write_inputs(workload("w1", is_tiny=True), tmp_path)
    overrides, drawn = [f"model.path={tmp_path / 'model'}", "mode=async"], "model.random_weights=true"
    preflight.preflight(tiny(*overrides, drawn))  # weights from the seed come with the first version
    with pytest.raises(ConfigurationError, match="has a config alone") as caught:
        preflight.preflight(tiny(*overrides, drawn, key))
    assert key.partition("=")[0].lstrip("+") in str(caught.value)
    (tmp_path / "model" / "pytorch_model.bin").touch()
    preflight.preflight(tiny(*overrides, key))


def test_weights_are_drawn_only_where_that_is_asked_for_and_none_are_there(tmp_path: Path) -> None:
    model, critic = tmp_path / "model", tmp_path / "critic"
    write_inputs(workload("w1", is_tiny=True), tmp_path)
    shutil.copytree(model, critic)
    path, drawn = f"model.path={model}", "model.random_weights=true"
    with pytest.raises(ConfigurationError, match=r"has no weights \(found \['chat_template") as caught:
        preflight.preflight(tiny(path))
    assert caught.value.problems[0].key == "model.path"
    preflight.preflight(tiny(path, drawn))
    of_critic = ("algorithm=ppo", f"critic.path={critic}")
    with pytest.raises(ConfigurationError, match="has no weights") as caught:
        preflight.preflight(tiny(path, drawn, *of_critic))
    assert caught.value.problems[0].key == "critic.path", "it is the policy that is drawn"
    preflight.preflight(tiny(path, drawn, "algorithm=ppo", f"critic.path={model}"))
    with pytest.raises(ConfigurationError, match="has no weights") as caught:
        preflight.preflight(tiny(path, drawn, "algorithm=opd", f"algorithm.kl.reference_model={critic}"))
    assert caught.value.problems[0].key == "algorithm.kl.reference_model", "a teacher has something to teach"
    (model / "pytorch_model.bin").touch()
    with pytest.raises(ConfigurationError, match=r"has weights, which model\.random_weights=true would not read"):
        preflight.preflight(tiny(path, drawn))
    for elsewhere in ("builtin:tiny", "owner/name"):
        with pytest.raises(ConfigurationError, match="must be the directory of a config without weights"):
            preflight.check_inputs(tiny(f"model.path={elsewhere}", drawn))


def test_missing_weights_are_told_before_what_a_checkpoint_says_of_the_seed(tmp_path: Path) -> None:
    write_inputs(workload("w1", is_tiny=True), tmp_path)
    cfg = tiny(f"model.path={tmp_path / 'model'}", "algorithm.kl.coef=0.1", "model.random_weights=true", "run_dir=run")
    tmp = begin(tmp_path / "run" / "checkpoints", 5)
    commit(tmp, {"run": {"step": 5}, "buffer": {"prompts": []}, "origin": origin(cfg)})
    with pytest.raises(ConfigurationError, match="has no weights"):
        preflight.check_inputs(replace(cfg, model=replace(cfg.model, random_weights=False)))


def test_where_weights_come_from_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    cfg = tiny("model.path=here", "seed=3")
    with caplog.at_level("INFO"):
        for is_drawn in (False, True):
            one = replace(cfg, model=replace(cfg.model, random_weights=is_drawn))
            preflight.log_inputs(one, DataSets(train=prompt_set(), evaluation=()))
    assert [text for text in caplog.messages if "weights" in text] == [
        "weights: those of here",
        "weights: drawn from seed 3",
    ]


def test_the_built_in_model_name_becomes_its_directory(tmp_path: Path) -> None:
    cfg = tiny()
    assert Path(tiny_model.with_model_directory(cfg).model.path).parent == tmp_path / "cache"
    other = replace(cfg, model=replace(cfg.model, path="some/model"))
    assert tiny_model.with_model_directory(other) == other


def run_python(code: str, **how: Any) -> None:
    asyncio.run(tiny_model._run_to_end([sys.executable, "-c", code], **({"timeout_s": 30.0} | how)))


def test_a_helper_process_that_fails_says_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="exited with 1: ValueError: no disk"):
        run_python("print('noise'); raise ValueError('no disk')")


def test_a_helper_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **how: Any) -> asyncio.subprocess.Process:
        started.append(await start(*arguments, **how))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="did not end within 2 s"):
        run_python("import time; time.sleep(600)", timeout_s=2.0)
    assert time.monotonic() - begin < 60
    (helper,) = started
    assert not Path(f"/proc/{helper.pid}").exists()


def test_a_helper_process_ends_when_the_run_is_cancelled(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def main() -> None:
        task = asyncio.create_task(tiny_model._run_to_end([sys.executable, "-c", code], timeout_s=60.0))
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_device_that_is_named_may_be_elsewhere_on_a_cluster_that_is_joined() -> None:
    """No accelerator is on the machines that run this. `cuda` stands for one that only other nodes have."""
    if build("cuda").is_available():
        pytest.skip("this machine has the device")
    named = ["device=cuda", "model.path=builtin:tiny"]
    with pytest.raises(ConfigurationError, match="device 'cuda' was asked for but cannot be used"):
        preflight.preflight(load_config(named))
    checked = preflight.preflight(load_config([*named, "ray.address=auto"]))
    assert (checked.backend.name, checked.placement.num_devices) == ("cuda", 3)


def test_a_private_cluster_with_fewer_cpus_than_its_actors_take_is_refused() -> None:
    """A learner, two engines and three rollout workers of half a CPU."""
    sizes = ["learner.num_ranks=1", "rollout.num_replicas=2", "rollout.num_workers=3"]
    with pytest.raises(ConfigurationError, match=r"ray\.num_cpus = 4\n *must be at least 4\.5"):
        preflight.preflight(tiny(*sizes, "ray.num_cpus=4"))
    for enough in (5, 0):
        assert preflight.preflight(tiny(*sizes, f"ray.num_cpus={enough}")).placement.num_cpus == 4.5


@pytest.mark.parametrize(("is_offline", "says"), [("1", "HF_HUB_OFFLINE is set"), ("0", "check the name or directory")])
def test_a_tokenizer_of_the_hub_that_may_not_be_fetched_says_why(
    monkeypatch: pytest.MonkeyPatch, is_offline: str, says: str
) -> None:
    def refuse(path: str, **_: object) -> None:
        raise OSError("not in the cache")

    monkeypatch.setenv("HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(models, "load_tokenizer", refuse)
    cfg = load_config(["model.path=some/model"])
    with pytest.raises(ConfigurationError, match=says):
        models.policy_tokenizer(cfg)


def test_engines_that_cannot_sleep_share_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU they do not sleep either, and nothing there is short of memory because of it."""
    monkeypatch.setattr("torch.version.hip", "6.3.42134-a9a80e791")
    shared, apart = load_config(["mode=colocated"]), load_config([])
    (problem,) = preflight._sleep_problems(shared, build("rocm"))
    assert problem.key == "mode.name" and "cannot give their memory" in problem.message
    assert not list(preflight._sleep_problems(apart, build("rocm")))
    assert not list(preflight._sleep_problems(shared, build("cpu")))
    monkeypatch.setattr("torch.version.hip", "6.4.43482-0f2d60242")
    assert not list(preflight._sleep_problems(shared, build("rocm")))


def test_an_address_where_no_cluster_answers_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not list(preflight._ray_address_problems(address))
    for name in ("local", "auto", "ray://somewhere:10001"):
        assert not list(preflight._ray_address_problems(name))
    (problem,) = preflight._ray_address_problems(address)
    assert problem.key == "ray.address" and "no Ray cluster can be reached there" in problem.message


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path: Path) -> None:
    size = build_tokenizer().vocab_size
    with_vocabulary(tmp_path, size - 1)
    shutil.copytree(tmp_path / "model", tmp_path / "tokenizer")
    cfg = tiny(f"model.path={tmp_path / 'model'}", f"model.tokenizer_path={tmp_path / 'tokenizer'}")
    with pytest.raises(ConfigurationError, match=rf"has {size} tokens, but the embedding of .* has {size - 1} rows"):
        preflight.check_inputs(cfg)
    with_vocabulary(tmp_path, size)
    preflight.check_inputs(cfg)
