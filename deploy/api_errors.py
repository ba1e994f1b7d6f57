"""Errors as the OpenAI API shapes them; never a traceback."""

from __future__ import annotations

from typing import Any

from hotneuron.models.errors import HotneuronError, NotFoundError, RequestError

RETRY_AFTER_S = 5
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error. Travels between processes, so it is made of plain values."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def of_ours(error: HotneuronError) -> ApiError:
    """What a user or a file caused, as an answer. The path of a model's file is nobody's business."""
    if isinstance(error, RequestError):
        return ApiError(400, " ".join(str(error).split()))
    if isinstance(error, NotFoundError):
        return ApiError(404, "the model's file is not on this machine", "model", "model_not_found")
    return ApiError(503, "the model cannot be run now; the server's log says why")


def unknown_model(name: str) -> ApiError:
    return ApiError(
        404, f"the model {name[:128]!r} does not exist; GET /v1/models lists them", "model", "model_not_found"
    )
