"""Downloads from the Hugging Face hub, against a local server that speaks its protocol, through HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "m-Q8_0.gguf": b"GGUF" + b"8" * 3_000_000,
    "m-Q4_K_M.gguf": b"GGUF" + bytes(range(256)) * 100_000,
    "README.md": b"a model",
}


class Hub(ThreadingHTTPServer):
    """One repository, owner/repo; `stall_after` makes the first download of a file stop after so many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str] = []
        self.gets: list[str] = []
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.lies = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/repo"):
            return self._send(json.dumps(self._info()).encode(), body, "application/json")
        match = re.fullmatch(rf"/owner/repo/resolve/{COMMIT}/(.+)", path)
        if match is None or match[1] not in FILES:
            return self._send(b"{}", body, "application/json", status=404, code="RepoNotFound")
        self._send_file(FILES[match[1]], body)

    def _info(self) -> dict[str, object]:
        siblings = []
        for name, data in FILES.items():
            digest = "f" * 64 if self.server.lies else hashlib.sha256(data).hexdigest()
            lfs = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(data), "lfs": lfs})
        return {
            "_id": "1",
            "id": "owner/repo",
            "modelId": "owner/repo",
            "sha": COMMIT,
            "tags": [],
            "siblings": siblings,
        }

    def _send(self, data: bytes, body: bool, kind: str, status: int = 200, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _send_file(self, data: bytes, body: bool) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        self.server.gets.append(self.path)
        if start:
            self.server.ranges.append(self.headers["Range"])
        if self.server.stall_after is not None:
            stop, self.server.stall_after = self.server.stall_after, None
            self.wfile.write(data[:stop])
            self.wfile.flush()
            self.server.stalled.set()
            time.sleep(60)
        self.wfile.write(data[start:])


@pytest.fixture
def server() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()


def command(server: Hub, cache: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HOTNEURON_")) and "proxy" not in k.lower()}
    environment = kept | {
        "HF_ENDPOINT": server.endpoint,
        "HOTNEURON_CACHE": str(cache),
        "HF_HOME": str(cache / "hf_home"),
    }
    return [sys.executable, "-m", "hotneuron.deploy.cli", *arguments], environment


def pull(server: Hub, cache: Path, spec: str) -> subprocess.CompletedProcess[str]:
    arguments, environment = command(server, cache, "pull", spec)
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)


def test_pull_picks_fetches_and_then_needs_no_network(server: Hub, tmp_path: Path) -> None:
    first = pull(server, tmp_path, "hf:owner/repo")
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    assert path == tmp_path / "models" / "hf" / "owner" / "repo" / "m-Q4_K_M.gguf"
    assert path.read_bytes() == FILES["m-Q4_K_M.gguf"]
    asked = len(server.gets)
    again = pull(server, tmp_path, "hf:owner/repo")
    assert again.stdout == first.stdout and len(server.gets) == asked


def test_pull_goes_on_where_a_killed_one_stopped(server: Hub, tmp_path: Path) -> None:
    data = FILES["m-Q4_K_M.gguf"]
    server.stall_after = len(data) * 3 // 5  # the client writes blocks of 10 MiB
    arguments, environment = command(server, tmp_path, "pull", "hf:owner/repo/m-Q4_K_M.gguf")
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert server.stalled.wait(60)
        folder = tmp_path / "models" / "hf" / "owner" / "repo"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not any(p.stat().st_size for p in folder.rglob(".*.part")):
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert not (folder / "m-Q4_K_M.gguf").exists()
    done = pull(server, tmp_path, "hf:owner/repo/m-Q4_K_M.gguf")
    assert done.returncode == 0, done.stderr
    assert (folder / "m-Q4_K_M.gguf").read_bytes() == data
    assert len(server.ranges) == 1


def test_wrong_checksum_is_not_kept(server: Hub, tmp_path: Path) -> None:
    server.lies = True
    done = pull(server, tmp_path, "hf:owner/repo/m-Q8_0.gguf")
    assert done.returncode == 1 and "sha256" in done.stderr and "Traceback" not in done.stderr
    assert not [path for path in (tmp_path / "models" / "hf").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hf:owner/repo/m-Q2_K.gguf", "m-Q8_0.gguf, m-Q4_K_M.gguf"),
        ("hf:owner/nothing", "does not exist"),
        ("hf:owner", "hf:owner/repo"),
        ("hf:owner/../repo", "hf:owner/repo"),
    ],
)
def test_refusals_are_one_line(server: Hub, tmp_path: Path, spec: str, said: str) -> None:
    done = pull(server, tmp_path, spec)
    errors = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    assert done.returncode == 1 and done.stdout == ""
    assert len(errors) == 1 and errors[0].startswith("hotneuron: error: ") and said in errors[0]


def test_no_network_is_one_line(server: Hub, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    done = pull(server, tmp_path, "hf:owner/repo")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "hotneuron: error: hf:owner/repo cannot be fetched" in done.stderr
