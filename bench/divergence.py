"""What sparsity costs in quality: KL divergence of the next token from the dense run, and whether the likeliest agrees.

    python bench/divergence.py --text FILE [--model relu=PATH ...] [--silu smollm2-135m ...] [--chunks 2] [-c 512]

ReLU models: by predictor, exactly, by signs at three positions of the dial. Others: thresholds at 30, 40 and 50 %, from
what `hotneuron profile` has measured before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import host
import report
import subjects
from runs import hotneuron_json

from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig

HEADER = ("model and run", "KL divergence", "99 %", "same top-1", "perplexity", "of dense")
SIGN_DIALS = ("-1", "-0.5", "0")  # from safe to fast
SPARSITIES = ("0.3", "0.4", "0.5")


def ways(path: Path, is_relu: bool) -> dict[str, tuple[str, ...]]:
    if not is_relu:
        return {f"threshold {float(s):.0%}": ("--sparsity", s) for s in SPARSITIES}
    config = ModelConfig.from_file(GGUFFile.open(path))
    found: dict[str, tuple[str, ...]] = {"predictor": ("--sparse", "predictor")} if config.predictor_ranks else {}
    found["exact"] = ("--sparse", "exact")
    return found | {f"sign {dial}": ("--sparse", "sign", "--sparse-threshold", dial) for dial in SIGN_DIALS}


def compare(name: str, path: Path, is_relu: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "dense.npz"
        text = ("-f", str(arguments.text), "-c", str(arguments.context), "--chunks", str(arguments.chunks))
        hotneuron_json("perplexity", "-m", str(path), *text, "--sparse", "off", "--save-logits", str(base))
        for way, flags in ways(path, is_relu).items():
            found = hotneuron_json("perplexity", "-m", str(path), "--kld", str(base), *flags)
            rows.append({"model": name, "run": way, **found})
            report.note(f"{name} {way}: KL {found['kld_mean']:.6f}, same top-1 {found['same_top']:.2%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", nargs="*", default=[], help="ReLU models: NAME=PATH")
    parser.add_argument("--silu", nargs="*", default=[], help="models whose activation is never 0")
    parser.add_argument("-c", "--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/<date>-<cpu>-divergence.json")
    arguments = parser.parse_args()
    machine = host.describe()
    rows = []
    for specs, is_relu in ((arguments.model, True), (arguments.silu, False)):
        for name, path in map(subjects.find, specs):
            rows += compare(name, path, is_relu, arguments)
    cells = [
        [f"{r['model']} {r['run']}", f"{r['kld_mean']:.6f} ± {r['kld_error']:.6f}", f"{r['kld_p99']:.4f}",
         f"{r['same_top']:.2%}", f"{r['ppl']:.3f}", f"{r['base_ppl']:.3f}"] for r in rows
    ]  # fmt: skip
    report.publish(
        arguments.json or report.default_path(machine, "divergence"),
        {"machine": machine, "rows": rows},
        f"Next-token distributions, sparse beside dense, {rows[0]['tokens']} tokens" if rows else "nothing compared",
        HEADER,
        cells,
    )


if __name__ == "__main__":
    main()
