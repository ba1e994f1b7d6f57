"""`hotneuron profile`: how often each neuron fires on a text, and how much it then adds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, note, print_json
from hotneuron.models.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from hotneuron.actors.activity import Activity
    from hotneuron.placement.statistics import Statistics

_REST_SPARSITY = 0.5  # where activations are never 0, a neuron fires when it is in the larger half of all activations
_CARRIED = 0.8


@opt.takes_engine_options("context", "sparse", "sparsity", "sparse_threshold", "statistics")
def profile(
    file: Annotated[Path, typer.Option("-f", "--file", help="A text like those the model will see; -: stdin.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    context: Annotated[int, typer.Option("-c", "--ctx-size", min=16, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Chunks at most; -1: all.")] = -1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write; default: where run and plan look.")
    ] = None,
    signs: Annotated[
        bool, typer.Option("--signs/--no-signs", help="Measure whether signs would pay as a ReLU model's predictor.")
    ] = True,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the activation curve of each layer into this .png or .svg.")
    ] = None,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Measure how often each neuron fires, for `plan`, `--hot-budget` and `--sparsity`."""
    from hotneuron.models import catalog
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.model_config import ModelConfig
    from hotneuron.placement import statistics
    from hotneuron.placement.figures import check_figure_path, draw_activity
    from hotneuron.placement.sign_choice import choose_signs

    if figure is not None:
        check_figure_path(figure)
    text = opt.read_text(file)
    with Steps() as steps:
        path = catalog.resolve(model, steps)
    model_file = GGUFFile.open(path)
    config = ModelConfig.from_file(model_file, options.activation)
    options = replace(options, context=context)
    found = measure(path, text, context, chunks, options)
    if signs and config.activation == "relu" and not config.predictor_ranks:
        found = replace(found, signs=_sign_counts(path, text, context, chunks, options, config.n_layers))
    output = output or statistics.default_path(model_file)
    found.save(output)
    if figure is not None:
        draw_activity(found, figure, title=path.stem)
    facts = describe(found) | {"path": str(output), "model": str(path)}
    if len(found.signs):
        choice = choose_signs(model_file, config, found)
        facts["signs"] = {name: value for name, value in asdict(choice).items() if name != "dials"} | {
            "pays": choice.pays
        }
    if as_json:
        print_json(facts)
        return
    active, carry = facts["active_share"], facts["carry_share"]
    print(f"{found.tokens} tokens seen; {active:.1%} of the neurons fire for a token")
    print(f"{carry:.1%} of the neurons carry {_CARRIED:.0%} of the activations")
    _print_layers(facts["layers"])
    if "signs" in facts:
        print(_said_of_signs(facts["signs"]))
    note(f"[written to {output}" + (f", picture in {figure}]" if figure else "]"))


def measure(path: Path, text: str, context: int, limit: int, options: opt.EngineOptions) -> Statistics:
    """Run a text through a model and count. Raises RequestError for a text of less than one chunk."""
    import numpy as np

    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.model_config import ModelConfig
    from hotneuron.placement.down_norms import down_norms
    from hotneuron.placement.statistics import Statistics

    file = GGUFFile.open(path)
    config = ModelConfig.from_file(file, options.activation)
    seen = _activity(path, text, context, limit, options)
    with Steps() as steps:
        norms = []
        for layer in range(config.n_layers):
            steps("measuring what neurons add", layer, config.n_layers)
            norms.append(down_norms(file, config, layer))
    tokens = np.maximum(seen.tokens, 1)[:, None]
    adds = (seen.adds / tokens * np.array(norms)).astype(np.float32)
    fires = (seen.fires / tokens).astype(np.float32)
    found = Statistics(file.content_key(), int(seen.tokens.max()), fires, adds, seen.histogram)
    if config.activation == "relu":
        return found
    # Every neuron is computed for every token; which ones matter shows where small activations are left out.
    seen = _activity(path, text, context, limit, options, thresholds=found.thresholds(_REST_SPARSITY))
    return replace(found, fires=(seen.fires / np.maximum(seen.tokens, 1)[:, None]).astype(np.float32))


def _activity(path: Path, text: str, context: int, limit: int, options: opt.EngineOptions, **further: Any) -> Activity:
    from hotneuron.deploy.session import engine_for

    with engine_for(str(path), options, is_profiling=True, **further) as engine, Steps() as steps:
        tokens = list(engine.tokenizer.encode(text))
        bos = [engine.tokenizer.bos] if engine.tokenizer.add_bos and engine.tokenizer.bos is not None else []
        size = context - len(bos)
        count = min(len(tokens) // size, limit) if limit >= 0 else len(tokens) // size
        if count == 0:
            shortage = f"the text has {len(tokens)} tokens, a chunk {context}"
            raise RequestError(f"{shortage}; give more text, less -c, or --chunks of at least 1")
        for index in range(count):
            steps("profiling", index * context, count * context, "tokens")
            chunk = bos + tokens[index * size : (index + 1) * size]
            engine.score(chunk, len(chunk) - 2)
        return engine.activity()


def _sign_counts(
    path: Path, text: str, context: int, limit: int, options: opt.EngineOptions, n_layers: int
) -> np.ndarray:
    """int64 [layers, 2 * SCORE_BINS], as `Statistics.signs`: every neuron passes, and its score is counted."""
    all_pass = (-1e30,) * n_layers
    return _activity(path, text, context, limit, replace(options, sparse="sign"), thresholds=all_pass).histogram


def _said_of_signs(signs: dict[str, Any]) -> str:
    found = f"signs: {signs['share']:.1%} of the neurons pass where {signs['recall']:.1%} of what fires does"
    read = f"{signs['ffn_bytes'] / 1e6:.0f} MB of FFNs read a token, exactly {signs['exact_ffn_bytes'] / 1e6:.0f} MB"
    return f"{found}; {read}: {'they pay, and are used from now on' if signs['pays'] else 'they do not pay'}"


def describe(found: Statistics) -> dict[str, Any]:
    """Shares over all layers, and of each."""
    active, carry = found.fires.mean(axis=1), found.share_for(_CARRIED)
    layers = [
        {"layer": layer, "active_share": float(a), "carry_share": float(c)}
        for layer, (a, c) in enumerate(zip(active, carry, strict=True))
    ]
    shares = {"active_share": float(active.mean()), "carry_share": float(carry.mean())}
    return shares | {"tokens": found.tokens, "carried": _CARRIED, "layers": layers}


def _print_layers(layers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "fire for a token", f"carry {_CARRIED:.0%} of the activations")
    for row in layers:
        table.add_row(str(row["layer"]), f"{row['active_share']:.1%}", f"{row['carry_share']:.1%}")
    Console().print(table)
