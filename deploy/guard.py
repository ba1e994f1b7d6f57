"""Who may ask: loopback or a key, known hosts and origins, bodies of bounded size. Plain ASGI, before all else."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotneuron.deploy.api_errors import ApiError
from hotneuron.deploy.api_types import MAX_BODY_BYTES
from hotneuron.kernels import knobs
from hotneuron.models.errors import NotFoundError, RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_OPEN_PATHS = ("/health",)


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """API keys: a line each of a file, and HOTNEURON_API_KEY. Raises NotFoundError, RequestError (a key too short)."""
    lines: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise NotFoundError(f"{path}: API keys cannot be read: {error.strerror or error}") from error
    lines.append(knobs.API_KEY.get() or "")
    keys = tuple(line.strip().encode() for line in lines if line.strip())
    if any(len(key) < 8 for key in keys):
        raise RequestError("an API key has fewer than 8 characters; take a longer one, as `openssl rand -hex 16` gives")
    return keys


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class Guard:
    """ASGI middleware."""

    def __init__(
        self, app: Any, keys: tuple[bytes, ...], allowed_hosts: tuple[str, ...], allowed_origins: tuple[str, ...]
    ):
        self._app, self._keys = app, keys
        self._hosts = tuple(host.lower() for host in allowed_hosts)
        self._origins = tuple(origin.lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets here
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check(scope, headers)
            body = _Body(receive, send, headers)
        except ApiError as error:
            await _refuse(error, send)
            return
        with contextlib.suppress(_TooLargeError):
            await self._app(scope, body.receive, body.send)
        if body.is_too_large and not body.has_begun:
            await _refuse(_too_large(), send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if _name_of(host) not in self._hosts:
            raise ApiError(403, "this server does not go by that Host; see allowed_hosts", code="host_not_allowed")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin not in self._origins and urlsplit(origin).netloc != host:
            raise ApiError(
                403, "pages of that Origin may not use this server; see allowed_origins", code="origin_not_allowed"
            )
        if scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        if not self._keys:
            client = scope.get("client")
            if client and not is_loopback(client[0]):
                raise ApiError(403, "without an API key only this machine may ask; see --api-key-file")
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(given, known) for known in self._keys):  # all are compared, whichever matches
            raise ApiError(401, "the API key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class _TooLargeError(Exception):
    """Ends an application that reads on."""


class _Body:
    """A request's body, which ends in an error where it grows too large; then nothing the application says is sent."""

    def __init__(self, receive: Receive, send: Send, headers: dict[bytes, bytes]):
        self._receive, self._send, self._seen = receive, send, 0
        self.is_too_large = self.has_begun = False
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise _too_large()

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > MAX_BODY_BYTES:
            self.is_too_large = True
            raise _TooLargeError
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if not self.is_too_large or self.has_begun:
            self.has_begun = True
            await self._send(message)


def _too_large() -> ApiError:
    return ApiError(413, f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
