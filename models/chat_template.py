"""Chat templates: messages to the prompt text that a model was trained on, by the template in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hotneuron.models.errors import ModelFileError, RequestError

KEY = "tokenizer.chat_template"
MAX_TEMPLATE_CHARS = 1 << 16
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class ChatTemplate:
    """One model's template, compiled at its first use. Made by `from_metadata`; safe to share between threads.

    is_fallback: the file has no template and ChatML stands in.
    """

    def __init__(self, text: str, variables: Mapping[str, str], source: str = "model", is_fallback: bool = False):
        self.text = text
        self.is_fallback = is_fallback
        self._variables = dict(variables)
        self._source = source

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any], source: str = "model") -> ChatTemplate:
        """Takes `tokenizer.chat_template`; `source` names the file in errors. Raises ModelFileError."""
        text = md.get(KEY)
        if text is not None and not isinstance(text, str):
            raise ModelFileError(source, KEY, "is not a text")
        if text and len(text) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(source, KEY, f"has {len(text)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
        variables = {f"{name}_token": _token(md, key) for name, key in _TOKENS.items()}
        return cls(text or CHATML, variables, source, is_fallback=not text)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt. `kwargs` (such as `tools`) reach the template as variables; all must be plain data.

        Encode it with `Tokenizer.encode_prompt`. Raises RequestError if the messages are unusable or the template
        refuses them, ModelFileError if the template itself is broken, unsafe or without end.
        """
        from hotneuron.models.template_limits import LimitError, weigh
        from hotneuron.models.template_sandbox import RefusalError, SecurityError, render

        _check(messages)
        context = {"tools": None, "documents": None, **self._variables, **kwargs}
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            weigh(context)
        except LimitError as error:
            raise RequestError(f"messages: the request {error}") from None
        template = self._template
        try:
            return render(template, context)
        except RefusalError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {_line(error)}") from None
        except (SecurityError, RecursionError, MemoryError, OverflowError) as error:
            raise self._broken(error) from None
        except Exception as error:  # a template can raise what Python can
            raise RequestError(f"messages: the model's chat template fails on them: {_line(error)}") from None

    @cached_property
    def _template(self) -> Any:
        # Imported at first use: a completion needs no Jinja, which takes a tenth of a second to load.
        from hotneuron.models.template_sandbox import TemplateSandbox

        try:
            return TemplateSandbox().compile_template(self.text)
        except Exception as error:  # beside Jinja's errors: recursion, numbers too long, code that Python refuses
            raise self._broken(error) from None

    def _broken(self, error: BaseException) -> ModelFileError:
        lineno = getattr(error, "lineno", None)
        return ModelFileError(self._source, KEY, (f"line {lineno}: " if lineno else "") + _line(error))


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages: must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}]: must be an object with a text `role`")
        if not isinstance(message.get("content"), str | list | None):
            raise RequestError(f"messages[{index}].content: must be a text or a list of parts")


def _token(md: Mapping[str, Any], key: str) -> str:
    tokens, index = md.get("tokenizer.ggml.tokens"), md.get(f"tokenizer.ggml.{key}_token_id")
    if not isinstance(tokens, list) or not isinstance(index, int) or not 0 <= index < len(tokens):
        return ""
    return str(tokens[index])


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
