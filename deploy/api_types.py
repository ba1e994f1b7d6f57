"""What the HTTP API takes: OpenAI's fields and llama.cpp's, every one bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_BODY_BYTES = 8 << 20
MAX_TEXT_CHARS = 4 << 20
MAX_CHOICES = 16
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="allow")  # what is not known is named in a header

    def unknown_fields(self) -> list[str]:
        return sorted(self.model_extra or ())


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Generation(_Body):
    """Fields of both kinds of completion. None: as `hotneuron run` draws."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=256)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    keep_alive: Annotated[str, Field(max_length=64)] | float | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _names_tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            if not (token.isascii() and token.isdigit() and int(token) < 1 << 31):
                raise ValueError(f"{token[:40]!r} is not a token id")
        return bias


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None

    def plain(self) -> dict[str, Any]:
        """For a chat template: text parts joined. Raises ValueError for other parts."""
        content = self.content
        if isinstance(content, list):
            texts = []
            for part in content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ValueError(f"a part of type {str(part.get('type'))[:40]!r}: only text is taken")
                texts.append(part["text"])
            content = "".join(texts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content or "", **(self.model_extra or {})}


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generation):
    prompt: Text | Annotated[list[TokenId], Field(min_length=1)] | Annotated[list[Text], Field(min_length=1)] = ""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @property
    def length(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs


class TokenizeRequest(_Body):
    model: Name
    content: Text
    add_special: bool = False


class DetokenizeRequest(_Body):
    model: Name
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
