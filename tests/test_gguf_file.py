"""Sound files: what is written with gguf-py comes back, byte for byte."""

import math
import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from hotneuron.models.dequantize import dequantize
from hotneuron.models.errors import ModelFileError, NotFoundError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.tensor_table import SUPPORTED_TYPES

WIDE = {"hidden": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "ffn": 512}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.lists(texts, min_size=1, max_size=20),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300),
    st.lists(st.booleans(), min_size=1, max_size=20),
)


def write(path: Path, metadata: dict, tensors: dict[str, np.ndarray], **options) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama", **options)
    for key, value in metadata.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), values, max_size=6))
def test_metadata_come_back(tmp_path, metadata):
    path = write(tmp_path / "m.gguf", {f"x.{key}": value for key, value in metadata.items()}, {})
    metadata = {key: value for key, value in metadata.items() if value != ""}  # gguf-py leaves out empty texts
    found = GGUFFile.open(path).metadata
    assert found.pop("general.architecture") == "llama"
    assert set(found) == {f"x.{key}" for key in metadata}
    for key, value in metadata.items():
        same = found[f"x.{key}"]
        assert type(same) is type(value)
        assert same == value or (math.isnan(same) and math.isnan(value))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 255, 256, 257, 65536])
def test_strings_of_every_length_in_an_array(tmp_path, length):
    tokens = ["", "a", "é" * (length // 2) + "z" * (length % 2), "", "\0\0\0\0\0\0\0\0", "last"]
    assert GGUFFile.open(write(tmp_path / "m.gguf", {"t": tokens}, {})).metadata["t"] == tokens


@pytest.mark.parametrize("kind", [kind.name for kind in SUPPORTED_TYPES])
def test_every_tensor_type_against_gguf_py(tmp_path, kind):
    path = tmp_path / "m.gguf"
    weights = write_tiny_model(path, type=kind, **WIDE)
    file = GGUFFile.open(path)
    peer = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(file.tensors) == list(peer) == list(weights)
    for name, info in file.tensors.items():
        raw = file.raw(name)
        block_elements, block_bytes = GGML_QUANT_SIZES[info.type]
        assert info.shape == tuple(peer[name].shape.tolist())
        assert info.type == peer[name].tensor_type
        assert raw.dtype == np.uint8 and raw.shape == (info.n_bytes,)
        assert info.n_bytes == math.prod(info.shape) // block_elements * block_bytes
        np.testing.assert_array_equal(raw, peer[name].data.reshape(-1).view(np.uint8))
        np.testing.assert_array_equal(dequantize(raw, info.type, info.shape), weights[name])
    assert file.tensors["blk.0.ffn_down.weight"].type == GGMLQuantizationType[kind]


def test_raw_is_a_read_only_view(tmp_path):
    write_tiny_model(tmp_path / "m.gguf")
    raw = GGUFFile.open(tmp_path / "m.gguf").raw("output_norm.weight")
    assert not raw.flags.writeable and not raw.flags.owndata
    with pytest.raises(ValueError):
        raw[0] = 1
    assert raw.size == 96 * 4  # and the file, out of scope by now, is still mapped


def test_unknown_tensor_name(tmp_path):
    write_tiny_model(tmp_path / "m.gguf")
    with pytest.raises(NotFoundError, match=r"no tensor 'blk\.99'"):
        GGUFFile.open(tmp_path / "m.gguf").raw("blk.99")


def test_version_2_and_both_magics_read_alike(tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path)
    plain = GGUFFile.open(path)
    data = path.read_bytes()
    for magic, version in ((b"GGUF", 2), (b"PWRI", 2), (b"PWRI", 3)):
        other = tmp_path / f"{magic.decode()}{version}.gguf"
        other.write_bytes(magic + bytes([version]) + data[5:])
        file = GGUFFile.open(other)
        assert file.magic == magic.decode()
        assert file.metadata == plain.metadata and file.tensors == plain.tensors
    assert plain.magic == "GGUF"


def test_zero_sized_tensor_at_the_end_is_accepted(tmp_path):
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 0), np.float32)}
    file = GGUFFile.open(write(tmp_path / "m.gguf", {}, tensors))
    assert file.tensors["b"].shape == (0, 2)
    assert file.raw("b").size == 0


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path, alignment):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_custom_alignment(alignment)
    tensors = {f"t{n}": np.arange(n, dtype=np.float32) for n in (1, 3, 17, 40)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "m.gguf")
    for name, tensor in tensors.items():
        assert file.tensors[name].offset_bytes % alignment == 0
        np.testing.assert_array_equal(file.raw(name).view(np.float32), tensor)


def test_last_tensor_needs_no_padding(tmp_path):
    path = write(tmp_path / "m.gguf", {}, {"a": np.arange(3, dtype=np.float32)})
    end = GGUFFile.open(path).tensors["a"].offset_bytes + 12
    os.truncate(path, end)
    assert GGUFFile.open(path).raw("a").view(np.float32).tolist() == [0, 1, 2]
    os.truncate(path, end - 1)
    with pytest.raises(ModelFileError, match="truncated"):
        GGUFFile.open(path)


TENSORS = {f"t{n}": np.full((n + 1, 3), n, np.float32) for n in range(7)}


def split(folder: Path) -> list[Path]:
    write(folder / "model.gguf", {"x.y": 1}, TENSORS, split_max_tensors=3)
    parts = sorted(folder.glob("model-*.gguf"))
    assert len(parts) == 3
    return parts


def test_split_files_are_one_model(tmp_path):
    parts = split(tmp_path)
    file = GGUFFile.open(parts[0])
    assert file.paths == tuple(parts)
    assert list(file.tensors) == list(TENSORS)
    assert {info.part for info in file.tensors.values()} == {0, 1, 2}
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(file.raw(name).view(np.float32).reshape(tensor.shape), tensor)


def test_split_files_that_do_not_belong_together(tmp_path):
    parts = split(tmp_path)
    with pytest.raises(ModelFileError, match=r"part 00002 of 3; open model-00001-of-00003\.gguf"):
        GGUFFile.open(parts[1])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"split\.count: .*must be named"):
        GGUFFile.open(renamed)
    renamed.rename(parts[0])
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf: split\.no"):
        GGUFFile.open(parts[0])
    parts[1].unlink()
    with pytest.raises(NotFoundError, match=r"1 of 3 parts are missing, first model-00002-of-00003\.gguf"):
        GGUFFile.open(parts[0])
    parts[1].write_bytes(second.replace(b"t4", b"t2"))
    with pytest.raises(ModelFileError, match=r"tensor t2: is also in .*00001"):
        GGUFFile.open(parts[0])


def test_split_tensor_count_is_checked(tmp_path):
    parts = split(tmp_path)
    data = parts[0].read_bytes()
    at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    parts[0].write_bytes(data[:at] + bytes([9]) + data[at + 1 :])
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count: 9, but the parts hold 7"):
        GGUFFile.open(parts[0])


def test_sha_key_follows_size_time_and_header(tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path)
    key = GGUFFile.open(path).sha_key()
    assert key == GGUFFile.open(path).sha_key() and len(key) == 64
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert GGUFFile.open(path).sha_key() != key
    data = path.read_bytes().replace(b"tiny", b"tidy")
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert GGUFFile.open(path).sha_key() != key


def test_a_large_vocabulary_opens_quickly(tmp_path):
    tokens = [f"Ġtoken{n}" for n in range(50_000)]
    path = write(tmp_path / "m.gguf", {"tokens": tokens, "merges": [f"{t[:3]} {t[3:]}" for t in tokens]}, {})
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        file = GGUFFile.open(path)
        seconds.append(time.perf_counter() - start)
    assert file.metadata["tokens"] == tokens
    assert min(seconds) < 1.0  # 0.05 on an idle machine; a quadratic reader would take minutes
