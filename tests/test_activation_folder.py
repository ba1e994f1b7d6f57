"""PowerInfer's folder of activation counts. The files are torch's, so most of these tests need torch."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotneuron.models.errors import HotneuronError, ModelFileError, NotFoundError, UnsupportedError
from hotneuron.placement.activation_folder import load_activation_folder

LAYERS, FFN = 12, 40


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def filled(torch, folder: Path, n_layers: int = LAYERS) -> np.ndarray:
    """Writes a folder as a profiler does; returns its counts."""
    folder.mkdir(exist_ok=True)
    counts = np.random.default_rng(0).integers(0, 1 << 30, (n_layers, FFN))
    for layer, row in enumerate(counts):
        torch.save(torch.from_numpy(row), folder / f"activation_{layer}.pt")
    return counts


def refused(folder: Path, problem: str, n_layers: int = 1) -> None:
    with pytest.raises(ModelFileError) as error:
        load_activation_folder(folder, n_layers, FFN)
    message = str(error.value)
    assert str(folder / "activation_0.pt") in message and problem in message and "\n" not in message


def test_issue_247_file_names_sorted_as_texts_mix_up_the_layers(torch, tmp_path):
    counts = filled(torch, tmp_path)
    found = load_activation_folder(tmp_path, LAYERS, FFN)
    assert found.dtype == np.float64 and found.shape == (LAYERS, FFN)
    assert np.array_equal(found, counts)
    as_texts = sorted(range(LAYERS), key=lambda layer: f"activation_{layer}.pt")
    assert as_texts[2] == 10 and not np.array_equal(found, counts[as_texts])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_every_kind_of_number(torch, tmp_path, dtype):
    tensor = (torch.arange(FFN) % 7).to(getattr(torch, dtype))
    torch.save(tensor, tmp_path / "activation_0.pt")
    assert np.array_equal(load_activation_folder(tmp_path, 1, FFN)[0], tensor.to(torch.float64).numpy())


def test_views_and_parameters_are_tensors_too(torch, tmp_path):
    every_other = torch.arange(2 * FFN)[::2]
    torch.save(every_other, tmp_path / "activation_0.pt")
    torch.save(torch.nn.Parameter(torch.ones(FFN)), tmp_path / "activation_1.pt")
    found = load_activation_folder(tmp_path, 2, FFN)
    assert np.array_equal(found[0], 2 * np.arange(FFN)) and np.array_equal(found[1], np.ones(FFN))


class Program:
    def __reduce__(self):
        return os.mkdir, ("made by the file",)


def test_a_file_with_a_program_is_refused_and_does_not_run(torch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Program(), tmp_path / "activation_0.pt")
    refused(tmp_path, "holds more than numbers, or is damaged")
    assert not (tmp_path / "made by the file").exists()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda torch: torch.ones(FFN - 1), "has shape (39,); (40,) is expected"),
        (lambda torch: torch.ones(FFN, 1), "has shape (40, 1); (40,) is expected"),
        (lambda torch: torch.tensor(1.0), "has shape (); (40,) is expected"),
        (lambda torch: {"counts": torch.ones(FFN)}, "is a dict; one tensor of 40 counts is expected"),
        (lambda torch: torch.ones(FFN).to_sparse(), "torch.sparse_coo"),
        (lambda torch: torch.ones(FFN, device="meta"), "on meta"),
        (lambda torch: torch.ones(FFN, dtype=torch.complex64), "is torch.complex64"),
        (lambda torch: torch.arange(FFN) - 1, "neuron 0 has -1.0; a finite count >= 0 is expected"),
        (lambda torch: torch.ones(FFN) / torch.arange(FFN), "neuron 0 has inf"),
        (lambda torch: torch.ones(FFN) * torch.nan, "neuron 0 has nan"),
    ],
)
def test_what_is_not_a_row_of_counts_is_refused(torch, tmp_path, make, problem):
    torch.save(make(torch), tmp_path / "activation_0.pt")
    refused(tmp_path, problem)


def test_a_row_saved_with_its_whole_matrix_is_too_large(torch, tmp_path):
    """torch.save keeps all that a view looks into. The limit stands before anything is read."""
    matrix = torch.zeros(1 << 12, FFN, dtype=torch.float64)
    torch.save(matrix[0], tmp_path / "activation_0.pt")
    refused(tmp_path, f"a tensor of {FFN} activation counts has at most {8 * FFN + (1 << 20)}")
    torch.save(matrix[0].clone(), tmp_path / "activation_0.pt")
    assert not load_activation_folder(tmp_path, 1, FFN).any()


def rewritten(path: Path, compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, replaced.get(entry.filename.rpartition("/")[2], old.read(entry)))
    path.write_bytes(out.getvalue())


def test_archives_that_torch_save_does_not_write_are_refused(torch, tmp_path):
    path = tmp_path / "activation_0.pt"
    filled(torch, tmp_path, 1)
    rewritten(path)
    assert load_activation_folder(tmp_path, 1, FFN).any()
    rewritten(path, zipfile.ZIP_DEFLATED)
    refused(tmp_path, "archive: is compressed")
    torch.save(torch.ones(FFN), path, _use_new_zipfile_serialization=False)
    refused(tmp_path, "archive: is damaged, or older than torch 1.6")
    path.write_bytes(b"")
    refused(tmp_path, "archive: is damaged")


def test_a_claim_beyond_what_is_stored_is_refused(torch, tmp_path, monkeypatch):
    path = tmp_path / "activation_0.pt"
    filled(torch, tmp_path, 1)
    rewritten(path, **{"0": bytes(16)})
    refused(tmp_path, "tensor: ")
    monkeypatch.setattr(torch, "load", lambda *args, **options: torch.ones(FFN))  # as a torch that does not look
    refused(tmp_path, "claims 160 bytes where 16 are stored")


def test_missing_and_superfluous_layers_are_named_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotFoundError, match=r"no such folder; one with activation_0.pt to activation_11.pt"):
        load_activation_folder(tmp_path / "absent", LAYERS, FFN)
    for layer in (0, 1, 3, 11):
        (tmp_path / f"activation_{layer}.pt").touch()
    with pytest.raises(NotFoundError, match=r"8 of 12 layers are missing, first activation_2.pt"):
        load_activation_folder(tmp_path, LAYERS, FFN)
    (tmp_path / "activation_2.pt").touch()
    with pytest.raises(ModelFileError, match=r"activation_2.pt: is of another model; this one has .* activation_1.pt"):
        load_activation_folder(tmp_path, 2, FFN)


def test_without_torch_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "activation_0.pt").touch()
    with pytest.raises(UnsupportedError, match=r"pip install 'hotneuron\[train\]'"):
        load_activation_folder(tmp_path, 1, FFN)


def test_a_folder_in_place_of_a_file_is_refused(torch, tmp_path):
    (tmp_path / "activation_0.pt").mkdir()
    refused(tmp_path, "is not a regular file; a tensor of 40 activation counts is expected")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=5),
    cut=st.none() | st.integers(0, 3000),
    tail=st.binary(max_size=40),
)
@example(flips=[], cut=None, tail=b"")
def test_damaged_files_load_or_raise_typed_errors(torch, tmp_path, flips, cut, tail):
    sound, damaged_folder = tmp_path / "sound", tmp_path / "damaged"
    if not sound.exists():
        filled(torch, sound, 1)
        damaged_folder.mkdir()
    data = (sound / "activation_0.pt").read_bytes()
    damaged = bytearray(data)
    for position, byte in flips:
        damaged[position % len(damaged)] = byte
    if cut is not None:
        del damaged[cut:]
    damaged += tail
    (damaged_folder / "activation_0.pt").write_bytes(damaged)
    try:
        found = load_activation_folder(damaged_folder, 1, FFN)
        assert found.shape == (1, FFN) and (found >= 0).all()
    except HotneuronError as error:
        assert str(damaged_folder) in str(error) and "\n" not in str(error)
        assert damaged != data
