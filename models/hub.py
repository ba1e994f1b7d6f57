"""Models of the Hugging Face hub: which file a name means, and its download."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotneuron.models.download import (
    OnProgress,
    need_space,
    put_in_place,
    quiet,
    sha256_of,
    storage_errors,
    wait_for_lock,
)
from hotneuron.models.errors import ModelFileError, NotFoundError, RequestError

PREFIX = "hf:"
_PREFERRED = "Q4_K_M"  # what llama.cpp takes when nobody says which
_DISK_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
}
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_safe_word(text: str) -> bool:
    """Whether `text` may become one part of a path: no separators, no `..`, no leading dot or dash."""
    return _WORD.fullmatch(text) is not None and ".." not in text


@dataclass(frozen=True, slots=True)
class HubName:
    """`hf:owner/repo`, optionally with `/file.gguf` or `:QUANT` behind it."""

    owner: str
    repo: str
    file: str | None = None
    quant: str | None = None

    @classmethod
    def parse(cls, spec: str) -> HubName:
        """Raises RequestError for anything that is not such a name, or that would leave the models folder."""
        owner, _, rest = spec.removeprefix(PREFIX).partition("/")
        repo, _, file = rest.partition("/")
        repo, _, quant = repo.partition(":")
        words = [owner, repo, *(file.split("/") if file else []), *([quant] if quant else [])]
        if not all(is_safe_word(word) for word in words) or (file and not file.lower().endswith(".gguf")):
            raise RequestError(f"{spec!r} is not a model of the hub; write hf:owner/repo or hf:owner/repo/file.gguf")
        return cls(owner, repo, file or None, quant or None)

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"


def pick_file(names: Sequence[str], wanted: HubName) -> str:
    """The one file of `names` that `wanted` means: the only .gguf, else the Q4_K_M one.

    Of a split model the first part stands for all. Raises NotFoundError that lists the choices.
    """
    models = [n for n in names if n.lower().endswith(".gguf") and "mmproj" not in n.lower() and _part_of(n) == 1]
    if wanted.file:
        models = [n for n in models if n == wanted.file]
    quant = wanted.quant or (_PREFERRED if len(models) > 1 else None)
    found = [n for n in models if _names_quant(n, quant)] if quant else models
    if len(found) == 1:
        return found[0]
    choices = ", ".join(n for n in names if n.lower().endswith(".gguf")) or "no .gguf file"
    asked = wanted.file or wanted.quant or "one file to choose by itself"
    raise NotFoundError(
        f"hf:{wanted.repo_id} does not have {asked}; name one as hf:{wanted.repo_id}/FILE; it has: {choices}"
    )


def shards_of(name: str) -> list[str]:
    """All parts of the split model whose first part is `name`; `name` alone if it is not split."""
    if (match := _SHARD.fullmatch(name)) is None:
        return [name]
    stem, _, count = match.groups()
    return [f"{stem}-{part:05d}-of-{count}.gguf" for part in range(1, int(count) + 1)]


def local_file(folder: Path, wanted: HubName) -> Path | None:
    """The already downloaded file that `wanted` means, if all its parts are in `folder`."""
    home = folder / wanted.owner / wanted.repo
    present = [p.relative_to(home).as_posix() for p in home.rglob("*.gguf")] if home.is_dir() else []
    with contextlib.suppress(NotFoundError):
        name = pick_file(present, wanted)
        if set(shards_of(name)) <= set(present):
            return home / name
    return None


def fetch_hub_file(folder: Path, wanted: HubName, on_progress: OnProgress = quiet) -> Path:
    """Downloads the model below `folder`/owner/repo, going on where an earlier try stopped.

    HF_ENDPOINT, HF_TOKEN and the other variables of huggingface_hub apply.
    Raises NotFoundError (no such repository or file, no network), StorageError, ModelFileError (checksum).
    """
    from huggingface_hub import HfApi

    home = folder / wanted.owner / wanted.repo
    with _hub_errors(wanted):
        info = HfApi().model_info(wanted.repo_id, files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings or []}
    name = pick_file(list(files), wanted)
    if any(not is_safe_word(word) for word in name.split("/")):
        raise NotFoundError(f"hf:{wanted.repo_id}: the file name {name!r} cannot be kept on this machine")
    parts = shards_of(name)
    if missing := [part for part in parts if part not in files]:
        raise NotFoundError(f"hf:{wanted.repo_id} lacks a part of the split model: {missing[0]}")
    with storage_errors(folder):
        home.mkdir(parents=True, exist_ok=True)
        need_space(home, sum(files[part].size or 0 for part in parts if not (home / part).exists()))
    for part in parts:
        if not (home / part).exists():
            _fetch_one(home, wanted, part, info.sha, files[part], on_progress)
    return home / name


def _fetch_one(
    home: Path, wanted: HubName, name: str, revision: str | None, listed: Any, on_progress: OnProgress
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path = home / name
    # NOTE: hf_hub_download gives every process a part file of its own, so a killed download would start at zero again.
    # The revision is in our part file's name: bytes of two versions never mix.
    part = path.with_name(f".{path.name}.{(revision or 'main')[:12]}.part")
    with storage_errors(home):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        with part.open("r+b") as stream:
            wait_for_lock(stream, on_progress)
            if path.exists():  # fetched by another process meanwhile
                part.unlink(missing_ok=True)
                return
            have_bytes = stream.seek(0, os.SEEK_END)
            if listed.size is not None and have_bytes > listed.size:
                have_bytes = stream.seek(0)
                stream.truncate()
            try:
                with _hub_errors(wanted):
                    http_get(
                        hf_hub_url(wanted.repo_id, name, revision=revision),
                        stream,
                        resume_size=have_bytes,
                        headers=build_hf_headers(),
                        expected_size=listed.size,
                        tqdm_class=_relay(name, on_progress),
                    )
                stream.flush()
            except OSError:
                part.unlink(missing_ok=True)  # unlike a broken connection, a full disk is no reason to keep the bytes
                raise
        promised = listed.lfs.sha256 if listed.lfs else None
        if promised and (found := sha256_of(part, on_progress)) != promised:
            part.unlink(missing_ok=True)
            raise ModelFileError(path, "sha256", f"is {found}, the hub says {promised}; not kept, pull again")
        put_in_place(part, path)


@contextlib.contextmanager
def _hub_errors(wanted: HubName) -> Any:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise NotFoundError(f"hf:{wanted.repo_id} asks for consent on its page and for HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise NotFoundError(
            f"hf:{wanted.repo_id} does not exist on the hub, or is private and needs HF_TOKEN"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
            raise
        # NOTE: the hub's client changes its HTTP library between versions, so its network errors have no common type.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFoundError(
            f"hf:{wanted.repo_id} cannot be fetched: {reason}; check the network, then try again"
        ) from error


def _names_quant(name: str, quant: str) -> bool:
    return re.search(rf"(^|[^A-Z0-9]){re.escape(quant)}\b", name, re.IGNORECASE) is not None


def _part_of(name: str) -> int:
    match = _SHARD.fullmatch(name)
    return int(match.group(2)) if match else 1


def _relay(name: str, on_progress: OnProgress) -> type:
    """A tqdm that draws nothing and passes its numbers on."""
    from tqdm import tqdm

    class Relay(tqdm):  # type: ignore[type-arg]
        def display(self, *_: Any, **__: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            on_progress(f"downloading {name.rsplit('/', 1)[-1]}", int(self.n), int(self.total) if self.total else None)
            return shown

    return Relay
