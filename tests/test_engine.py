"""The whole engine on Ray and the default model: equal answers, lost workers, refusals, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from local_team import ask_for, local_engine

from hotneuron.actors.engine import Engine, EngineConfig
from hotneuron.actors.messages import Chunk, Request, SamplingParams
from hotneuron.models.errors import EngineError, HotneuronError, RequestError

PROMPT = "The three primary colours are"
SAMPLED = SamplingParams(temperature=0.9, seed=3, logprobs=2)
GONE_S = 15


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(path, workers=1, threads=1, context_tokens=1024, max_slots=4)


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[Engine]:
    with Engine.start(config_of(default_model_path)) as started:
        yield started


def request_of(engine: Engine, n: int, text: str = PROMPT, sampling: SamplingParams = SAMPLED) -> Request:
    return ask_for(engine.tokenizer.encode(text), n, sampling)


def ask(engine: Engine, request: Request, on_chunk: Callable[[list[Chunk]], None] = lambda chunks: None) -> list[Chunk]:
    chunks: list[Chunk] = []
    for chunk in engine.generate(request):
        chunks.append(chunk)
        on_chunk(chunks)
    return chunks


def said(chunks: list[Chunk]) -> tuple[list[int], str, list[object], str | None]:
    tokens = [token for chunk in chunks for token in chunk.tokens]
    logprobs: list[object] = [entry for chunk in chunks for entry in chunk.logprobs]
    return tokens, "".join(chunk.text for chunk in chunks), logprobs, chunks[-1].finish_reason


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def worker_processes(engine: Engine) -> list[psutil.Process]:
    return [psutil.Process(worker["pid"]) for worker in engine.describe()["workers"]]


def test_ray_changes_no_answer(engine: Engine, default_model_path: Path) -> None:
    request = request_of(engine, 40)
    found = said(ask(engine, request))
    with local_engine(default_model_path, (1, 1), context_tokens=1024, cache_pack=True) as local:
        answer = local.ask(request_of(engine, 40))
    assert found == (answer.tokens, answer.text, answer.logprobs, answer.finish_reason)


def test_the_same_twice_and_in_company(engine: Engine) -> None:
    wanted = said(ask(engine, request_of(engine, 40)))
    texts = [PROMPT, "Once upon a time", PROMPT, "def main():", PROMPT, "1, 2, 3,"]
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: said(ask(engine, request_of(engine, 40, text))), texts))
    assert [answer for text, answer in zip(texts, answers, strict=True) if text == PROMPT] == [wanted] * 3
    assert len({str(answer) for answer in answers}) == 4


@pytest.mark.parametrize("me", [0, 1], ids=["hot", "cold"])
def test_an_answer_survives_the_kill_of_a_worker(engine: Engine, me: int) -> None:
    wanted = said(ask(engine, request_of(engine, 120)))
    before = worker_processes(engine)

    def kill(chunks: list[Chunk]) -> None:
        if sum(len(chunk.tokens) for chunk in chunks) >= 30 and is_alive(before[me]):
            before[me].send_signal(signal.SIGKILL)
            before[me].wait(5)

    assert said(ask(engine, request_of(engine, 120), kill)) == wanted
    after = worker_processes(engine)
    assert after[me].pid != before[me].pid and after[1 - me].pid == before[1 - me].pid


def test_an_answer_survives_the_kill_of_all_workers(engine: Engine) -> None:
    wanted = said(ask(engine, request_of(engine, 60)))
    before = worker_processes(engine)

    def kill(chunks: list[Chunk]) -> None:
        for process in before:
            if is_alive(process):
                process.send_signal(signal.SIGKILL)

    assert said(ask(engine, request_of(engine, 60), kill)) == wanted


def test_a_reader_who_leaves_frees_the_slot(engine: Engine) -> None:
    stream = engine.generate(request_of(engine, 900))
    next(stream)
    stream.close()
    wait_until(lambda: engine.stats()["running"] == 0, 10)
    request = request_of(engine, 900)
    stream = engine.generate(request)
    next(stream)
    engine.cancel(request.request_id)
    assert [*stream][-1].finish_reason == "cancel"


def test_refusals(engine: Engine) -> None:
    for request in (ask_for([1] * 1024, 1), ask_for([10**9], 1), ask_for([-1], 1)):
        with pytest.raises(RequestError):
            ask(engine, request)
    with pytest.raises(RequestError):
        engine.score([1] * 2000, 0)
    assert len(said(ask(engine, request_of(engine, 3)))[0]) == 3


def test_a_request_id_in_use(engine: Engine) -> None:
    request = request_of(engine, 200)
    stream = engine.generate(request)
    first = next(stream)
    with pytest.raises(RequestError, match="already"):
        ask(engine, request)
    assert len(said([first, *stream])[0]) == 200


def test_start_refuses_what_is_no_model(tmp_path: Path) -> None:
    for content in (b"no model", b""):
        path = tmp_path / "text.gguf"
        path.write_bytes(content)
        with pytest.raises(HotneuronError, match=r"text\.gguf"):
            Engine.start(config_of(path))
    with pytest.raises(HotneuronError, match="nowhere"):
        Engine.start(config_of(tmp_path / "nowhere.gguf"))


def test_the_kill_of_the_driver_ends_its_workers_and_its_streams(engine: Engine) -> None:
    """NOTE the last test of this engine."""
    processes = worker_processes(engine)
    raylet = processes[0].parent()
    assert raylet is not None
    drivers = [p for p in raylet.children() if p not in processes and "DriverActor" in " ".join(p.cmdline())]
    assert len(drivers) == 1

    def kill(chunks: list[Chunk]) -> None:
        if is_alive(drivers[0]):
            drivers[0].send_signal(signal.SIGKILL)

    began = time.monotonic()
    with pytest.raises(EngineError):
        ask(engine, request_of(engine, 900), kill)
    assert time.monotonic() - began < GONE_S
    wait_until(lambda: not any(map(is_alive, processes)), GONE_S)


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Files in shared memory that the processes have open or mapped and that still have a name."""
    found = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            links = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{process.pid}/fd")]
        except OSError:
            continue
        found |= {path for path in re.findall(r"/dev/shm/\S+$", maps, re.M) if os.path.exists(path)}
        found |= {path for path in links if path.startswith("/dev/shm/") and os.path.exists(path)}
    return found


def test_the_kill_of_the_command_leaves_nothing(default_model_path: Path) -> None:
    command = [sys.executable, "-m", "hotneuron.deploy.cli", "run", "-m", str(default_model_path)]
    command += ["-p", PROMPT, "-n", "2000", "--ignore-eos", "-t", "1"]
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.read(100)  # it answers
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5  # Ray's own processes, the driver and two workers
        used = shared_memory_of(family)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_alive, family)), GONE_S)
    left = [p for p in psutil.process_iter() if is_alive(p) and _session_of(p.pid) == process.pid]
    assert left == []
    assert not any(os.path.exists(path) for path in used)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if str(process.pid) in name}


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
