"""The flags that several verbs share, named as in llama.cpp, and what they turn into."""

from __future__ import annotations

import functools
import inspect
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hotneuron.models.errors import NotFoundError, RequestError

if TYPE_CHECKING:
    from hotneuron.actors.messages import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
_MAX_TEXT_BYTES = 64 << 20

Model = Annotated[
    str, typer.Option("-m", "--model", help="A .gguf file, a name of `ls`, or hf:owner/repo[/file.gguf].")
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
Context = Annotated[int | None, typer.Option("-c", "--ctx-size", min=8, help="Context in tokens.")]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, max=256, help="Threads of each worker."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, max=64, help="Cold workers; 0: the hot worker alone."),
]
Split = Annotated[
    str | None,
    typer.Option("--split", help="Shares of the workers, hot first, as 50/50."),
]
ActivationName = Annotated[
    str | None, typer.Option("--activation", help="silu, gelu or relu, where the file does not say or is wrong.")
]
Sparse = Annotated[
    str,
    typer.Option(
        "--sparse",
        help="What decides which neurons are computed: auto, exact (a ReLU model's own first product), predictor "
        "(the file's), sign (signs of weights and input), off (all are).",
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="Leave out this share of a SiLU or GELU model's neurons; needs `profile` before."),
]
SparseThreshold = Annotated[
    float | None,
    typer.Option("--sparse-threshold", help="Score from which a predicted neuron is computed; lower is safer."),
]
StatisticsFile = Annotated[
    Path | None, typer.Option("--statistics", help="What `profile` wrote; default: where it leaves it.")
]
HotBudget = Annotated[
    float | None,
    typer.Option("--hot-budget", "--vram-budget", help="GiB that the hot worker may take; it then follows a plan."),
]
PlanPath = Annotated[
    Path | None, typer.Option("--plan", help="What `plan -o` wrote, or PowerInfer's .gpuidx; instead of a budget.")
]

Predict = Annotated[
    int,
    typer.Option(
        "-n", "--predict", callback=lambda n: _checked_length(n), help="Tokens to generate at most; -1: until the end."
    ),
]
Temperature = Annotated[float, typer.Option("--temp", help="Temperature; 0: always the likeliest token.")]
Seed = Annotated[int, typer.Option("-s", "--seed", help="Seed; -1: a new one.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest; 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep this much probability; 1: off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Least share of the likeliest's probability.")]
Typical = Annotated[float, typer.Option("--typical", "--typical-p", help="Locally typical sampling; 1: off.")]
RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", help="1: off.")]
RepeatLast = Annotated[int, typer.Option("--repeat-last-n", help="Tokens that the penalties look back on.")]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", help="0: off.")]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", help="0: off.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("-l", "--logit-bias", help="ID=BIAS, repeatable.", metavar="ID=BIAS"),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="A text that ends the answer, repeatable.", metavar="TEXT")
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine flags of one call, as given."""

    context: Context = None
    threads: Threads = None
    workers: Workers = None
    split: Split = None
    activation: ActivationName = None
    sparse: Sparse = "auto"
    sparsity: Sparsity = None
    sparse_threshold: SparseThreshold = None
    statistics: StatisticsFile = None
    hot_budget: HotBudget = None
    plan: PlanPath = None

    def __post_init__(self) -> None:
        parse_split(self.split)
        if self.hot_budget is not None and not 0 < self.hot_budget < 1 << 20:
            raise RequestError(f"--hot-budget {self.hot_budget}: give GiB, as 8 or 1.5")


def takes_engine_options(*own: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a verb gets every engine flag, except those that it names as its own, as its `options`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        annotations = get_type_hints(EngineOptions, include_extras=True)
        names = [field.name for field in fields(EngineOptions) if field.name not in own]
        defaults = {field.name: field.default for field in fields(EngineOptions)}

        @functools.wraps(verb)
        def run(**given: Any) -> None:
            options = EngineOptions(**{name: given.pop(name) for name in names})
            verb(**given, options=options)

        parameters = [p for p in signature.parameters.values() if p.name != "options"]
        for name in names:
            kind, annotation = inspect.Parameter.POSITIONAL_OR_KEYWORD, annotations[name]
            parameters.append(inspect.Parameter(name, kind, default=defaults[name], annotation=annotation))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _checked_length(tokens: int) -> int:
    if tokens < 1 and tokens != -1:
        raise RequestError(f"-n {tokens} leaves nothing to generate; give at least 1, or -1: until the end")
    return tokens


def parse_split(text: str | None) -> tuple[float, ...] | None:
    """`50/50` as shares that add to 1. Raises RequestError."""
    if text is None:
        return None
    try:
        shares = tuple(float(part) for part in text.split("/"))
    except ValueError:
        shares = ()
    total = sum(shares)
    if not shares or not 0 < total < 1e6 or any(not share >= 0 for share in shares):
        raise RequestError(f"--split {text!r}: write one share per worker, hot first, as 50/50")
    return tuple(share / total for share in shares)


def parse_logit_bias(pairs: list[str] | None) -> tuple[tuple[int, float], ...]:
    """`ID=BIAS`, or `ID+1`, `ID-1` as in llama.cpp. Raises RequestError."""
    parsed = []
    for pair in pairs or []:
        match = re.fullmatch(r"(\d{1,9})(?:=|(?=[+-]))([+-]?[\d.eE]{1,20})", pair.strip())
        try:
            parsed.append((int(match[1]), float(match[2])))  # type: ignore[index]
        except (TypeError, ValueError):
            raise RequestError(f"--logit-bias {pair!r}: write a token id and a number, as 15043=-1.5") from None
    return tuple(parsed)


def sampling_params(
    *,
    temperature: float,
    seed: int,
    top_k: int,
    top_p: float,
    min_p: float,
    typical: float,
    repeat_penalty: float,
    repeat_last: int,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: list[str] | None,
    logprobs: int | None,
) -> SamplingParams:
    """The flags as SamplingParams. Raises RequestError naming the field."""
    from hotneuron.actors.messages import SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_last_tokens=repeat_last,
        logit_bias=parse_logit_bias(logit_bias),
        seed=secrets.randbits(31) if seed == -1 else seed,
        logprobs=logprobs,
    )


def read_text(path: Path) -> str:
    """A prompt or text file, `-` for standard input; one newline at its end is not part of it, as in llama.cpp.

    Raises NotFoundError, RequestError (too long, or not text).
    """
    import sys

    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_MAX_TEXT_BYTES + 1)
        else:
            with path.open("rb") as stream:
                data = stream.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read: {error.strerror or error}; -f takes a text file") from error
    if len(data) > _MAX_TEXT_BYTES:
        raise RequestError(f"{path} is longer than {_MAX_TEXT_BYTES >> 20} MiB; give a shorter text")
    if b"\0" in data[:4096]:
        raise RequestError(f"{path} is not a text file; -f takes UTF-8 text")
    return data.decode("utf-8", errors="replace").removesuffix("\n")
