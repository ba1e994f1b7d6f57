"""Pictures of statistics and plans. matplotlib is used through its objects alone: no window, no global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotneuron.models.errors import RequestError, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hotneuron.placement.place import Placement
    from hotneuron.placement.statistics import Statistics

_KINDS = (".png", ".svg")
_INK, _GRID = "#333333", "#dddddd"


def check_figure_path(path: Path) -> None:
    """Before minutes are spent. Raises RequestError."""
    if path.suffix.lower() not in _KINDS:
        raise RequestError(f"--figure {path}: give a file name that ends in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--figure {path}: there is no folder {path.absolute().parent}; make it first")


def draw_activity(statistics: Statistics, path: Path, title: str, carried: float = 0.8) -> None:
    """The share of activations that the most active neurons of each layer carry. Raises StorageError."""
    layers, ffn = statistics.fires.shape
    figure, axes = _page(f"{title}: what part of the neurons carries the activations")
    neurons = np.arange(1, ffn + 1) / ffn * 100
    colors = _colors(layers)
    for layer in range(layers):
        fires = -np.sort(-statistics.fires[layer].astype(np.float64))
        total = fires.sum()
        if total > 0:
            label = f"layer {layer}" if layer in (0, layers // 2, layers - 1) else None
            axes.plot(neurons, np.cumsum(fires) / total * 100, color=colors[layer], linewidth=1.2, label=label)
    share = float(statistics.share_for(carried).mean()) * 100
    axes.axhline(carried * 100, color=_INK, linestyle=":", linewidth=1)
    axes.axvline(share, color=_INK, linestyle=":", linewidth=1)
    axes.annotate(
        f"{share:.0f} % of the neurons carry {carried:.0%} of the activations",
        (share, carried * 100),
        xytext=(8, -16),
        textcoords="offset points",
        color=_INK,
    )
    axes.set(xlabel="neurons, most active first (%)", ylabel="activations (%)", xlim=(0, 100), ylim=(0, 101))
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def draw_plan(placed: Placement, path: Path, title: str) -> None:
    """The neurons of each layer by the worker that holds them. Raises StorageError."""
    figure, axes = _page(f"{title}: who holds the neurons ({placed.tokens_per_s:.1f} tokens/s predicted)")
    shards = placed.plan.shards
    layers = np.arange(len(shards[0].neurons))
    colors = ["#c8553d", *_colors(max(1, len(shards) - 1))]
    for me, shard in enumerate(shards):
        starts, ends = np.array(shard.neurons).T
        label = f"{'cold' if me else 'hot'} worker {me}, {placed.n_bytes[me].total / 1e9:.2f} GB"
        axes.bar(layers, ends - starts, bottom=starts, color=colors[me], width=0.85, label=label)
    axes.set(xlabel="layer", ylabel="neurons, most active at the bottom")
    axes.legend(frameon=False, loc="upper center", ncols=len(shards), bbox_to_anchor=(0.5, -0.12))
    _save(figure, path)


def _page(title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _colors(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0.05, 0.9, count))


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{path}: the picture cannot be written: {error.strerror or error}") from error
