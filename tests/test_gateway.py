"""The HTTP API over models that are not there: shapes, refusals, streams, and answers to nonsense."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from hotneuron.actors.messages import Chunk, Timings, TokenLogprob
from hotneuron.deploy.api_errors import ApiError
from hotneuron.deploy.gateway import Gateway, routes
from hotneuron.deploy.openai_format import DONE, Formatter

TIMINGS = Timings(5, 2, 3, 0.1, 0.1, 0.2)


class FakeModel:
    """A deployment's handle: `answer` yields what it was given."""

    def __init__(self, *items: Any):
        self.items, self.bodies = items, []
        self.answer = SimpleNamespace(remote=self._answer)
        for name in ("describe", "tokenize", "detokenize", "load", "unload"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def options(self, **_: Any) -> FakeModel:
        return self

    async def _answer(self, body: Any) -> AsyncIterator[Any]:
        self.bodies.append(body)
        for item in self.items:
            if isinstance(item, RuntimeError):
                raise item
            yield item

    async def _describe(self) -> dict[str, Any]:
        return {"id": "m", "state": "unloaded", "bytes": 0, "in_flight": 0, "unloads_in_s": None}

    async def _tokenize(self, text: str, add_special: bool) -> list[int]:
        return [len(text), int(add_special)]

    async def _detokenize(self, tokens: list[int]) -> Any:
        return ApiError(400, "no such token") if 999 in tokens else "text"

    async def _load(self, keep_alive: Any) -> None:
        return None

    async def _unload(self) -> bool:
        return False


def client(*items: Any) -> tuple[TestClient, FakeModel]:
    model = FakeModel(*items)
    return TestClient(routes(Gateway({"m": model})), raise_server_exceptions=False), model


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_routes_that_say_what_is_there() -> None:
    http, _ = client()
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/v1/models").json()["data"][0]["state"] == "unloaded"
    assert http.get("/v1/models/m").json()["id"] == "m"
    assert http.post("/tokenize", json={"model": "m", "content": "abc"}).json() == {"tokens": [3, 0]}
    assert http.post("/detokenize", json={"model": "m", "tokens": [1]}).json() == {"content": "text"}
    assert http.post("/hotneuron/load", json={"model": "m", "keep_alive": "1h"}).json()["state"] == "loaded"
    assert http.post("/hotneuron/stop", json={"model": "m"}).status_code == 429
    assert http.get("/hotneuron/ps").json()["models"][0]["id"] == "m"


def test_a_whole_answer_and_a_stream() -> None:
    http, model = client({"object": "chat.completion"})
    found = http.post("/v1/chat/completions", json=CHAT | {"frobnicate": 1, "user": "me"})
    assert found.json() == {"object": "chat.completion"} and found.headers["x-hotneuron-ignored"] == "frobnicate"
    assert model.bodies[0].messages[0].content == "Hi"
    http, _ = client(None, b"data: 1\n\n", b": ping\n\n", DONE)
    found = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.content == b"data: 1\n\n: ping\n\ndata: [DONE]\n\n"


def test_a_stream_that_breaks_does_not_end_as_if_whole() -> None:
    http, _ = client(None, b"data: 1\n\n", RuntimeError("replica died"))
    found = http.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}).content
    assert b"went away" in found and b"[DONE]" not in found and b"replica died" not in found


REFUSED = {
    "no such model": ("/v1/chat/completions", CHAT | {"model": "../../etc/passwd"}, 404),
    "no messages": ("/v1/chat/completions", CHAT | {"messages": []}, 400),
    "a role of nobody": ("/v1/chat/completions", CHAT | {"messages": [{"role": "x", "content": ""}]}, 400),
    "hot": ("/v1/chat/completions", CHAT | {"temperature": 1e9}, 400),
    "negative": ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400),
    "many choices": ("/v1/chat/completions", CHAT | {"n": 10_000}, 400),
    "many stops": ("/v1/chat/completions", CHAT | {"stop": ["x"] * 17}, 400),
    "an empty stop": ("/v1/chat/completions", CHAT | {"stop": [""]}, 400),
    "a bias of no token": ("/v1/chat/completions", CHAT | {"logit_bias": {"hello": 1}}, 400),
    "many logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400),
    "a huge seed": ("/v1/chat/completions", CHAT | {"seed": 1 << 70}, 400),
    "keep_alive of no time": ("/v1/chat/completions", CHAT | {"keep_alive": "soon"}, 400),
    "a schema": ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400),
    "a token id below 0": ("/v1/completions", {"model": "m", "prompt": [-1]}, 400),
    "a body that is a list": ("/v1/completions", [], 400),
    "detokenize": ("/detokenize", {"model": "m", "tokens": [999]}, 400),
    "no such route": ("/v1/files", {}, 404),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_the_shape_of_openai(name: str) -> None:
    path, body, status = REFUSED[name]
    found = client({})[0].post(path, json=body)
    assert found.status_code == status
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 500
    assert "Traceback" not in found.text


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", '{"model": "m", "temperature": NaN}', '{"a":' * 5000, "\x00", "[1e999]"]
)
def test_bodies_that_are_no_json(text: str) -> None:
    found = client({})[0].post("/v1/completions", content=text, headers={"content-type": "application/json"})
    assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"


def test_no_numbers_that_are_none() -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e400"):
        text = '{"model": "m", "prompt": "x", "top_p": ' + value + "}"
        found = client({})[0].post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert found.status_code == 400, value


def test_an_error_is_an_answer_and_a_defect_tells_nothing() -> None:
    found = client(ApiError(503, "no memory", "model", "no_memory"))[0].post("/v1/chat/completions", json=CHAT)
    assert found.status_code == 503 and found.headers["retry-after"] == "5"
    assert found.json()["error"]["type"] == "service_unavailable_error"
    found = client(RuntimeError("secret prompt text"))[0].post("/v1/chat/completions", json=CHAT)
    assert found.status_code == 500 and "secret" not in found.text


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def formatted(kind: Any, n: int = 1, echo: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the same answer whole."""
    form = Formatter(kind, "1", "m", Letters(), n, True, echo)  # type: ignore[arg-type]
    chunks = [
        Chunk("Hé", (72, 233), (TokenLogprob(72, -0.5, ((72, -0.5), (65, -2.0))), TokenLogprob(233, -1.0, ()))),
        Chunk("y", (121,), (TokenLogprob(121, -1e30, ()),), "stop", TIMINGS),
    ]
    events = form.first_events()
    for index in range(n):
        for chunk in chunks:
            form.push(index, chunk)
            events += form.event(index, chunk)
    events += form.usage_event()
    lines = [line for line in events.decode().split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines], form.whole()


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream_says_what_the_whole_answer_says(n: int) -> None:
    events, whole = formatted("chat", n)
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and whole["object"] == "chat.completion"
    for index in range(n):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in choices) == "Héy"
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == whole["choices"][index]["logprobs"]["content"]
        assert entries[1]["token"] == "é" and entries[1]["bytes"] == [0xC3, 0xA9] and entries[2]["logprob"] == -9999
        assert whole["choices"][index]["message"]["content"] == "Héy"
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 3 * n and whole["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 2
    }
    assert whole["timings"]["predicted_n"] == 3


def test_a_text_completion_echoes_its_prompt() -> None:
    events, whole = formatted("text", echo="> ")
    assert "".join(c["text"] for event in events for c in event["choices"]) == "> Héy" == whole["choices"][0]["text"]
    assert whole["choices"][0]["logprobs"]["tokens"] == ["H", "é", "y"]
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]
