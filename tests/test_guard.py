"""The guard before the HTTP API: hosts, origins, keys and sizes, each refused in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hotneuron.deploy.api_types import MAX_BODY_BYTES
from hotneuron.deploy.guard import Guard, is_loopback, read_keys
from hotneuron.models.errors import NotFoundError, RequestError

KEY = b"0123456789abcdef"


def ask(
    guard: Guard,
    headers: dict[str, str],
    path: str = "/v1/models",
    body: tuple[bytes, ...] = (b"",),
    client: str = "127.0.0.1",
) -> tuple[int, dict[str, Any]]:
    """Status and body of one request whose body comes in pieces."""
    pieces, sent = list(body), []
    scope = {"type": "http", "method": "POST", "path": path, "client": (client, 5000)}
    scope["headers"] = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"] or b"null")


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the size of what it got."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def guard_with(keys: tuple[bytes, ...] = (), origins: tuple[str, ...] = ()) -> Guard:
    return Guard(reads_all, keys, ("127.0.0.1", "localhost", "::1"), origins)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_known_hosts(host: str) -> None:
    assert ask(guard_with(), {"host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "[::2]:80", "a b"])
def test_a_page_that_rebinds_its_name_is_refused(host: str) -> None:
    status, body = ask(guard_with(), {"host": host})
    assert status == 403 and body["error"]["code"] == "host_not_allowed"


def test_origins() -> None:
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    foreign = {"host": "localhost:8000", "origin": "https://app.example"}
    assert ask(guard_with(), own)[0] == 200
    assert ask(guard_with(), foreign)[1]["error"]["code"] == "origin_not_allowed"
    assert ask(guard_with(), {**own, "origin": "null"})[0] == 403
    assert ask(guard_with(origins=("https://app.example",)), foreign)[0] == 200


def test_keys() -> None:
    guard, host = guard_with((b"another-key-123", KEY)), {"host": "localhost"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY.decode()}, {"x-api-key": "\xff"}):
        status, body = ask(guard, host | headers)
        assert status == 401 and body["error"]["type"] == "authentication_error"
    assert ask(guard, host | {"authorization": f"Bearer {KEY.decode()}"})[0] == 200
    assert ask(guard, host | {"x-api-key": KEY.decode()})[0] == 200
    assert ask(guard, host, path="/health")[0] == 200  # says nothing but that it is up


def test_without_a_key_only_this_machine_may_ask() -> None:
    host = {"host": "localhost"}
    assert ask(guard_with(), host, client="10.0.0.5")[0] == 403
    assert ask(guard_with(), host, client="::1")[0] == 200
    assert ask(guard_with((KEY,)), host | {"x-api-key": KEY.decode()}, client="10.0.0.5")[0] == 200
    assert is_loopback("127.5.0.1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


def test_bodies_are_bounded_whatever_they_say_of_themselves() -> None:
    host = {"host": "localhost"}
    for said in (str(MAX_BODY_BYTES + 1), "-5", "1e3", "9" * 40):
        assert ask(guard_with(), host | {"content-length": said})[0] == 413
    assert ask(guard_with(), host, body=(b"x" * (MAX_BODY_BYTES // 2),) * 3)[0] == 413
    assert ask(guard_with(), host, body=(b"x" * 1000,) * 3) == (200, 3000)


def test_keys_are_read_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_keys(None) == ()
    path = tmp_path / "keys"
    path.write_text("first-key-1\n\n  second-key-2 \n")
    monkeypatch.setenv("HOTNEURON_API_KEY", "third-key-3")
    assert read_keys(path) == (b"first-key-1", b"second-key-2", b"third-key-3")
    with pytest.raises(NotFoundError):
        read_keys(tmp_path / "none")
    monkeypatch.setenv("HOTNEURON_API_KEY", "short")
    with pytest.raises(RequestError, match="8 characters"):
        read_keys(None)
