"""PowerInfer's GPU index: written and read as its exporter does, every other file refused by field."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotneuron.models.errors import HotneuronError, ModelFileError, NotFoundError, StorageError
from hotneuron.placement.gpu_index import GPUIndex, default_path

LAYERS, FFN = 3, 40
HOT = ([0, 7, 39], [], list(range(FFN)))  # one bucket is empty, one is full
BUCKET_0 = b"blk.0.gpu_bucket"


def index(hot=HOT, capacity_bytes: int = 5 << 32) -> GPUIndex:
    return GPUIndex(capacity_bytes, tuple(np.array(one, np.int64) for one in hot))


def exported(path: Path, hot=HOT, architecture="generic.gpu_index", block_count=LAYERS, capacity_bytes=5 << 32) -> Path:
    """By gguf-py, with PowerInfer's calls in their order, and the type number that its gguf-py had for I32."""
    writer = gguf.GGUFWriter(path, architecture)
    names = []
    for layer, ids in enumerate(hot):
        is_hot = np.zeros(FFN, np.int32)
        is_hot[ids] = 1
        for name, tensor in (("gpu_idx", is_hot), ("gpu_bucket", np.array(ids, np.int32))):
            names.append(f"blk.{layer}.{name}".encode())
            writer.add_tensor(names[-1].decode(), tensor, raw_dtype=gguf.GGMLQuantizationType.I32)
    writer.add_block_count(block_count)
    writer.add_uint64("split.vram_capacity", capacity_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    data[:8] = b"PWRI" + struct.pack("<I", 3)
    for name in names:
        put(data, name, 12, struct.pack("<I", 18))
    path.write_bytes(data)
    return path


def put(data: bytearray, name: bytes, after: int, value: bytes) -> bytearray:
    """Sets bytes of a tensor's entry, so far after its name: 0 dimensions, 4 length, 12 type, 16 offset."""
    at = data.index(name) + len(name) + after
    data[at : at + len(value)] = value
    return data


def test_an_exported_file_is_read(tmp_path):
    found = GPUIndex.load(exported(tmp_path / "m.gpuidx"), LAYERS, FFN)
    assert found.vram_capacity_bytes == 5 << 32
    assert [ids.tolist() for ids in found.hot] == list(HOT)
    assert all(ids.dtype == np.int64 for ids in found.hot)


def test_save_writes_what_the_exporter_writes(tmp_path):
    index().save(tmp_path / "ours.gpuidx", FFN)
    assert (tmp_path / "ours.gpuidx").read_bytes() == exported(tmp_path / "theirs.gpuidx").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.gpuidx", "theirs.gpuidx"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ffn=st.integers(1, 90), data=st.data())
def test_an_index_comes_back(tmp_path, ffn, data):
    ids = st.sets(st.integers(0, ffn - 1)).map(sorted)
    hot = data.draw(st.lists(ids, min_size=1, max_size=5))
    capacity_bytes = data.draw(st.integers(0, 2**64 - 1))
    index(hot, capacity_bytes).save(tmp_path / "m.gpuidx", ffn)
    found = GPUIndex.load(tmp_path / "m.gpuidx", len(hot), ffn)
    assert (found.vram_capacity_bytes, [one.tolist() for one in found.hot]) == (capacity_bytes, hot)


def test_twelve_layers_stay_in_the_order_of_their_numbers(tmp_path):
    hot = [[layer, FFN - 1] for layer in range(12)]
    index(hot).save(tmp_path / "m.gpuidx", FFN)
    assert [one.tolist() for one in GPUIndex.load(tmp_path / "m.gpuidx", 12, FFN).hot] == hot


def test_i32_has_the_number_of_2023(tmp_path):
    """gguf-py takes 18 for IQ3_XXS today, and writes 26 for I32, which PowerInfer's loader does not know."""
    index().save(tmp_path / "m.gpuidx", FFN)
    data = (tmp_path / "m.gpuidx").read_bytes()
    assert struct.unpack_from("<IQI", data, data.index(BUCKET_0) + len(BUCKET_0)) == (1, len(HOT[0]), 18)


def test_the_path_beside_a_model():
    assert default_path(Path("a/m.q4.powerinfer.gguf")) == Path("a/m.q4.powerinfer.gguf.generated.gpuidx")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        index().save(tmp_path / "folder", FFN)
    with pytest.raises(StorageError, match="No such file"):
        index().save(tmp_path / "absent" / "m.gpuidx", FFN)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


EMPTY_1 = b"blk.1.gpu_bucket"
BLOCK_COUNT = b"generic.gpu_index.block_count"
DAMAGED = {  # name: (change of the bytes, field, what the message says)
    "GGUF": (lambda d: d.__setitem__(slice(0, 4), b"GGUF"), "magic", "b'GGUF' is there, b'PWRI' is expected"),
    "version": (lambda d: d.__setitem__(4, 2), "version", "2 is there, 3 is expected"),
    "tensors": (lambda d: d.__setitem__(8, 5), "tensor count", "5 is there, 6 is expected"),
    "keys": (lambda d: d.__setitem__(16, 4), "key count", "4 is there, 3 is expected"),
    "key": (lambda d: put(d, b"split.vram_capac", 0, b"itx"), "key 2", "b'split.vram_capacitx' is there"),
    "key type": (lambda d: put(d, BLOCK_COUNT, 0, b"\5"), f"{BLOCK_COUNT.decode()} value type", "5 is there, 4"),
    "blocks": (lambda d: put(d, BLOCK_COUNT, 4, b"\2"), BLOCK_COUNT.decode(), "2 is there, 3 is expected"),
    "name": (lambda d: put(d, b"blk.0.gpu_", 0, b"ids"), "tensor 0 name", "b'blk.0.gpu_ids' is there"),
    "dimensions": (lambda d: put(d, BUCKET_0, 0, b"\2"), "blk.0.gpu_bucket dimensions", "2 is there, 1 is expected"),
    "length": (lambda d: put(d, b"blk.2.gpu_idx", 4, b"\51"), "blk.2.gpu_idx length", "41 is there, 40 is expected"),
    "bucket": (lambda d: put(d, BUCKET_0, 4, b"\51"), "blk.0.gpu_bucket length", "at most 40 is expected"),
    "huge": (lambda d: put(d, BUCKET_0, 4, b"\xff" * 8), "blk.0.gpu_bucket length", f"{2**64 - 1} is there"),
    "type": (lambda d: put(d, BUCKET_0, 12, b"\32"), "blk.0.gpu_bucket type", "26 is there, 18 is expected"),
    "offset": (lambda d: put(d, BUCKET_0, 16, b"\0"), "blk.0.gpu_bucket offset", "0 is there, 160 is expected"),
    "header cut": (lambda d: d.__delitem__(slice(100, None)), "key 1", "the file ends here, after 100 bytes"),
    "data cut": (lambda d: d.__delitem__(slice(-1, None)), "blk.2.gpu_bucket", "is truncated"),
    "one too few": (lambda d: put(d, BUCKET_0, 4, b"\2"), "blk.0.gpu_bucket", "the 3 neurons that are 1 in"),
    "one in an empty bucket": (lambda d: put(d, EMPTY_1, 4, b"\1"), "blk.2.gpu_idx offset", "352 is there, 384"),
    "flag": (lambda d: d.__setitem__(len(d) - 3 * 160, 2), "blk.1.gpu_idx", "neuron 0 is 2; 0 (CPU) or 1 (GPU)"),
    "flag -1": (lambda d: d.__setitem__(slice(-320, -316), b"\xff" * 4), "blk.2.gpu_idx", "neuron 0 is -1"),
    "id": (lambda d: d.__setitem__(len(d) - 4, 38), "blk.2.gpu_bucket", "ids that differ"),
    "id beyond": (lambda d: d.__setitem__(len(d) - 1, 0x7F), "blk.2.gpu_bucket", "ids that differ"),
    "too large": (lambda d: d.extend(bytes(400)), "file", "has at most"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_other_files_are_refused(tmp_path, case):
    change, field, problem = DAMAGED[case]
    path = exported(tmp_path / "m.gpuidx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as error:
        GPUIndex.load(path, LAYERS, FFN)
    message = str(error.value)
    assert message.startswith(f"{path}: {field}: ") and problem in message and "\n" not in message


def test_an_unsorted_bucket_is_refused(tmp_path):
    path = exported(tmp_path / "m.gpuidx")
    data = path.read_bytes()
    ids = struct.pack("<3i", *HOT[0])
    assert data.count(ids) == 1
    path.write_bytes(data.replace(ids, struct.pack("<3i", 7, 0, 39)))
    with pytest.raises(ModelFileError, match=r"gpu_bucket: 3 ids that differ; the 3 neurons .* ascending"):
        GPUIndex.load(path, LAYERS, FFN)


def test_another_model_s_index_is_refused(tmp_path):
    path = exported(tmp_path / "m.gpuidx")
    with pytest.raises(ModelFileError, match=r"tensor count: 6 is there, 8 is expected in a GPU index of 4 layers"):
        GPUIndex.load(path, 4, FFN)
    with pytest.raises(ModelFileError, match=r"blk.0.gpu_idx length: 40 is there, 41 is expected"):
        GPUIndex.load(path, LAYERS, FFN + 1)
    exported(path, architecture="moe.gpu_idx")
    with pytest.raises(ModelFileError, match=r"general.architecture: b'moe.gpu_idx' is there, b'generic.gpu_index'"):
        GPUIndex.load(path, LAYERS, FFN)


def test_what_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no such file"):
        GPUIndex.load(tmp_path / "absent", LAYERS, FFN)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ModelFileError, match="is not a regular file; a GPU index of 3 layers"):
            GPUIndex.load(path, LAYERS, FFN)
    (tmp_path / "plain").write_text("")
    with pytest.raises(ModelFileError, match="magic: the file ends here, after 0 bytes"):
        GPUIndex.load(tmp_path / "plain", LAYERS, FFN)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GPUIndex.load(tmp_path / "plain" / "below", LAYERS, FFN)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=5),
    cut=st.none() | st.integers(0, 1500),
    tail=st.binary(max_size=40),
)
@example(flips=[], cut=None, tail=b"")
def test_damaged_files_load_or_raise_typed_errors(tmp_path, flips, cut, tail):
    path = tmp_path / "m.gpuidx"
    if not path.exists():
        index().save(path, FFN)
    sound = path.read_bytes()
    damaged = bytearray(sound)
    for position, byte in flips:
        damaged[position % len(damaged)] = byte
    if cut is not None:
        del damaged[cut:]
    damaged += tail
    other = tmp_path / "damaged.gpuidx"
    other.write_bytes(damaged)
    try:
        found = GPUIndex.load(other, LAYERS, FFN)
        found.save(other, FFN)
        assert [one.tolist() for one in GPUIndex.load(other, LAYERS, FFN).hot] == [one.tolist() for one in found.hot]
    except HotneuronError as error:
        assert str(other) in str(error) and "\n" not in str(error)
        assert damaged != sound
