"""`hotneuron chat`: a conversation in the model's own template; Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, one_line
from hotneuron.models.errors import HotneuronError, RequestError

if TYPE_CHECKING:
    from hotneuron.actors.engine import Engine
    from hotneuron.actors.messages import SamplingParams

_HELP = """/help           this list
/regen          answer the last message again
/reset          forget the conversation
/system [TEXT]  set or remove the system message, and forget the conversation
/replan [FILE]  deal the neurons anew, by what has fired so far or by a plan
/exit           leave (so does Ctrl-D); Ctrl-C stops an answer"""


@opt.takes_engine_options()
def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", "-sys", help="System message.")] = None,
    predict: opt.Predict = -1,
    stop: opt.Stop = None,
    temperature: opt.Temperature = 0.8,
    seed: opt.Seed = -1,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    typical: opt.Typical = 1.0,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    repeat_last: opt.RepeatLast = 64,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    *,
    options: opt.EngineOptions,
) -> None:
    """Talk with a model; /help lists what else can be typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    sampling = opt.sampling_params(
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical=typical,
        repeat_penalty=repeat_penalty,
        repeat_last=repeat_last,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=None,
    )
    from hotneuron.deploy.session import engine_for

    with engine_for(model, options) as engine:
        note("Type a message; /help lists commands, Ctrl-D leaves.")
        Conversation(engine, sampling, predict, stop, system).loop()


class Conversation:
    """The messages so far and the loop that adds to them."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, max_tokens: int, stop: list[str] | None, system: str | None
    ):
        self._engine, self._sampling, self._max_tokens, self._stop = engine, sampling, max_tokens, stop
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._answers = 0

    def loop(self) -> None:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except KeyboardInterrupt:
                note("\n(/exit or Ctrl-D leaves)")
                continue
            except EOFError:
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                self._messages.append({"role": "user", "content": line})
                self._answer()

    def _command(self, name: str, rest: str) -> None:
        if name == "/reset":
            self._messages.clear()
            note("(forgotten)")
        elif name == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
            note("(system message set, conversation forgotten)" if self._system else "(no system message now)")
        elif name == "/replan":
            self._replan(rest.strip())
        elif name == "/regen":
            if self._messages and self._messages[-1]["role"] == "assistant":
                self._messages.pop()
            if self._messages:
                self._answer()
        else:
            note(_HELP if name == "/help" else f"{name} is not a command\n{_HELP}")

    def _replan(self, plan: str) -> None:
        from hotneuron.deploy.console import Steps

        try:
            before = self._engine.activity().hot_work_share()
            with Steps() as steps:
                placed = self._engine.replan(Path(plan) if plan else None, steps)
        except HotneuronError as error:
            note(f"hotneuron: error: {one_line(error)}")
            return
        note(f"(the hot worker has {placed.hot_work_share:.1%} of the neurons that fire; it had {before:.1%})")

    def _answer(self) -> None:
        from dataclasses import replace

        from hotneuron.deploy.answer import ask, chat_tokens

        system = [{"role": "system", "content": self._system}] if self._system else []
        # One seed would give the same draws to every answer; counting on keeps a fixed seed's conversation repeatable.
        sampling = replace(self._sampling, seed=(self._sampling.seed + self._answers) % 2**63)
        self._answers += 1
        try:
            ids = chat_tokens(self._engine, [*system, *self._messages])
            answer = ask(self._engine, ids, sampling, max_tokens=self._max_tokens, stop=self._stop)
        except RequestError as error:
            self._messages.pop()
            note(f"hotneuron: error: {one_line(error)}; /reset starts anew")
            return
        print(flush=True)
        note("(stopped)" if answer.interrupted else answer.summary())
        self._messages.append({"role": "assistant", "content": answer.text})
