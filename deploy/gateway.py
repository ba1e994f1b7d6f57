"""The HTTP API: OpenAI's routes, and what a machine's owner wants to know. Checks, forwards, and shapes errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hotneuron.deploy.api_errors import ApiError, unknown_model
from hotneuron.deploy.api_types import ChatRequest, CompletionRequest, DetokenizeRequest, Name, TokenizeRequest
from hotneuron.deploy.keep_alive import parse_keep_alive
from hotneuron.deploy.openai_format import sse
from hotneuron.models.errors import RequestError

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger("ray.serve")


class Gateway:
    """`models`: for each name a handle of its deployment."""

    def __init__(self, models: dict[str, Any]):
        self.models = models
        self.started = int(time.time())

    def model(self, name: str) -> Any:
        """The handle of a configured model; names are looked up, never opened. Raises ApiError."""
        handle = self.models.get(name)
        if handle is None:
            raise unknown_model(name)
        return handle

    async def describe(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(_described(name, handle) for name, handle in self.models.items())))


async def _described(name: str, handle: Any) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(_answer(handle.describe.remote()), 10)
    except Exception:  # a replica that restarts is a state, too
        return {"id": name, "state": "unavailable", "bytes": 0, "in_flight": 0, "unloads_in_s": None}


async def _answer(response: Any) -> Any:
    found = await response
    if isinstance(found, ApiError):
        raise found
    return found


def routes(gateway: Gateway) -> FastAPI:
    """The application. NOTE built where it runs: it is not pickled."""
    app = FastAPI(title="hotneuron", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _defect)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(m, gateway) for m in await gateway.describe()]}

    @app.get("/v1/models/{name}")
    async def get_model(name: str) -> dict[str, Any]:
        return _model_object(await _described(name, gateway.model(name)), gateway)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        _refuse_what_is_missing(body)
        return await _complete(gateway, body)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        return await _complete(gateway, body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return {"tokens": await _answer(gateway.model(body.model).tokenize.remote(body.content, body.add_special))}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return {"content": await _answer(gateway.model(body.model).detokenize.remote(body.tokens))}

    @app.get("/hotneuron/ps")
    async def ps() -> dict[str, Any]:
        return {"models": await gateway.describe()}

    @app.post("/hotneuron/load")
    async def load(
        model: Annotated[Name, Body(embed=True)],
        keep_alive: Annotated[str | float | None, Body(embed=True)] = None,
    ) -> dict[str, Any]:
        if keep_alive is not None:
            _checked_keep_alive(keep_alive)
        await _answer(gateway.model(model).load.remote(keep_alive))
        return {"model": model, "state": "loaded"}

    @app.post("/hotneuron/stop")
    async def stop(model: Annotated[Name, Body(embed=True)]) -> dict[str, Any]:
        if not await _answer(gateway.model(model).unload.remote()):
            raise ApiError(429, f"{model} is answering; it can stop when that has ended")
        return {"model": model, "state": "unloaded"}

    return app


async def _complete(gateway: Gateway, body: ChatRequest | CompletionRequest) -> Response:
    handle = gateway.model(body.model)
    if body.keep_alive is not None:
        _checked_keep_alive(body.keep_alive)
    unknown = body.unknown_fields()
    headers = {"x-hotneuron-ignored": ",".join(unknown)[:200]} if unknown and all(map(str.isascii, unknown)) else {}
    items = handle.options(stream=True).answer.remote(body)
    first = await anext(items)
    if isinstance(first, ApiError):
        raise first
    if isinstance(first, dict):
        return JSONResponse(first, headers=headers)
    return StreamingResponse(_events(items), media_type="text/event-stream", headers=_STREAM_HEADERS | headers)


async def _events(items: Any) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            yield sse(item.body()) if isinstance(item, ApiError) else item
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the replica died: whoever listens shall know that this is not the end of the answer
        _log.warning("a stream broke: %s", type(error).__name__)
        yield sse(ApiError(503, "the model went away in the middle of this answer; ask again").body())


def _checked_keep_alive(value: str | float) -> None:
    try:
        parse_keep_alive(value)
    except RequestError as error:
        raise ApiError(400, str(error), "keep_alive") from None


def _refuse_what_is_missing(body: ChatRequest) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(400, "response_format: only text so far", "response_format", "unsupported")
    if body.tools and body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice: calls cannot be forced so far", "tool_choice", "unsupported")


def _model_object(found: dict[str, Any], gateway: Gateway) -> dict[str, Any]:
    return {
        "id": found["id"],
        "object": "model",
        "created": gateway.started,
        "owned_by": "hotneuron",
        "state": found["state"],
        "bytes": found["bytes"],
    }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    problem = "is not JSON" if first["type"] == "json_invalid" else first["msg"]
    return await _api_error(request, ApiError(400, f"{field or 'the body'}: {problem}"[:500], field or None))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _api_error(request, ApiError(error.status_code, str(error.detail)[:200]))


async def _defect(request: Request, error: Exception) -> Response:
    _log.error("a defect: %s in %s", type(error).__name__, request.url.path)
    return await _api_error(request, ApiError(500, "the server has a defect; its log says more"))
