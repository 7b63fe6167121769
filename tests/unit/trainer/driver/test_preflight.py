"""A configuration -> what is refused or warned of before anything is started or written: files, packages, devices, the
hub, models, plug-ins. Data and rewards are in `test_datasets.py`."""

from __future__ import annotations

import json
import shutil
import socket
import time
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig

from tests.fakes.scripted_run import prompt_set
from trainer.__main__ import main
from trainer.builtin.tiny_model import build_tokenizer
from trainer.config.compose import load_config
from trainer.driver import models, preflight
from trainer.driver.checkpointing import origin
from trainer.driver.datasets import DataSets
from trainer.driver.named_files import file_problems
from trainer.driver.preflight import check_inputs, check_own_functions, make_agent
from trainer.errors import ConfigurationError
from trainer.learner.checkpoint import begin, commit
from weight_sync.device.select import build

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("here")


def tiny(*overrides: str) -> RunConfig:
    return load_config(["device=cpu", *overrides])


def refused(*overrides: str) -> Any:
    """The only problem that `check_inputs` has with this configuration."""
    with pytest.raises(ConfigurationError) as caught:
        check_inputs(tiny(*overrides))
    (problem,) = caught.value.problems
    return problem


def test_the_default_run_is_ready_without_making_the_model(here: Path) -> None:
    checked = preflight.preflight(tiny())
    assert (checked.backend.name, checked.resumed) == ("cpu", None)
    assert checked.models["model.path"].vocab_size == 128
    assert list(here.iterdir()) == []


def test_what_takes_long_begins_once_the_devices_are_known_and_before_the_data_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    read = preflight._check_inputs

    def check_inputs(*args: Any) -> Any:
        begun.append("data")
        return read(*args)

    monkeypatch.setattr(preflight, "_check_inputs", check_inputs)
    preflight.preflight(tiny(), on_device=lambda backend: begun.append(backend.name))
    assert begun == ["cpu", "data"]
    begun.clear()
    too_many = ("learner.num_ranks=1", "rollout.num_workers=3", "ray.num_cpus=2")
    with pytest.raises(ConfigurationError):
        preflight.preflight(tiny(*too_many), on_device=lambda backend: begun.append(backend.name))
    assert begun == ["data"], "it would be in vain"


@pytest.mark.parametrize("model", ["nowhere", "empty"])
def test_a_missing_model_a_bad_column_and_a_broken_reward_are_reported_together(
    model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is missed without torch (`nowhere`), or once it is read (`empty`)."""
    (here / "empty").mkdir()
    for file, text in {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}.items():
        (here / "empty" / file).write_text(text)
    (here / "reward.py").write_text("def reward(*, prompt, response, answer, metadata): raise KeyError('gold')\n")
    (here / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    wrong = ["device=cpu", f"model.path=./{model}", "task.reward.name=reward.py:reward"]
    for more, words in (([], "KeyError: 'gold'"), (["task.train_path=rows.jsonl"], "columns are: question, answer")):
        assert main([*wrong, *more]) == 2
        on_screen = capsys.readouterr().err
        assert f"model.path = ./{model}" in on_screen and words in on_screen


@pytest.mark.parametrize(
    ("cores", "overrides", "begin_of_note"),
    [
        (2, ["learner.num_ranks=3"], "learner.num_ranks=3 processes share the 2 cores of this host"),
        (2, ["learner.num_ranks=2"], ""),
        (8, ["mode.max_staleness=4", "trainer.total_steps=4"], "mode.max_staleness=4 is no bound for a run of"),
        (8, ["mode.max_staleness=3", "trainer.total_steps=4"], ""),
    ],
)
def test_more_ranks_than_cores_and_a_staleness_beyond_the_run_are_warned_of(
    cores: int, overrides: list[str], begin_of_note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(cores))
    notes = preflight.preflight(tiny(*overrides)).inputs.notes
    assert [note.startswith(begin_of_note) for note in notes] == [True] * bool(begin_of_note)


# --- named files: more of them in tests/golden (argv) and tests/e2e/test_bad_input.py ---


def unusable(*overrides: str) -> list[str]:
    """Keys of what shows without torch."""
    return [problem.key for problem in file_problems(load_config(list(overrides)))]


def model_directory(path: Path, **described: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(described))
    (path / "tokenizer.json").write_text("{}")
    return f"model.path={path}"


def test_hub_names_are_taken_as_they_are() -> None:
    names = ["model.path=Qwen/Qwen2.5-7B", "task.train_path=openai/gsm8k:main", "task.eval_path=owner/name"]
    assert unusable(*names) == unusable("model.path=gpt2") == []
    assert unusable("model.path=a/b/c") == unusable("model.path=./b") == ["model.path"]


def test_a_run_directory_that_cannot_be_made_is_refused_and_none_is_left_behind(here: Path) -> None:
    (here / "file").write_text("x")
    for wrong in ("file", "file/run", "/proc/run"):
        assert unusable(f"run_dir={wrong}") == ["run_dir"]
    assert unusable("run_dir=new/run") == []
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(("kv_heads", "fitting"), [(4, [1, 2, 4, 28]), (8, [1, 2, 4]), (28, [1, 2, 4, 7, 14, 28])])
def test_key_value_heads_are_split_evenly_or_copied_evenly(here: Path, kv_heads: int, fitting: list[int]) -> None:
    heads = {"num_attention_heads": 28, "num_key_value_heads": kv_heads}
    for described in (heads, {"vision_config": {}, "text_config": heads}):
        cfg = load_config([model_directory(here / "model", **described)])
        sizes = (replace(cfg, rollout=replace(cfg.rollout, tensor_parallel_size=size)) for size in range(1, 29))
        assert [one.rollout.tensor_parallel_size for one in sizes if not file_problems(one)] == fitting
        shared = (replace(cfg, learner=replace(cfg.learner, context_parallel_size=size)) for size in range(1, 29))
        assert [one.learner.context_parallel_size for one in shared if not file_problems(one)] == fitting
        cut = (replace(cfg, learner=replace(cfg.learner, tensor_parallel_size=size)) for size in range(1, 29))
        found = [one.learner.tensor_parallel_size for one in cut if not file_problems(one)]
        assert found == [size for size in fitting if kv_heads % size == 0], "a learner divides their matrices"


@pytest.mark.parametrize(
    ("described", "is_limit"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, False),
        ({"rope_scaling": None}, True),
    ],
)
def test_a_context_is_a_limit_unless_it_is_stretched(here: Path, described: dict[str, Any], is_limit: bool) -> None:
    model = model_directory(here / "model", max_position_embeddings=100, **described)
    sizes = ["task.max_prompt_tokens=60", "rollout.max_response_tokens=41"]
    assert unusable(model, *sizes) == ["rollout.max_response_tokens"] * is_limit
    assert unusable(model, sizes[0], "rollout.max_response_tokens=40") == []


def test_critic_and_teacher_count_where_they_are_used_and_engines_do_not_have_them(here: Path) -> None:
    model_directory(here / "good", max_position_embeddings=100, num_attention_heads=3)
    assert unusable("algorithm=ppo", "critic.path=./gone") == ["critic.path"]
    teacher = ["algorithm.kl.coef=0.1", "algorithm.kl.reference_model=./good", "task.max_prompt_tokens=60"]
    assert unusable(*teacher, "rollout.max_response_tokens=41") == ["rollout.max_response_tokens"]
    assert unusable(*teacher, "rollout.max_response_tokens=40", "rollout.tensor_parallel_size=2") == []
    refused = unusable(*teacher, "rollout.max_response_tokens=40", "learner.context_parallel_size=2")
    assert refused == ["learner.context_parallel_size"], "learners have it"
    assert unusable(*teacher, "algorithm.kl.reference_model=builtin:large") == ["algorithm.kl.reference_model"]


def test_a_port_in_use_is_refused_only_for_a_private_cluster() -> None:
    with socket.create_server(("", 0)) as taken:
        port = f"learner.port={taken.getsockname()[1]}"
        (problem,) = file_problems(load_config([port]))
        assert problem.key == "learner.port"
        assert "Address already in use" in problem.message and "0 for a free one" in problem.hint
        assert unusable(port, "ray.address=auto") == []
    assert unusable(port) == []


# --- packages and devices ---


def test_an_optional_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for override, extra in (("model.lora.rank=8", "lora"), ("telemetry.wandb=true", "wandb")):
        (problem,) = file_problems(load_config([override]))
        assert problem.key == override.partition("=")[0] and f'pip install "tandem-rl[{extra}]"' in problem.hint


def test_a_missing_engine_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_version_of", {}.get)
    with pytest.raises(ConfigurationError, match=r'pip install -e "\.\[cpu\]"'):
        preflight.preflight(tiny())


@pytest.mark.parametrize(
    ("versions", "words"),
    [({"vllm-ascend": "0.26.0rc1"}, "needs vLLM"), ({"vllm": "0.27.1", "vllm-ascend": "0.26.0rc1"}, "made for vLLM")],
)
def test_the_plugin_for_ascend_is_not_taken_for_vllm_itself(
    versions: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_version_of", versions.get)
    (problem,) = preflight.engine_package_problems()
    assert words in problem.message


def test_an_engine_argument_that_the_device_refuses_is_a_problem_of_its_key() -> None:
    cfg = load_config(["+rollout.engine_args.additional_config={weight_nz_mode: 2}"])
    (found,) = preflight._engine_args_problems(cfg, build("npu"))
    assert found.key == "rollout.engine_args" and "weight_nz_mode" in found.message
    assert list(preflight._engine_args_problems(cfg, build("cuda"))) == []


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
def test_a_torchvision_of_another_torch_is_refused(
    torch: str, torchvision: str, requires: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_version_of", {"torch": torch, "torchvision": torchvision}.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: requires)
    assert len(list(preflight.torchvision_problems())) == is_refused


def test_a_named_device_may_be_elsewhere_on_a_joined_cluster() -> None:
    """`cuda` stands for one that only other nodes have."""
    if build("cuda").is_available():
        pytest.skip("this machine has the device")
    checked = preflight.preflight(load_config(["device=cuda", "model.path=builtin:tiny", "ray.address=auto"]))
    assert (checked.backend.name, checked.placement.num_devices) == ("cuda", 3)


def test_seats_are_those_that_the_cache_of_this_host_is_planned_to_have() -> None:
    """512 responses of 4 tokens may be in flight; a MiB holds a thousand tokens of this model."""
    cfg = tiny("rollout.max_num_seqs=auto", "rollout.group_size=4", "rollout.kv_cache_gib=0.001")
    checked = preflight.preflight(cfg)
    small, cache_bytes, in_turns = preflight.plan_engines(cfg, checked)
    assert cache_bytes is None and not in_turns
    assert small.number < 512 and "its cache of 1,048 tokens" in small.why
    roomy = replace(cfg, rollout=replace(cfg.rollout, kv_cache_gib=0.1))
    assert preflight.plan_engines(roomy, checked).seats == (512, "all 512 that may be in flight")
    elsewhere = SimpleNamespace(ray_resource="GPU", unavailable_reason=lambda: "the device is on other nodes")
    assert preflight.plan_engines(cfg, replace(checked, backend=elsewhere)).seats.number == 512
    assert preflight.plan_engines(tiny(), checked).seats == (128, "")


GPU = SimpleNamespace(name="cuda", ray_resource="GPU", unavailable_reason=lambda: None, device_bytes=lambda: 80 << 30)
SHARED = ("mode=colocated", "learner.num_ranks=1", "rollout.num_replicas=2", "rollout.engines_per_device=2")


@pytest.mark.parametrize(
    ("overrides", "kv_gib", "in_turns"),
    [
        (SHARED, 0.3 * 80 / 2 - 2, False),
        ((*SHARED, "mode.offload=always"), 0.3 * 80 / 2 - 2, True),
        ((*SHARED[:2], "mode.offload=always"), None, True),  # it measures
        ((*SHARED[:2],), 0.3 * 80 - 2, False),
        (("mode=async", *SHARED[1:]), 0.3 * 80 / 2 - 2, False),
        (("mode=async", SHARED[1], "rollout.num_replicas=1"), None, False),
    ],
)
def test_caches_are_planned_where_others_start_on_the_device(
    overrides: tuple[str, ...], kv_gib: float | None, in_turns: bool
) -> None:
    """Two GiB are assumed for the workspace of each engine; the model has a few MiB."""
    cfg = tiny("rollout.num_replicas=1", "rollout.gpu_memory_utilization=0.3", *overrides)
    checked = preflight.preflight(replace(cfg, learner=replace(cfg.learner, compile=False)))
    found = preflight.plan_engines(cfg, replace(checked, backend=GPU))
    assert found.cache_bytes == (None if kv_gib is None else pytest.approx(kv_gib * (1 << 30), rel=1e-3))
    assert found.in_turns == in_turns


def test_engines_that_share_a_device_need_a_plan_with_room() -> None:
    cfg = tiny("rollout.gpu_memory_utilization=0.05", *SHARED)
    checked = preflight.preflight(cfg)
    elsewhere = SimpleNamespace(ray_resource="GPU", unavailable_reason=lambda: "the device is on other nodes")
    for backend, message in ((GPU, "leaves room for"), (elsewhere, "needs the model and the devices here")):
        with pytest.raises(ConfigurationError, match=f"engines_per_device = 2\n *{message}"):
            preflight.plan_engines(cfg, replace(checked, backend=backend))


def test_a_private_cluster_with_fewer_cpus_than_its_actors_take_is_refused() -> None:
    """A learner, two engines and three rollout workers of half a CPU."""
    sizes = ["learner.num_ranks=1", "rollout.num_replicas=2", "rollout.num_workers=3"]
    with pytest.raises(ConfigurationError, match=r"ray\.num_cpus = 4\n *must be at least 4\.5"):
        preflight.preflight(tiny(*sizes, "ray.num_cpus=4"))
    assert preflight.preflight(tiny(*sizes, "ray.num_cpus=5")).placement.num_cpus == 4.5


def test_engines_that_cannot_sleep_share_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU they do not sleep either, and nothing is short of memory because of it."""

    def problems(mode: str, backend: str) -> list[str]:
        return [one.key for one in preflight._sleep_problems(load_config([f"mode={mode}"]), build(backend))]

    monkeypatch.setattr("torch.version.hip", "6.3.42134-a9a80e791")
    assert problems("colocated", "rocm") == ["mode.name"]
    assert problems("async", "rocm") == problems("colocated", "cpu") == []
    monkeypatch.setattr("torch.version.hip", "6.4.43482-0f2d60242")
    assert problems("colocated", "rocm") == []


def test_an_address_where_no_cluster_responds_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        joined = tiny(f"ray.address=127.0.0.1:{server.getsockname()[1]}")
        assert not list(preflight._ray_address_problems(joined))
    for name in ("local", "auto", "ray://somewhere:10001"):
        assert not list(preflight._ray_address_problems(tiny(f"ray.address={name}")))
    (problem,) = preflight._ray_address_problems(joined)
    assert problem.key == "ray.address" and "no Ray cluster can be reached there" in problem.message


# --- the hub ---

MODEL = "some/model"


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, here: Path) -> pytest.MonkeyPatch:
    """With empty caches."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "datasets")
    return monkeypatch


@pytest.fixture
def closed(online: pytest.MonkeyPatch) -> str:
    """The address of a hub that refuses connections."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    online.setattr("huggingface_hub.constants.ENDPOINT", address)
    return address


def missing_at_hub(*overrides: str) -> dict[str, str]:
    return {problem.key: problem.value for problem in models.hub_problems(load_config(list(overrides)))}


def put_in_cache(folder: Path, file: str) -> None:
    for path, text in (("refs/main", "abc"), (f"snapshots/abc/{file}", "{}")):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)


def test_a_hub_that_refuses_is_reported_at_once_with_the_model_and_what_to_do(
    closed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    problem = refused(f"model.path={MODEL}")
    assert time.monotonic() - began < models.REACH_TIMEOUT_S
    assert (problem.key, problem.value) == ("model.path", MODEL)
    for words in ("hub cannot be reached", closed, "HF_HUB_OFFLINE=1", "model.path=DIR"):
        assert words in str(problem)
    assert "Retrying" not in capfd.readouterr().err


def test_a_hub_that_is_silent_is_waited_for_no_longer_than_its_timeout(online: pytest.MonkeyPatch) -> None:
    online.setattr(models, "REACH_TIMEOUT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        online.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert missing_at_hub(f"model.path={MODEL}") == {"model.path": MODEL}


def test_a_hub_that_responds_with_a_refusal_is_there(online: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        online.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.handle_request)
        thread.start()
        assert missing_at_hub(f"model.path={MODEL}") == {}
        thread.join()


def test_what_must_be_fetched_is_named_once_and_what_is_here_asks_no_hub(closed: str, here: Path) -> None:
    tokenizer = "model.tokenizer_path=some/tokenizer"
    teacher = ["algorithm.kl.coef=0.1", "algorithm.kl.reference_model=some/t"]
    assert missing_at_hub(f"model.path={MODEL}", tokenizer, "task=gsm8k", *teacher) == {
        "model.path": MODEL,
        "algorithm.kl.reference_model": "some/t",
        "model.tokenizer_path": "some/tokenizer",
        "task.train_path": "openai/gsm8k:main",
    }
    (here / "mine.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    assert missing_at_hub() == missing_at_hub("task.train_path=mine.jsonl", "task.eval_path=mine.jsonl") == {}
    put_in_cache(here / "hub" / "models--some--tokenizer", "tokenizer.json")
    joined = [f"model.path={MODEL}", tokenizer, "ray.address=auto"]
    assert missing_at_hub(*joined) == {}, "on a joined cluster only what is read here must be here"


@pytest.mark.parametrize(
    ("folder", "file", "override"),
    [
        ("hub/models--some--model", "config.json", f"model.path={MODEL}"),
        ("hub/models--some--model", "tokenizer.json", f"model.path={MODEL}"),
        ("hub/datasets--openai--gsm8k", "README.md", "task=gsm8k"),
        ("datasets/openai___gsm8k", "README.md", "task=gsm8k"),
    ],
)
def test_what_is_in_the_cache_asks_no_hub(closed: str, here: Path, folder: str, file: str, override: str) -> None:
    assert missing_at_hub(override)
    put_in_cache(here / folder, file)
    assert missing_at_hub(override) == {}


@pytest.mark.parametrize(("is_offline", "hint"), [("1", "HF_HUB_OFFLINE is set"), ("0", "check the name or directory")])
def test_offline_no_hub_is_asked_and_a_tokenizer_is_missed_with_the_reason(
    closed: str, monkeypatch: pytest.MonkeyPatch, is_offline: str, hint: str
) -> None:
    def refuse(path: str, **_: object) -> None:
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert missing_at_hub(f"model.path={MODEL}") == {}
    monkeypatch.setenv("HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(models, "load_tokenizer", refuse)
    with pytest.raises(ConfigurationError, match=hint):
        models.policy_tokenizer(load_config([f"model.path={MODEL}"]))


# --- weights and vocabularies ---


def save_model(path: Path, *, vocab_size: int = 128, num_layers: int = 2, tokenizer: Any) -> None:
    """A config, and a tokenizer or none."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaConfig(vocab_size=vocab_size, num_hidden_layers=num_layers, **sizes).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def with_vocabulary(folder: Path, size: int) -> None:
    """Makes `folder/model`, and a held-out set: of the two sets only this one has the token 33, which is `>`."""
    save_model(folder / "model", vocab_size=size, tokenizer=build_tokenizer())
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
def test_a_prompt_with_a_token_that_a_model_lacks_is_refused(key: str, overrides: list[str], here: Path) -> None:
    """The highest token of the built-in prompts is `=`, 32."""
    overrides = [*overrides, f"{key}={here / 'model'}", f"model.tokenizer_path={here / 'model'}"]
    with_vocabulary(here, 33)
    check_inputs(tiny(*overrides))
    text = refused(*overrides, "task.eval_path=held_out.jsonl").message
    assert text.startswith("has no token 33, ") and text.endswith(" its vocabulary is 0 to 32")
    with_vocabulary(here, 32)
    problem = refused(*overrides)
    assert problem.key == key and problem.message.startswith("has no token 32, ")


def test_tokens_that_tokenizer_or_embedding_do_not_have_are_refused(here: Path) -> None:
    assert "must be below 98, the number of tokens" in refused("rollout.stop_token_ids=[5, 4000]").message
    size = build_tokenizer().vocab_size
    with_vocabulary(here, size - 1)
    shutil.copytree(here / "model", here / "tokenizer")
    overrides = ["model.path=model", "model.tokenizer_path=tokenizer"]
    assert refused(*overrides).message == f"has {size} tokens, but the embedding of model has {size - 1} rows"
    with_vocabulary(here, size)
    check_inputs(tiny(*overrides))


@pytest.mark.parametrize("key", ["model.lora.rank=8", "+rollout.engine_args.speculative_config={method: ngram}"])
def test_engines_that_load_weights_need_a_model_that_has_them(key: str, here: Path) -> None:
    save_model(here / "model", tokenizer=build_tokenizer())
    overrides, drawn = ["model.path=model", "mode=async"], "model.random_weights=true"
    check_inputs(tiny(*overrides, drawn))  # weights from the seed come with the first version
    text = str(refused(*overrides, drawn, key))
    assert "has only a config" in text and key.partition("=")[0].lstrip("+") in text
    (here / "model" / "pytorch_model.bin").touch()
    check_inputs(tiny(*overrides, key))


def test_weights_are_drawn_only_where_that_is_asked_for_and_none_are_there(here: Path) -> None:
    """Of the policy: a teacher has something to teach, and the critic may begin as another model."""
    save_model(here / "model", tokenizer=build_tokenizer())
    shutil.copytree(here / "model", here / "other")
    path, drawn = "model.path=model", "model.random_weights=true"
    for overrides, key in (
        ([path], "model.path"),
        ([path, drawn, "algorithm=ppo", "critic.path=other"], "critic.path"),
        ([path, drawn, "algorithm=opd", "algorithm.kl.reference_model=other"], "algorithm.kl.reference_model"),
    ):
        problem = refused(*overrides)
        assert problem.key == key and "has no weights (found ['chat_template" in problem.message
    check_inputs(tiny(path, drawn))
    check_inputs(tiny(path, drawn, "algorithm=ppo", "critic.path=model"))
    (here / "model" / "pytorch_model.bin").touch()
    assert "has weights, which model.random_weights=true would not read" in refused(path, drawn).message
    for elsewhere in ("builtin:tiny", "owner/name"):
        with pytest.raises(ConfigurationError, match="must be the directory of a config without weights"):
            check_inputs(tiny(f"model.path={elsewhere}", drawn))


def test_missing_weights_are_reported_before_a_checkpoint_with_another_seed(here: Path) -> None:
    save_model(here / "model", tokenizer=build_tokenizer())
    cfg = tiny("model.path=model", "algorithm.kl.coef=0.1", "model.random_weights=true", "run_dir=run")
    tmp = begin(here / "run" / "checkpoints", 5)
    commit(tmp, {"run": {"step": 5}, "buffer": {"prompts": []}, "origin": origin(cfg)})
    with pytest.raises(ConfigurationError, match="has no weights"):
        check_inputs(replace(cfg, model=replace(cfg.model, random_weights=False)))


@pytest.mark.parametrize(("is_drawn", "source"), [(False, "those of here"), (True, "drawn from seed 3")])
def test_where_weights_come_from_is_in_the_log(is_drawn: bool, source: str, caplog: pytest.LogCaptureFixture) -> None:
    cfg = tiny("model.path=here", "seed=3")
    with caplog.at_level("INFO"):
        cfg = replace(cfg, model=replace(cfg.model, random_weights=is_drawn))
        preflight.log_inputs(cfg, DataSets(train=prompt_set(), evaluation=()))
    assert f"weights: {source}" in caplog.messages


# --- the teacher ---


def teacher(path: Path, *, vocab_size: int = 128, tokenizer: Any = None) -> str:
    """Saves one; the override that names it."""
    save_model(path, vocab_size=vocab_size, num_layers=3, tokenizer=tokenizer)
    (path / "pytorch_model.bin").touch()
    return f"algorithm.kl.reference_model={path}"


def compared(*overrides: str, tokenizer: Any = None) -> list[Any]:
    cfg = tiny(*overrides)
    return list(models.teacher_problems(cfg, models.read_models(cfg), tokenizer or build_tokenizer()))


@pytest.mark.parametrize("vocab_size", [128, 160])
def test_padding_and_tokens_that_one_alone_names_do_not_matter(here: Path, vocab_size: int) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>"])
    assert compared("algorithm=opd", teacher(here / "t", vocab_size=vocab_size, tokenizer=tokenizer)) == []
    assert compared("algorithm=opd", "algorithm.kl.reference_model=builtin:tiny", tokenizer=tokenizer) == []


def test_a_teacher_with_fewer_rows_or_other_tokens_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = refused("algorithm=opd", teacher(here / "small", vocab_size=127, tokenizer=build_tokenizer()))
    assert problem.key == "algorithm.kl.reference_model" and "has 127 tokens, the policy 128" in problem.message
    with monkeypatch.context() as patch:
        names = {token: index for index, token in enumerate(build_tokenizer().get_vocab())}
        names["0"], names["1"] = names["1"], names["0"]
        patch.setattr("trainer.builtin.tiny_model.VOCABULARY", names)
        other = teacher(here / "other", tokenizer=build_tokenizer())
    text = str(refused("algorithm=opd", other))
    assert "the policy's tokenizer as" in text and "tokens differ)" in text


def test_a_teacher_that_cannot_be_compared_is_warned_of(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = teacher(here / "t")
    (note,) = check_inputs(tiny("algorithm=opd", override))[0].notes
    assert f"{override} has no tokenizer" in note
    monkeypatch.setattr(models, "load_tokenizer", lambda *_, **__: pytest.fail("the hub is waited for only once"))
    (note,) = compared("algorithm=opd", "algorithm.kl.reference_model=some/teacher")
    assert "algorithm.kl.reference_model=some/teacher cannot be read here" in note
    assert compared("algorithm.kl.coef=0.1") == [], "without a teacher there is nothing to compare"


# --- plug-ins: how paths are read is in test_plugins.py, traits are in test_rules.py ---

PLUGINS = """
from trainer.config.algorithm import EstimatorTraits, with_traits

def loss(inputs, *, beta): ...

def estimator(groups): ...

@with_traits(EstimatorTraits(needs_peers=False))
def alone(groups): ...

class Loop:
    def __init__(self, turns=1): ...
    async def run(self, prompt, max_tokens, generate): ...
"""


@pytest.fixture
def plugins(here: Path) -> None:
    (here / "plugins_for_test.py").write_text(PLUGINS)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss=plugins_for_test.los", "did you mean 'loss'?"),
        ("algorithm.loss=plugins_for_test.loss", "missing a required argument: 'beta'"),
        ("algorithm.advantage_estimator=plugins_for_test.MODULE", "has no 'MODULE'"),
        ("algorithm.advantage_estimator=plugins_for_test.estimator", "rollout.group_size"),
        ("algorithm.advantage_estimator=plugins_for_test.alone", ""),
        ("+algorithm.loss_args.beta=0.1", ""),
    ],
)
def test_a_custom_loss_or_estimator_must_import_and_fit_the_configuration(
    override: str, words: str, plugins: None
) -> None:
    loss = ["algorithm.loss=plugins_for_test.loss"] if "loss_args" in override else []
    size = ["rollout.group_size=1"] if "estimator" in override else []
    try:
        check_own_functions(tiny(*loss, *size, override))
    except ConfigurationError as error:
        assert words and words in str(error)
    else:
        assert not words


@pytest.mark.parametrize(
    "agent", ["plugins_for_test.Loop", "plugins_for_test.py:Loop", "{here}/plugins_for_test.py:Loop"]
)
def test_an_agent_is_named_by_its_module_or_its_file(agent: str, plugins: None, here: Path) -> None:
    agent = f"task.agent={agent.format(here=here)}"
    for args in ("{}", "{turns: 2}"):
        assert type(make_agent(load_config([agent, f"task.agent_args={args}"]))).__name__ == "Loop"
    with pytest.raises(ConfigurationError, match=r"(?s)task\.agent = .*unexpected keyword argument 'n'"):
        make_agent(load_config([agent, "task.agent_args={n: 1}"]))
