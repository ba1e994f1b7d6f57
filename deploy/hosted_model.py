"""One model of the service: loaded at its first request, kept while used, unloaded when idle or asked for room."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from hotneuron.deploy.api_errors import ApiError, of_ours
from hotneuron.deploy.api_types import ChatRequest, CompletionRequest
from hotneuron.deploy.keep_alive import parse_keep_alive
from hotneuron.deploy.model_budget import NoRoomError
from hotneuron.deploy.openai_format import DONE, PING, Formatter, Kind, sse
from hotneuron.deploy.serve_config import HostedConfig
from hotneuron.models.errors import EngineError, HotneuronError

if TYPE_CHECKING:
    from hotneuron.actors.engine import Engine, EngineConfig
    from hotneuron.actors.messages import Chunk, Request

PING_S = 15.0
_ALL_TOKENS = 1 << 24
_log = logging.getLogger("ray.serve")


class HostedModel:
    """A deployment. `budget` is a handle of the node's `ModelBudget`."""

    def __init__(self, config: HostedConfig, budget: Any):
        self._config, self._budget = config, budget
        self._engine: Engine | None = None
        self._holder_id = uuid.uuid4().hex  # anew for each loading
        self._state, self._n_bytes, self._in_flight = "unloaded", 0, 0
        self._keep_alive_s = parse_keep_alive(config.keep_alive)
        self._idle_since = time.monotonic()
        self._loading = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None

    async def answer(self, body: ChatRequest | CompletionRequest) -> AsyncIterator[Any]:
        """An ApiError; or the whole answer as a dict; or, of a stream, None and then bytes of events."""
        try:
            async with self._loaded(body.keep_alive) as engine:
                async for item in self._answer(engine, body):
                    yield item
        except ApiError as error:
            yield error
        except NoRoomError as error:
            yield ApiError(503, str(error), "model", "no_memory")
        except HotneuronError as error:
            _log.warning("model %s: %s: %s", self._config.model_id, type(error).__name__, error)
            yield of_ours(error)

    async def _answer(self, engine: Engine, body: ChatRequest | CompletionRequest) -> AsyncIterator[Any]:
        prompts, echo = await asyncio.to_thread(_prompts, engine, body)
        requests = [r for prompt in prompts for r in _requests(body, prompt)]
        kind: Kind = "chat" if isinstance(body, ChatRequest) else "text"
        with_logprobs = body.top is not None
        request_id = uuid.uuid4().hex
        form = Formatter(
            kind,
            request_id,
            self._config.model_id,
            engine.tokenizer,
            len(requests),
            with_logprobs,
            echo,
        )
        has_begun = False
        async for index, chunk in _chunks(engine, requests):
            if chunk is None:
                if body.stream:
                    if not has_begun:
                        has_begun = True
                        yield None
                        yield form.first_events()
                    yield PING
                continue
            if chunk.finish_reason == "error":
                refused = ApiError(400, chunk.error or "refused")
                if not has_begun:
                    raise refused
                yield sse(refused.body())
                return
            form.push(index, chunk)
            if body.stream:
                event = form.event(index, chunk)
                if not has_begun:
                    has_begun = True
                    yield None
                    event = form.first_events() + event
                if event:
                    yield event
        if not body.stream:
            yield form.whole()
            return
        if body.stream_options is not None and body.stream_options.include_usage:
            yield form.usage_event()
        yield DONE

    @asynccontextmanager
    async def _loaded(self, keep_alive: str | float | None = None) -> AsyncIterator[Engine]:
        """The engine, which stays while this is open. Raises NoRoomError, HotneuronError."""
        if keep_alive is not None:
            self._keep_alive_s = parse_keep_alive(keep_alive)
        await self._pin(1)
        try:
            async with self._loading:
                if self._engine is None:
                    await self._load()
            assert self._engine is not None
            try:
                yield self._engine
            except EngineError:
                await self._drop_dead()
                raise
        finally:
            await self._pin(-1)

    async def _pin(self, change: int) -> None:
        self._in_flight += change
        self._idle_since = time.monotonic()
        if self._engine is not None:
            await self._budget.use.remote(self._holder_id, self._in_flight)

    async def _load(self) -> None:
        import ray

        from hotneuron.actors.engine import Engine
        from hotneuron.actors.preparation import planned_bytes
        from hotneuron.models import catalog

        self._state = "loading"
        holder_id = uuid.uuid4().hex
        try:
            path = await asyncio.to_thread(catalog.resolve, self._config.model_loading_config.model_source)
            engine_config = engine_config_of(self._config, path)
            self._n_bytes = await asyncio.to_thread(planned_bytes, engine_config)
            me = ray.get_runtime_context().current_actor
            await self._budget.reserve.remote(holder_id, self._config.model_id, self._n_bytes, me)
            self._holder_id = holder_id
            self._engine = await asyncio.to_thread(Engine.start, engine_config)
        except BaseException as error:
            self._state = "unloaded"
            await self._budget.release.remote(holder_id)
            raise _of_task(error) from None
        self._state = "loaded"
        self._watcher = asyncio.create_task(self._watch(holder_id))

    async def _watch(self, holder_id: str) -> None:
        """Unload when idle for long enough, or asked to make room."""
        unwanted = asyncio.ensure_future(_until(self._budget.until_unwanted.remote(holder_id)))
        try:
            while True:
                left_s = self._keep_alive_s - (time.monotonic() - self._idle_since)
                if self._in_flight == 0 and (left_s <= 0 or unwanted.done()):
                    async with self._loading:
                        if self._in_flight == 0:
                            await self._unload()
                            return
                await asyncio.wait([unwanted], timeout=min(0.25 if unwanted.done() else 1.0, max(left_s, 0.05)))
                if unwanted.done():
                    await asyncio.sleep(0.05)
        finally:
            unwanted.cancel()

    async def _unload(self) -> None:
        engine, self._engine, self._state = self._engine, None, "unloaded"
        if engine is not None:
            await asyncio.to_thread(engine.stop)
        await self._budget.release.remote(self._holder_id)

    async def _drop_dead(self) -> None:
        """After an EngineError: the next request loads anew."""
        async with self._loading:
            if self._engine is not None:
                if self._watcher is not None:
                    self._watcher.cancel()
                with suppress(Exception):
                    await self._unload()

    async def load(self, keep_alive: str | float | None = None) -> ApiError | None:
        """As the first request would."""
        try:
            async with self._loaded(keep_alive):
                return None
        except HotneuronError as error:
            return ApiError(503, str(error)) if isinstance(error, NoRoomError) else of_ours(error)

    async def unload(self) -> bool:
        """Now, if nothing is being answered; whether it went."""
        async with self._loading:
            if self._in_flight or self._engine is None:
                return self._engine is None
            if self._watcher is not None:
                self._watcher.cancel()
            await self._unload()
            return True

    async def describe(self) -> dict[str, Any]:
        """State, bytes, and until when it stays; of a loaded model also its plan and queue."""
        left_s = self._keep_alive_s - (time.monotonic() - self._idle_since)
        idle = self._state == "loaded" and self._in_flight == 0
        found: dict[str, Any] = {
            "id": self._config.model_id,
            "state": self._state,
            "bytes": self._n_bytes if self._state != "unloaded" else 0,
            "in_flight": self._in_flight,
            "unloads_in_s": left_s if idle and math.isfinite(left_s) else None,
            "pid": os.getpid(),
        }
        if (engine := self._engine) is not None and self._state == "loaded":
            with suppress(EngineError):
                found["engine"] = await asyncio.to_thread(engine.describe)
        return found

    async def tokenize(self, text: str, add_special: bool) -> list[int] | ApiError:
        try:
            async with self._loaded() as engine:
                return list(await asyncio.to_thread(engine.tokenizer.encode, text, add_special))
        except HotneuronError as error:
            return of_ours(error)

    async def detokenize(self, tokens: list[int]) -> str | ApiError:
        try:
            async with self._loaded() as engine:
                vocab = engine.config.vocab
                if any(token >= vocab for token in tokens):
                    return ApiError(400, f"tokens: ids of this model are below {vocab}", "tokens")
                return engine.tokenizer.decode(tokens, special=True)
        except HotneuronError as error:
            return of_ours(error)


def engine_config_of(config: HostedConfig, path: Any) -> EngineConfig:
    """What a model's file says, as the engine takes it."""
    from hotneuron.actors.engine import EngineConfig

    values = config.engine_kwargs.model_dump(exclude_none=True)
    if (budget := values.pop("hot_budget_gib", None)) is not None:
        values["hot_budget_bytes"] = round(budget * (1 << 30))
    return EngineConfig(model_path=path, reserves_cpus=False, **values)


def _prompts(engine: Engine, body: ChatRequest | CompletionRequest) -> tuple[list[list[int]], str]:
    """Token ids of each prompt, and the text to echo. Raises ApiError, RequestError."""
    if isinstance(body, ChatRequest):
        try:
            messages = [message.plain() for message in body.messages]
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", "messages") from None
        text = engine.chat_template.render(messages, tools=body.tools or None, **(body.chat_template_kwargs or {}))
        return [engine.tokenizer.encode_prompt(text)], ""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    elif prompt and isinstance(prompt[0], int):
        return [prompt], engine.tokenizer.decode(prompt) if body.echo else ""
    if len(prompt) > 16:
        raise ApiError(400, f"prompt: {len(prompt)} prompts in one request; at most 16", "prompt")
    if body.echo and len(prompt) > 1:
        raise ApiError(400, "echo: of one prompt only", "echo")
    encoded = [engine.tokenizer.encode(text) for text in prompt]
    if not all(encoded):
        raise ApiError(400, "prompt: is empty, and this model begins no text by itself; give one character", "prompt")
    return encoded, prompt[0] if body.echo else ""


def _requests(body: ChatRequest | CompletionRequest, prompt: list[int]) -> list[Request]:
    """One a choice, with seeds that count on. Raises RequestError."""
    from hotneuron.actors.messages import Request, SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repeat_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    seed = secrets.randbits(62) if body.seed is None else body.seed % (1 << 63)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    length = body.length or _ALL_TOKENS
    return [
        Request(
            uuid.uuid4().hex,
            tuple(prompt),
            length,
            SamplingParams(**given, logit_bias=bias, seed=(seed + i) % (1 << 63), logprobs=body.top),
            stop,
            body.ignore_eos,
        )
        for i in range(body.n or 1)
    ]


class _Inbox:
    """Puts what comes on a thread into an event loop's queue."""

    def __init__(self, index: int, queue: asyncio.Queue[tuple[int, Any]], loop: asyncio.AbstractEventLoop):
        self._index, self._queue, self._loop = index, queue, loop

    def put(self, item: Any) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (self._index, item))


async def _chunks(engine: Engine, requests: list[Request]) -> AsyncIterator[tuple[int, Chunk | None]]:
    """Chunks of all requests as they come; None when nothing has come for a while. Cancels what is left at the end."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    unfinished: set[int] = set()
    try:
        for index, request in enumerate(requests):
            engine.submit(request, _Inbox(index, queue, loop))
            unfinished.add(index)
        while unfinished:
            try:
                index, item = await asyncio.wait_for(queue.get(), PING_S)
            except TimeoutError:
                yield 0, None
                continue
            if isinstance(item, BaseException):
                raise item
            if item.finish_reason is not None:
                unfinished.discard(index)
            yield index, item
    finally:
        for index in unfinished:
            engine.cancel(requests[index].request_id)


def _of_task(error: BaseException) -> BaseException:
    """What was raised in the other process, where Ray wraps it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, HotneuronError) else error


async def _until(response: Any) -> Any:
    return await response
