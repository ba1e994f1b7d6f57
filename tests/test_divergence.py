"""KL divergence between two runs, and the files that arrays are kept in."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotneuron.deploy.divergence import Base, Comparison
from hotneuron.models.arrays_file import load_arrays, save_arrays
from hotneuron.models.errors import ModelFileError, NotFoundError, StorageError


def logprobs(rng: np.random.Generator, tokens: int, vocab: int) -> np.ndarray:
    logits = rng.normal(size=(tokens, vocab)) * 3
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def test_divergence_is_the_definition_s() -> None:
    rng = np.random.default_rng(0)
    p, q, targets = logprobs(rng, 150, 40), logprobs(rng, 150, 40), rng.integers(0, 40, 150)
    comparison = Comparison()
    for part in (slice(0, 100), slice(100, 150)):
        comparison.add(p[part], q[part], targets[part])
    found = comparison.result()
    kl = [sum(np.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert found.kld_mean == pytest.approx(np.mean(kl), rel=1e-5) and found.kld_max == pytest.approx(max(kl), rel=1e-5)
    assert found.kld_error == pytest.approx(np.std(kl, ddof=1) / 150**0.5, rel=1e-4)
    assert found.same_top == np.mean([x.argmax() == y.argmax() for x, y in zip(p, q, strict=True)])
    wanted = [np.exp(-np.mean([row[t] for row, t in zip(a, targets, strict=True)])) for a in (p, q)]
    assert (found.base_ppl, found.ppl) == pytest.approx(wanted, rel=1e-5) and found.tokens == 150


def test_a_run_does_not_diverge_from_itself() -> None:
    rng = np.random.default_rng(1)
    p = logprobs(rng, 70, 30)
    comparison = Comparison()
    comparison.add(p, p, rng.integers(0, 30, 70))
    found = comparison.result()
    assert (found.kld_mean, found.kld_max, found.same_top) == (0, 0, 1) and found.ppl == found.base_ppl


def base(tmp_path: Path) -> tuple[Base, Path]:
    rng = np.random.default_rng(2)
    kept = Base(rng.integers(0, 30, (2, 9)).astype(np.int32), np.stack([logprobs(rng, 4, 30) for _ in range(2)]))
    kept.save(tmp_path / "base.npz")
    return kept, tmp_path / "base.npz"


def test_a_base_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept, path = base(tmp_path)
    found = Base.load(path)
    assert (found.chunks == kept.chunks).all() and (found.logprobs == kept.logprobs).all()
    assert [p.name for p in tmp_path.iterdir()] == ["base.npz"]


@pytest.mark.parametrize(
    ("chunks", "logprobs", "field"),
    [
        (np.zeros((2, 9), np.int32), np.zeros((2, 5, 30), np.float32), "logprobs"),
        (np.zeros((2, 9), np.int32), np.zeros((3, 4, 30), np.float32), "logprobs"),
        (np.full((2, 9), 30, np.int32), np.zeros((2, 4, 30), np.float32), "chunks"),
        (np.zeros((0, 9), np.int32), np.zeros((0, 4, 30), np.float32), "logprobs"),
        (np.zeros((2, 9), np.int64), np.zeros((2, 4, 30), np.float32), "chunks"),
    ],
)
def test_a_base_that_disagrees_with_itself(
    tmp_path: Path, chunks: np.ndarray, logprobs: np.ndarray, field: str
) -> None:
    save_arrays(tmp_path / "b.npz", {"chunks": chunks, "logprobs": logprobs})
    with pytest.raises(ModelFileError, match=rf"b\.npz: {field}: "):
        Base.load(tmp_path / "b.npz")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    """Never another exception, and never more memory than the file has bytes."""
    _, path = base(tmp_path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        Base.load(damaged)
    except ModelFileError as error:
        assert "damaged.npz" in str(error) and "\n" not in str(error)


def test_a_header_that_claims_too_much_allocates_nothing(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4096), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "big.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(ModelFileError, match="claims 18014398509481984 bytes"):
        load_arrays(tmp_path / "big.npz", {"a": ("<f4", 2)})


def test_pickles_and_compression_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", a=np.array([{}, []], dtype=object))
    np.savez_compressed(tmp_path / "c.npz", a=np.zeros(10, np.float32))
    for name in ("o.npz", "c.npz"):
        with pytest.raises(ModelFileError, match="a: "):
            load_arrays(tmp_path / name, {"a": ("<f4", 1)})


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="No such file"):
        load_arrays(tmp_path / "none.npz", {})
    (tmp_path / "file").write_text("text")
    with pytest.raises(ModelFileError, match=r"not a \.npz"):
        load_arrays(tmp_path / "file", {})
    with pytest.raises(StorageError, match="cannot be written"):
        save_arrays(tmp_path / "file" / "x.npz", {"a": np.zeros(3)})
