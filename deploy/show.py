"""`hotneuron show`: what a model file holds, without loading it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, human_bytes, print_json

if TYPE_CHECKING:
    from hotneuron.models.gguf_file import GGUFFile


def show(model: opt.Model = opt.DEFAULT_MODEL, as_json: opt.Json = False) -> None:
    """Show a model's sizes, number formats, tokenizer and context."""
    from hotneuron.models import catalog

    with Steps() as steps:
        path = catalog.resolve(model, steps)
    facts = describe(path)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif name.endswith("_bytes"):
            value = human_bytes(value)
        print(f"{name:<16} {value}")


def describe(path: Path) -> dict[str, Any]:
    """Raises NotFoundError, ModelFileError, UnsupportedError."""
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.model_config import ModelConfig

    file = GGUFFile.open(path)
    config = ModelConfig.from_file(file)
    return {
        "path": str(path),
        "name": config.name,
        "architecture": config.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        "file_bytes": sum(part.stat().st_size for part in file.paths),
        "layers": config.n_layers,
        "hidden": config.hidden,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn,
        "vocab": config.vocab,
        "context_tokens": config.context_tokens,
        "sparse": file.magic == "PWRI",
        "types": _types(file),
        "tokenizer": _tokenizer(file.metadata),
        "chat_template": bool(file.metadata.get("tokenizer.chat_template")),
    }


def _types(file: GGUFFile) -> dict[str, int]:
    """Bytes of the tensors of each number format, the largest first."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.n_bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    keys = {"model": "model", "pre": "pre", "bos_id": "bos_token_id", "eos_id": "eos_token_id"}
    return {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
