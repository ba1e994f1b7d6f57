"""`hotneuron perplexity`: how well a model predicts a text, counted as llama.cpp's llama-perplexity counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, print_json
from hotneuron.models.errors import EngineError, RequestError

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
    file: Annotated[Path, typer.Option("-f", "--file", help="The text; -: stdin.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    context: Annotated[int, typer.Option("-c", "--ctx-size", min=8, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Chunks at most; -1: all.")] = -1,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Score a text: chunks of -c tokens, the second half of each counted."""
    text = opt.read_text(file)
    from hotneuron.deploy.console import Steps
    from hotneuron.deploy.session import engine_for

    with engine_for(model, replace(options, context=context)) as engine:
        tokenizer = engine.tokenizer
        tokens = list(tokenizer.encode(text))
        bos = tokenizer.bos if tokenizer.add_bos else None
        with Steps() as steps:
            result = measure(
                tokens,
                context,
                engine.score,
                bos=bos,
                limit=chunks,
                on_chunk=lambda done, total, ppl: steps(
                    "scoring", done, total, f"perplexity {ppl:.4f}" if done else ""
                ),
            )
    if as_json:
        print_json(
            {
                "ppl": result.ppl,
                "sd": result.sd,
                "tokens": result.tokens,
                "chunks": result.chunks,
                "context_tokens": context,
                "text_tokens": len(tokens),
            }
        )
    else:
        print(f"perplexity {result.ppl:.4f} ± {result.sd:.4f}")
        note(f"[{result.tokens} tokens scored in {result.chunks} chunks of {context}]")


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
