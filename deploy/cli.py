"""The `hotneuron` command: its verbs, and one line for every error that a person can cause.

Verbs live in one file each and import what is slow only when they run.
"""

from __future__ import annotations

import sys
import traceback

import typer

from hotneuron.deploy.bench import bench
from hotneuron.deploy.chat import chat
from hotneuron.deploy.console import note, one_line
from hotneuron.deploy.doctor import doctor
from hotneuron.deploy.listing import ls, pull, rm
from hotneuron.deploy.perplexity import perplexity
from hotneuron.deploy.plan import plan
from hotneuron.deploy.profile import profile
from hotneuron.deploy.run import run
from hotneuron.deploy.serve import serve
from hotneuron.deploy.show import show
from hotneuron.deploy.tokenize import tokenize
from hotneuron.kernels import knobs
from hotneuron.models.errors import HotneuronError

app = typer.Typer(
    name="hotneuron",
    help="Large language models on one workstation: hot and cold neurons as a team of Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (run, chat, pull, ls, rm, show, tokenize, bench, perplexity, profile, plan, serve, doctor):
    app.command(_verb.__name__)(_verb)


def version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"hotneuron {metadata.version('hotneuron')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Entry point: exit code 0, 1 for an error, 2 for a wrong flag, 130 after Ctrl-C."""
    _check_knobs()
    try:
        app()
    except HotneuronError as error:
        _fail(error)
    except Exception:
        traceback.print_exc()
        note("hotneuron: error: this is a bug; please report the lines above and `hotneuron doctor`")
        sys.exit(1)


def _check_knobs() -> None:
    try:
        for knob in knobs.ALL:
            knob.get()
        from hotneuron.kernels import cpu  # noqa: F401  (checks HOTNEURON_SIMD against the processor)
    except ValueError as error:
        _fail(error)


def _fail(error: BaseException) -> None:
    note(f"hotneuron: error: {one_line(error)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
