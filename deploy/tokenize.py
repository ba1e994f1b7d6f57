"""`hotneuron tokenize`: text on standard input, token ids on standard output."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, print_json


def tokenize(
    model: opt.Model = opt.DEFAULT_MODEL,
    no_special: Annotated[
        bool,
        typer.Option("--no-special", help="Add no BOS or EOS, and read special tokens in the text as plain text."),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Turn the text on standard input into token ids."""
    from hotneuron.models import catalog
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.tokenizer import Tokenizer

    with Steps() as steps:
        path = catalog.resolve(model, steps)
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(path).metadata, str(path))
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    ids = tokenizer.encode(text, add_special=not no_special, parse_special=not no_special)
    if as_json:
        print_json({"ids": ids})
    else:
        for token in ids:
            print(f"{token:>7} {tokenizer.decode([token], special=True)!r}")
