"""`hotneuron ls`, `pull` and `rm`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, human_bytes, note, print_json


def ls(as_json: opt.Json = False) -> None:
    """List the models that have a name, fetched or not."""
    from hotneuron.models import catalog

    entries = catalog.entries()
    if as_json:
        rows = [
            {
                "name": e.name,
                "path": str(e.path) if e.path else None,
                "size_bytes": e.size_bytes,
                "fetched": bool(e.path),
            }
            for e in entries
        ]
        print_json({"folder": str(catalog.models_folder()), "models": rows})
        return
    width = max(len(e.name) for e in entries)
    for entry in entries:
        where = entry.path or f"not fetched; hotneuron pull {entry.name}"
        print(f"{entry.name:<{width}}  {human_bytes(entry.size_bytes):>9}  {where}")


def pull(
    model: Annotated[str, typer.Argument(help="A name of `ls`, or hf:owner/repo[/file.gguf].")] = opt.DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache folder; prints where it is."""
    from hotneuron.models import catalog

    with Steps() as steps:
        path = catalog.resolve(model, steps)
    print(path)


def rm(model: Annotated[str, typer.Argument(help="A name of `ls`.")]) -> None:
    """Delete a model's file from the cache folder."""
    from hotneuron.models import catalog

    for path in catalog.remove(model):
        note(f"deleted {path}")
