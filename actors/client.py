"""The client's end of a driver actor: one stream of chunks for all requests of this process, dealt out to who asked."""

from __future__ import annotations

import threading
import uuid
from typing import Any, Protocol

from hotneuron.actors.messages import Chunk, Request
from hotneuron.models.errors import EngineError, RequestError

CLOSE_S = 2.0
Item = Chunk | EngineError


class Inbox(Protocol):
    """Where one request's chunks go, or an EngineError if the driver dies. Called on the reader's thread."""

    def put(self, item: Item) -> None: ...


class Client:
    """May be used from any thread. The stream is opened by the first request."""

    def __init__(self, driver: Any):
        self._driver = driver
        self._client_id = uuid.uuid4().hex
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._failure: EngineError | None = None

    def submit(self, request: Request, inbox: Inbox) -> None:
        """Send a request, whose chunks go to the inbox.

        Raises RequestError for an id that is in use, EngineError if the driver has died.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if request.request_id in self._inboxes:
                raise RequestError(f"request_id={request.request_id!r} is already being served; give each its own")
            self._inboxes[request.request_id] = inbox
            if self._reader is None:
                # NOTE an actor starts its calls in the order they were made, so the stream is there before the request.
                stream = self._driver.chunks.options(num_returns="streaming").remote(self._client_id)
                self._reader = threading.Thread(target=self._read, args=(stream,), name="hotneuron-client", daemon=True)
                self._reader.start()
            self._driver.submit.remote(self._client_id, request)

    def cancel(self, request_id: str) -> None:
        self._driver.cancel.remote(request_id)

    def close(self) -> None:
        """End the stream. NOTE before Ray is shut down: a reader that still waits would be caught in its fall."""
        if self._reader is not None and self._failure is None:
            self._driver.close.remote(self._client_id)
            self._reader.join(CLOSE_S)

    def _read(self, stream: Any) -> None:
        import ray

        try:
            for ref in stream:
                for request_id, chunk in ray.get(ref):
                    inbox = self._inboxes[request_id]
                    if chunk.finish_reason is not None:
                        with self._lock:
                            del self._inboxes[request_id]
                    inbox.put(chunk)
        except Exception as error:  # whatever Ray raises when an actor, a node or the whole of Ray goes away
            text = (str(error) or type(error).__name__).splitlines()[0]
            with self._lock:
                self._failure = EngineError(f"the driver failed: {text}")
                for inbox in self._inboxes.values():
                    inbox.put(self._failure)
