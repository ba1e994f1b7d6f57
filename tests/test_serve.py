"""`hotneuron serve` as a process, with the official client: answers, models that make room, faults, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml
from tiny_model import write_tiny_model

from hotneuron.actors.preparation import planned_bytes
from hotneuron.deploy.hosted_model import engine_config_of
from hotneuron.deploy.serve_config import HostedConfig

START_S, AGAIN_S = 120, 20
BIG = "smollm2-135m"


class Service:
    """A running `hotneuron serve`."""

    budget_bytes = 0

    def __init__(self, config: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "hotneuron.deploy.cli", "serve", "--config", str(config)]
        self._log = (config.parent / "serve.log").open("w+")
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stderr=self._log, stdout=self._log, start_new_session=True
        )
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)
        wait_until(self._is_up, START_S, self.log)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return len(self.client.models.list().data) > 0
        except openai.APIError:
            return False

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def get(self, path: str, body: Any = None) -> Any:
        if body is None:
            return self.client.get(f"http://127.0.0.1:{self.port}{path}", cast_to=object)
        return self.client.post(f"http://127.0.0.1:{self.port}{path}", body=body, cast_to=object)

    def model(self, name: str) -> dict[str, Any]:
        return next(model for model in self.get("/hotneuron/ps")["models"] if model["id"] == name)

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


def wait_until(condition: Callable[[], bool], limit_s: float, log: Callable[[], str] = str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s; {log()}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Service]:
    """The default model and two tiny ones, and memory for the default model and one tiny one."""
    folder = tmp_path_factory.mktemp("serve")
    models = [hosted(BIG, str(default_model_path), context_tokens=1024, max_slots=4)]
    for name in ("tiny-a", "tiny-b"):
        write_tiny_model(folder / f"{name}.gguf")
        models.append(hosted(name, str(folder / f"{name}.gguf"), context_tokens=256, max_slots=2))
    config = folder / "service.yaml"
    needed = [planned_bytes(engine_config_of(HostedConfig.model_validate(m), Path(source_of(m)))) for m in models]
    budget_gib = (needed[0] + needed[1] + needed[2] // 2) / (1 << 30)
    config.write_text(yaml.safe_dump({"llm_configs": models, "ram_budget_gib": budget_gib, "wait_s": 30}))
    started = Service(config)
    started.budget_bytes = round(budget_gib * (1 << 30))
    yield started
    started.stop()


def hosted(name: str, source: str, **engine_kwargs: int) -> dict[str, Any]:
    loading = {"model_id": name, "model_source": source}
    return {"model_loading_config": loading, "engine_kwargs": {"workers": 1, "threads": 1, **engine_kwargs}}


def source_of(model: dict[str, Any]) -> str:
    return model["model_loading_config"]["model_source"]


def chat(service: Service, text: str = "Say hi", model: str = BIG, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return service.client.chat.completions.create(model=model, messages=messages, **options)


def test_a_chat_whole_and_streamed(service: Service) -> None:
    assert [model.id for model in service.client.models.list()] == [BIG, "tiny-a", "tiny-b"]
    options: Any = {"temperature": 0, "max_tokens": 24, "seed": 1}
    whole = chat(service, **options)
    text = whole.choices[0].message.content
    assert len(text) > 10 and whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"
    events = list(chat(service, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == text
    assert events[-1].usage.completion_tokens == 24 and events[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert service.model(BIG)["state"] == "loaded" and service.model(BIG)["in_flight"] == 0


def test_what_requests_can_ask_for(service: Service) -> None:
    found = chat(service, "Count from one to ten.", max_tokens=40, n=3, seed=5, logprobs=True, top_logprobs=2)
    assert len(found.choices) == 3 and len({choice.message.content for choice in found.choices}) > 1
    first = found.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 2 and first.logprob <= 0
    again = chat(service, "Count from one to ten.", max_tokens=40, seed=5)
    assert again.choices[0].message.content == found.choices[0].message.content
    stopped = chat(service, "Count from one to ten.", max_completion_tokens=60, temperature=0, stop=["e"])
    assert "e" not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"
    text = service.client.completions.create(model=BIG, prompt="1, 2, 3, 4,", max_tokens=6, temperature=0, echo=True)
    assert text.choices[0].text.startswith("1, 2, 3, 4, 5")
    ids = service.get("/tokenize", {"model": BIG, "content": "Hello world"})["tokens"]
    assert service.get("/detokenize", {"model": BIG, "tokens": ids})["content"] == "Hello world"


def test_refusals(service: Service) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(service, model="/etc/passwd")
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(service, "word " * 3000)
    with pytest.raises(openai.BadRequestError, match="context"):
        list(chat(service, "word " * 3000, stream=True))
    with pytest.raises(openai.BadRequestError, match="token"):
        service.client.completions.create(model=BIG, prompt=[10_000_000])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(service, temperature=-1)
    with pytest.raises(openai.PermissionDeniedError):
        chat(service, extra_headers={"Host": "evil.example"})


def test_a_reader_who_leaves_frees_the_slot(service: Service) -> None:
    stream = chat(service, "Tell a long story.", stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert service.model(BIG)["engine"]["stats"]["running"] == 1
    stream.close()
    wait_until(lambda: service.model(BIG)["engine"]["stats"]["running"] == 0, 5)
    wait_until(lambda: service.model(BIG)["in_flight"] == 0, 5)


def test_models_make_room_for_each_other(service: Service) -> None:
    for name, other in (("tiny-a", "tiny-b"), ("tiny-b", "tiny-a"), ("tiny-a", "tiny-b")):
        chat(service, max_tokens=2)  # used later than the other, so that it stays
        service.client.completions.create(model=name, prompt="ab", max_tokens=3)
        states = {model["id"]: model["state"] for model in service.get("/hotneuron/ps")["models"]}
        assert states == {BIG: "loaded", name: "loaded", other: "unloaded"}
    assert sum(model["bytes"] for model in service.get("/hotneuron/ps")["models"]) <= service.budget_bytes
    assert service.get("/hotneuron/stop", {"model": "tiny-a"})["state"] == "unloaded"
    service.client.completions.create(model="tiny-b", prompt="ab", max_tokens=3, extra_body={"keep_alive": 0})
    wait_until(lambda: service.model("tiny-b")["state"] == "unloaded", 10)


@pytest.mark.parametrize("who", ["DriverActor", "WorkerActor", "model-smollm2", "gateway"])
def test_the_service_answers_again_after_a_kill(service: Service, who: str) -> None:
    wanted = chat(service, temperature=0, max_tokens=20).choices[0].message.content
    victims = [process for process in service.family() if who in " ".join(process.cmdline())]
    assert victims
    victims[0].send_signal(signal.SIGKILL)
    victims[0].wait(5)

    def answers() -> bool:
        try:
            return chat(service, temperature=0, max_tokens=20, timeout=AGAIN_S).choices[0].message.content == wanted
        except openai.APIError:
            return False

    wait_until(answers, AGAIN_S, service.log)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "t.gguf")
    config = tmp_path / "service.yaml"
    config.write_text(yaml.safe_dump({"llm_configs": [hosted("t", str(tmp_path / "t.gguf"), context_tokens=256)]}))
    service = Service(config)
    service.client.completions.create(model="t", prompt="ab", max_tokens=3)
    family = service.family()
    assert len(family) > 5
    service.stop()
    assert service.process.returncode == 0, service.log()
    wait_until(lambda: not any(_is_alive(process) for process in family), 10)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_refusals_of_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hotneuron.deploy.cli", "serve", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "HOTNEURON_API_KEY"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    open_to_all = run("--host", "0.0.0.0")
    assert open_to_all.returncode == 1 and "--api-key-file" in open_to_all.stderr
    bad = tmp_path / "bad.yaml"
    for text, problem in (("llm_configs: []", "llm_configs"), ("[", "not YAML"), ("a: 1", "Field required")):
        bad.write_text(text)
        assert problem in run("--config", str(bad)).stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be had" in run("--port", str(taken.getsockname()[1])).stderr
