"""The command line from outside: one JSON object on stdout, one line for an error, nothing slow for `--help`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VERBS = ("run", "chat", "pull", "ls", "rm", "show", "tokenize", "bench", "perplexity", "profile", "plan", "doctor")


def hotneuron(*arguments: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotneuron.deploy.cli", *arguments],
        input=text,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_object(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout.endswith("\n") and done.stdout.count("\n") == 1, done.stderr
    return json.loads(done.stdout)


def assert_one_line_error(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 1, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("hotneuron: error: ")
    assert all(part in done.stderr for part in said), done.stderr


def test_help_names_every_verb_and_imports_nothing_slow() -> None:
    slow = "ray numba numpy rich jinja2 tokenizers huggingface_hub gguf"
    code = f"import sys, hotneuron.deploy.cli; print(*(set('{slow}'.split()) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""
    done = hotneuron("--help")
    assert done.returncode == 0 and all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str) -> None:
    assert hotneuron(verb, "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "-m", "/no/such/model.gguf"), "no such file"),
        (("tokenize", "-m", "/no/such/model.gguf"), "no such file"),
        (("run", "-m", "/no/such/model.gguf", "-p", "x"), "no such file"),
        (("bench", "-m", "unheard-of"), "smollm2-135m"),
        (("rm", "../x"), "../x"),
        (("run", "-p", "x", "-f", "y"), "-p and -f"),
        (("run", "-p", "x", "-n", "0"), "-n 0"),
        (("run", "-p", "x", "--temp", "-1"), "temperature"),
        (("run", "-p", "x", "--temp", "nan"), "temperature"),
        (("run", "-p", "x", "--top-p", "2"), "top_p"),
        (("run", "-p", "x", "--split", "a/b"), "--split"),
        (("run", "-p", "x", "--logit-bias", "five"), "--logit-bias"),
        (("run", "-f", "/no/such/prompt"), "/no/such/prompt"),
        (("perplexity", "-f", "/no/such/text"), "/no/such/text"),
        (("bench", "-p", "0", "-n", "0"), "nothing to measure"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert_one_line_error(hotneuron(*arguments), said)


@pytest.mark.parametrize("verb", ["show", "tokenize", "run"])
@pytest.mark.parametrize("content", [b"this is a text\n" * 100, b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 64])
def test_what_is_no_model_is_one_line(tmp_path: Path, verb: str, content: bytes) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(content)
    assert_one_line_error(hotneuron(verb, "-m", str(path), *(["-p", "x"] if verb == "run" else [])), "notes.gguf")


@pytest.mark.parametrize("name", ["HOTNEURON_SIMD", "HOTNEURON_OFFLINE", "HOTNEURON_DEADLINE_MS"])
def test_wrong_knob_is_named(name: str) -> None:
    assert_one_line_error(hotneuron("ls", **{name: "wrong"}), f"{name}='wrong'")


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = hotneuron("pull", HOTNEURON_CACHE=str(tmp_path / "file" / "cache"))
    assert_one_line_error(done, "HOTNEURON_CACHE")
    checked = hotneuron("doctor", "--json", HOTNEURON_CACHE=str(tmp_path / "file" / "cache"))
    answer = one_object(checked)
    failed = [check for check in answer["checks"] if check["status"] == "fail"]
    assert checked.returncode == 1 and not answer["ok"]
    assert [check["name"] for check in failed] == ["cache folder"] and failed[0]["remedy"]


def test_doctor_checks_every_part_of_the_machine(tmp_path: Path) -> None:
    done = hotneuron("doctor", "--json", HOTNEURON_CACHE=str(tmp_path / "new"))
    answer = one_object(done)
    status = {check["name"]: check["status"] for check in answer["checks"]}
    assert done.returncode == (0 if answer["ok"] else 1)
    assert {"python", "packages", "cpu", "cores", "memory", "shared memory", "cache folder", "models"} <= set(status)
    assert status["python"] == status["packages"] == status["cache folder"] == "ok" and status["models"] == "warn"


def test_ls(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"GGUF")
    answer = one_object(hotneuron("ls", "--json", HOTNEURON_CACHE=str(tmp_path)))
    rows = {row["name"]: row for row in answer["models"]}
    assert rows["mine"] == {
        "name": "mine",
        "path": str(tmp_path / "models" / "mine.gguf"),
        "size_bytes": 4,
        "fetched": True,
    }
    assert rows["smollm2-135m"]["fetched"] is False
    assert hotneuron("rm", "mine", HOTNEURON_CACHE=str(tmp_path)).returncode == 0
    assert not (tmp_path / "models" / "mine.gguf").exists()


def test_show(default_model_path: Path) -> None:
    facts = one_object(hotneuron("show", "-m", str(default_model_path), "--json"))
    assert facts["path"] == str(default_model_path) and facts["architecture"] == "llama"
    assert facts["layers"] == 30 and facts["context_tokens"] == 8192 and facts["chat_template"] is True
    assert facts["tokenizer"]["pre"] == "smollm" and next(iter(facts["types"])) == "Q4_1"
    assert facts["parameters"] == 134_515_008


def test_tokenize(default_model_path: Path, reference: dict[str, Any]) -> None:
    case = max((case for case in reference["tokenize"]), key=lambda case: len(case["text"].encode()))
    for text, ids in ((case["text"], case["ids"]), ("", [])):
        assert one_object(hotneuron("tokenize", "-m", str(default_model_path), "--json", text=text)) == {"ids": ids}


def test_no_special_makes_special_tokens_plain_text(default_model_path: Path) -> None:
    arguments = ("tokenize", "-m", str(default_model_path), "--json")
    assert one_object(hotneuron(*arguments, text="<|im_end|>"))["ids"] == [2]
    assert 2 not in one_object(hotneuron(*arguments, "--no-special", text="<|im_end|>"))["ids"]


def test_reader_that_leaves_sees_no_traceback(default_model_path: Path) -> None:
    command = [sys.executable, "-m", "hotneuron.deploy.cli", "tokenize", "-m", str(default_model_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write(b"a b c " * 20_000)
    process.stdin.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()
