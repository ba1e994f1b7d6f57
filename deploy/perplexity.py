"""`hotneuron perplexity`: how well a model predicts a text, counted as llama.cpp's llama-perplexity counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, print_json
from hotneuron.models.errors import EngineError, RequestError

if TYPE_CHECKING:
    import numpy as np

Score = Callable[[Sequence[int], int], Sequence[float]]  # tokens, first -> log-probabilities of tokens[first+1:]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-probability, its standard error, and what it was counted over."""

    ppl: float
    sd: float
    tokens: int
    chunks: int


@opt.takes_engine_options("context")
def perplexity(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The text; -: stdin.")] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    context: Annotated[int, typer.Option("-c", "--ctx-size", min=8, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Chunks at most; -1: all.")] = -1,
    save_logits: Annotated[
        Path | None, typer.Option("--save-logits", help="Keep the distributions in this file, for --kld.")
    ] = None,
    kld: Annotated[
        Path | None, typer.Option("--kld", help="Compare with the distributions in this file; takes its text too.")
    ] = None,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Score a text: chunks of -c tokens, the second half of each counted."""
    if (file is None) == (kld is None):
        raise RequestError("give -f FILE, a text to score, or --kld FILE, what --save-logits kept of another run")
    if kld is not None and save_logits is not None:
        raise RequestError("--kld compares and --save-logits keeps; give one of them")
    if kld is not None:
        answer = _compare(model, kld, chunks, options)
    else:
        assert file is not None
        answer = _score(model, opt.read_text(file), context, chunks, save_logits, options)
    if as_json:
        print_json(answer)
    elif kld is not None:
        print(f"KL divergence {answer['kld_mean']:.6f} ± {answer['kld_error']:.6f} nats a token")
        print(f"median {answer['kld_median']:.6f}, 99 % {answer['kld_p99']:.6f}, largest {answer['kld_max']:.6f}")
        print(f"same likeliest token {answer['same_top']:.2%}")
        print(f"perplexity {answer['ppl']:.4f}, of the base {answer['base_ppl']:.4f}")
        note(f"[{answer['tokens']} tokens compared in {answer['chunks']} chunks of {answer['context_tokens']}]")
    else:
        print(f"perplexity {answer['ppl']:.4f} ± {answer['sd']:.4f}")
        note(f"[{answer['tokens']} tokens scored in {answer['chunks']} chunks of {answer['context_tokens']}]")


def _score(
    model: str, text: str, context: int, limit: int, save_logits: Path | None, options: opt.EngineOptions
) -> dict[str, Any]:
    from hotneuron.deploy.console import Steps
    from hotneuron.deploy.session import engine_for

    with engine_for(model, replace(options, context=context)) as engine:
        tokenizer = engine.tokenizer
        tokens = list(tokenizer.encode(text))
        keeper = _Keeper(engine.logprobs) if save_logits is not None else None
        with Steps() as steps:
            result = measure(
                tokens,
                context,
                keeper or engine.score,
                bos=tokenizer.bos if tokenizer.add_bos else None,
                limit=limit,
                on_chunk=lambda done, total, ppl: steps(
                    "scoring", done, total, f"perplexity {ppl:.4f}" if done else ""
                ),
            )
    if keeper is not None and save_logits is not None:
        keeper.save(save_logits)
        note(f"[distributions kept in {save_logits}]")
    return asdict(result) | {"context_tokens": context, "text_tokens": len(tokens)}


def _compare(model: str, path: Path, limit: int, options: opt.EngineOptions) -> dict[str, Any]:
    from hotneuron.deploy.console import Steps
    from hotneuron.deploy.divergence import Base, Comparison
    from hotneuron.deploy.session import engine_for

    base, comparison = Base.load(path), Comparison()
    n_chunks, context = base.chunks.shape
    n_chunks = min(n_chunks, limit) if limit >= 0 else n_chunks
    if n_chunks == 0:
        raise RequestError("--chunks 0 leaves nothing to compare; give at least 1, or -1 for all")
    with engine_for(model, replace(options, context=context)) as engine, Steps() as steps:
        if engine.config.vocab != base.logprobs.shape[2]:
            theirs = f"{path} is of a model with {base.logprobs.shape[2]} tokens"
            raise RequestError(f"{theirs}, {model} has {engine.config.vocab}; compare runs of one model")
        for index in range(n_chunks):
            steps("comparing", index, n_chunks)
            chunk = base.chunks[index].tolist()
            found = engine.logprobs(chunk, context // 2)
            comparison.add(base.logprobs[index], found, base.chunks[index, context // 2 + 1 :])
        mode = engine.mode.name
    return asdict(comparison.result()) | {"chunks": n_chunks, "context_tokens": context, "mode": mode}


class _Keeper:
    """Scores by whole distributions, and keeps them."""

    def __init__(self, logprobs: Callable[[Sequence[int], int], np.ndarray]):
        self._logprobs = logprobs
        self._chunks: list[list[int]] = []
        self._kept: list[np.ndarray] = []

    def __call__(self, tokens: Sequence[int], first: int) -> Sequence[float]:
        found = self._logprobs(tokens, first)
        self._chunks.append(list(tokens))
        self._kept.append(found)
        return [float(row[token]) for row, token in zip(found, tokens[first + 1 :], strict=True)]

    def save(self, path: Path) -> None:
        import numpy as np

        from hotneuron.deploy.divergence import Base

        Base(np.array(self._chunks, np.int32), np.stack(self._kept)).save(path)


def measure(
    tokens: Sequence[int],
    context: int,
    score: Score,
    *,
    bos: int | None = None,
    limit: int = -1,
    on_chunk: Callable[[int, int, float], None] = lambda done, total, ppl: None,
) -> Perplexity:
    """Chunks of `context` tokens without overlap; of each, positions context/2 to context-2 predict their next token.

    `bos` replaces the first token of each chunk where the model's tokenizer adds it. Source: llama.cpp
    tools/perplexity/perplexity.cpp. Raises RequestError for a text shorter than one chunk.
    """
    count = len(tokens) // context
    if count == 0:
        raise RequestError(
            f"the text has {len(tokens)} tokens, less than one chunk of {context}; give more text or less -c"
        )
    count = min(count, limit) if limit >= 0 else count
    if count == 0:
        raise RequestError("--chunks 0 leaves nothing to score; give at least 1, or -1 for all")
    first = context // 2
    scored, total, squares, ppl = 0, 0.0, 0.0, 0.0
    on_chunk(0, count, ppl)
    for index in range(count):
        chunk = list(tokens[index * context : (index + 1) * context])
        if bos is not None:
            chunk[0] = bos
        losses = [-float(value) for value in score(chunk, first)]
        if len(losses) != context - first - 1:
            raise EngineError(f"the engine scored {len(losses)} tokens of a chunk, not {context - first - 1}")
        scored += len(losses)
        total += math.fsum(losses)
        squares += math.fsum(loss * loss for loss in losses)
        ppl = math.exp(total / scored)
        on_chunk(index + 1, count, ppl)
    variance = squares / scored - (total / scored) ** 2
    sd = ppl * math.sqrt(max(variance, 0.0) / (scored - 1)) if scored > 1 else 0.0
    return Perplexity(ppl, sd, scored, count)
