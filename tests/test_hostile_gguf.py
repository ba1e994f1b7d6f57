"""Damaged and hostile files: each is refused with one line that names file and field, and costs no memory."""

import os
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType as V
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from hotneuron.models.errors import HotneuronError, ModelFileError, NotFoundError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.gguf_header import MAX_HEADER_BYTES
from hotneuron.models.model_config import ModelConfig

U32, U64 = partial(struct.pack, "<I"), partial(struct.pack, "<Q")
F32, Q4_0 = 0, 2


def text(value: bytes, size: int | None = None) -> bytes:
    return U64(len(value) if size is None else size) + value


def pair(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + U32(kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return U32(kind) + U64(count) + payload


def tensor(name: bytes = b"t", dims=(32,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(U64(d % 2**64) for d in dims) + U32(kind) + U64(offset)


def gguf(*pairs: bytes, tensors=(), magic=b"GGUF", version=3, n_tensors=None, n_kv=None, align=32, data=4096) -> bytes:
    n_tensors = len(tensors) if n_tensors is None else n_tensors % 2**64
    n_kv = len(pairs) if n_kv is None else n_kv % 2**64
    header = magic + U32(version) + U64(n_tensors) + U64(n_kv) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % align + data)


ALIGN = b"general.alignment"
HUGE = 0x7FFFFFFFFFFFFFC0
HOSTILE = {  # name: (file, field that the message names)
    "bad magic": (gguf(magic=b"GGML"), "magic"),
    "magic cut short": (b"GGU", "magic"),
    "version 0": (gguf(version=0), "version: 0"),
    "version 1": (gguf(version=1), "version: 1"),
    "future version": (gguf(version=4), "version: 4"),
    "big endian": (gguf(version=3 << 24), "big endian"),
    "n_tensors -1": (gguf(n_tensors=-1), "tensor count: -1"),
    "n_tensors huge": (gguf(n_tensors=2**40), "tensor count"),
    "n_kv -1": (gguf(n_kv=-1), "key count: -1"),
    "n_kv beyond the file": (gguf(n_kv=60000, data=0), "key 0"),
    "key size -1": (gguf(text(b"k", 2**64 - 1)), "key 0 length: -1"),
    "key too long": (gguf(text(b"k", 2**16)), "key 0 length: 65536"),
    "empty key": (gguf(pair(b"", V.UINT8, b"\1")), "key 0: is empty"),
    "key not UTF-8": (gguf(pair(b"\xff", V.UINT8, b"\1")), "key 0"),
    "bad value type": (gguf(pair(b"k", 13, U64(0))), "k value type: 13"),
    "value type -1": (gguf(pair(b"k", 2**32 - 1, U64(0))), "k value type"),
    "bad array item type": (gguf(pair(b"k", V.ARRAY, array(13, 1))), "k item type: 13"),
    "nested array": (gguf(pair(b"k", V.ARRAY, array(V.ARRAY, 1, array(V.UINT8, 1, b"\1")))), "nested"),
    "array length -1": (gguf(pair(b"k", V.ARRAY, array(V.UINT8, 2**64 - 1))), "k length: -1"),
    "array length huge": (gguf(pair(b"k", V.ARRAY, array(V.UINT8, 2**40))), "k length"),
    "numbers beyond the file": (gguf(pair(b"k", V.ARRAY, array(V.UINT64, 2**22))), "k: needs"),
    "strings beyond the file": (gguf(pair(b"k", V.ARRAY, array(V.STRING, 2**22))), "k: needs"),
    "string size -1 in array": (gguf(pair(b"k", V.ARRAY, array(V.STRING, 2, text(b"", 2**64 - 1)))), "k[0] length"),
    "string too long in array": (gguf(pair(b"k", V.ARRAY, array(V.STRING, 2, text(b"a") + text(b"", 9999)))), "k[1]"),
    "string not UTF-8 in array": (gguf(pair(b"k", V.ARRAY, array(V.STRING, 1, text(b"\xff")))), "k[0]"),
    "string beyond the file": (gguf(pair(b"k", V.STRING, text(b"", 2**20))), "k: needs"),
    "boolean 2": (gguf(pair(b"k", V.BOOL, b"\2")), "k"),
    "boolean 2 in array": (gguf(pair(b"k", V.ARRAY, array(V.BOOL, 2, b"\1\2"))), "k"),
    "duplicate key": (gguf(pair(b"k", V.UINT8, b"\1"), pair(b"k", V.UINT8, b"\1")), "k: the key occurs twice"),
    "alignment 0": (gguf(pair(ALIGN, V.UINT32, U32(0))), "general.alignment: 0"),
    "alignment 13": (gguf(pair(ALIGN, V.UINT32, U32(13))), "general.alignment: 13"),
    "alignment huge": (gguf(pair(ALIGN, V.UINT32, U32(2**31))), "general.alignment"),
    "alignment of wrong type": (gguf(pair(ALIGN, V.UINT64, U64(32))), "general.alignment: has value type"),
    "alignment is a list": (gguf(pair(ALIGN, V.ARRAY, array(V.UINT32, 1, U32(32)))), "general.alignment"),
    "name too long": (gguf(tensors=[tensor(b"n" * 65)]), "tensor 0 name length: 65"),
    "name empty": (gguf(tensors=[tensor(b"")]), "tensor 0 name"),
    "name with a line break": (gguf(tensors=[tensor(b"a\nb", kind=99)]), r"tensor 'a\nb' type: 99"),
    "n_dims too big": (gguf(tensors=[tensor(dims=(1,) * 5)]), "tensor t dimensions: 5"),
    "n_dims huge": (gguf(tensors=[text(b"t") + U32(2**32 - 1)]), "tensor t dimensions"),
    "negative shape": (gguf(tensors=[tensor(dims=(-1,))]), "tensor t shape[0]: -1"),
    "negative shape, second": (gguf(tensors=[tensor(dims=(32, -32))]), "tensor t shape[1]: -32"),
    "dimension too big": (gguf(tensors=[tensor(dims=(2**63 - 1, 2))]), "tensor t shape"),
    "product wraps to zero": (gguf(tensors=[tensor(dims=(2**32, 2**32))]), "tensor t shape"),
    "byte size too big": (gguf(tensors=[tensor(dims=(2**61, 2))]), "tensor t: its"),
    "row is not whole blocks": (gguf(tensors=[tensor(dims=(33,), kind=Q4_0)]), "tensor t shape: rows of 33"),
    "bad tensor type": (gguf(tensors=[tensor(kind=4)]), "tensor t type: 4"),
    "tensor type huge": (gguf(tensors=[tensor(kind=2**32 - 1)]), "tensor t type"),
    "bad offset": (gguf(tensors=[tensor(offset=32)]), "tensor t offset: 32"),
    "offset not aligned": (gguf(tensors=[tensor(), tensor(b"u", offset=129)]), "tensor u offset: 129"),
    "offset overlaps": (gguf(tensors=[tensor(), tensor(b"u", offset=0)]), "tensor u offset: 0"),
    "offset -1": (gguf(tensors=[tensor(offset=2**64 - 1)]), "tensor t offset"),
    "duplicate tensor name": (gguf(tensors=[tensor(), tensor(offset=128)]), "tensor t: the name occurs twice"),
    "inconsistent alignment": (
        gguf(pair(ALIGN, V.UINT32, U32(256)), tensors=[tensor(), tensor(b"u", offset=128)], align=256),
        "tensor u offset: 128; 256 is expected with an alignment of 256",
    ),
    "truncated data": (gguf(tensors=[tensor(dims=(1025,))]), "tensor t: its 4100 bytes"),
    "no data": (gguf(tensors=[tensor()], data=0), "tensor t: its 128 bytes"),
    "two tensors whose sum overflows": (
        gguf(tensors=[tensor(dims=(HUGE // 4,)), tensor(b"u", (HUGE // 4,), offset=HUGE)]),
        f"tensor t: its {HUGE} bytes",
    ),
    "split.count of wrong type": (gguf(pair(b"split.count", V.STRING, text(b"2"))), "split.count"),
    "split.count -1": (gguf(pair(b"split.count", V.INT32, U32(2**32 - 1))), "split.count: -1"),
    "split.count huge": (gguf(pair(b"split.count", V.UINT32, U32(2**31))), "split.count"),
    "split.no of wrong type": (gguf(pair(b"split.no", V.STRING, text(b"0"))), "split.no"),
    "a text file": (b"Once upon a time there was a model.\n" * 10, "magic: b'Once'"),
    "one byte": (b"G", "magic"),
    "an empty file": (b"", "file: is empty"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(tmp_path, case):
    data, field = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as error:
            GGUFFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert message.startswith(f"{path}: ") and field in message.removeprefix(f"{path}: ")
    assert message.isprintable() and len(message) < 400 + len(str(path))


def test_the_builder_makes_sound_files(tmp_path):
    """Else the table above could refuse its files for another reason than the one in their names."""
    path = tmp_path / "sound.gguf"
    tensors = [tensor(), tensor(b"z", (0, 3), offset=128), tensor(b"u", (32, 2), Q4_0, 128)]
    path.write_bytes(gguf(pair(b"k", V.BOOL, b"\1"), pair(ALIGN, V.UINT32, U32(32)), tensors=tensors))
    file = GGUFFile.open(path)
    assert file.metadata == {"k": True, "general.alignment": 32}
    assert [file.raw(name).size for name in "tzu"] == [128, 0, 36]


def test_every_truncation_of_a_header_is_refused(tmp_path):
    pairs = [pair(b"k", V.ARRAY, array(V.STRING, 2, text(b"a") + text(b"bc"))), pair(b"n", V.UINT64, U64(7))]
    data = gguf(*pairs, tensors=[tensor()], data=128)
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    GGUFFile.open(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)


def test_header_limit_is_not_the_file_size(tmp_path):
    """A file may be far larger than its header may be: a string in it must not be read into memory whole."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf(pair(b"k", V.STRING, text(b"", MAX_HEADER_BYTES - 8)), data=0))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    with pytest.raises(ModelFileError, match="limit"):
        GGUFFile.open(path)


def test_what_is_not_a_file(tmp_path):
    with pytest.raises(NotFoundError, match="no such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="file: is a folder"):
        GGUFFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="file: is not a regular file"):
        GGUFFile.open(tmp_path / "pipe.gguf")
    (tmp_path / "plain").write_text("")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile.open(tmp_path / "plain" / "below.gguf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("fuzz") / "fuzzed.gguf"
    write_tiny_model(path, hidden=32, n_heads=1, head_dim=32, ffn=32, n_layers=1)
    return path, path.read_bytes()


# Most bytes are data, where a flip does nothing: half of the flips go to the first 700 bytes, where the keys are.
flips = st.lists(
    st.tuples(st.one_of(st.integers(0, 700), st.integers(0, 11_000)), st.integers(0, 255)), min_size=1, max_size=6
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=flips, cut=st.none() | st.integers(0, 20_000), tail=st.none() | st.binary(max_size=64))
@example(flips=[(0, ord("G"))], cut=None, tail=None)
def test_flipped_and_cut_files_load_or_raise_typed_errors(sound, flips, cut, tail):
    path, data = sound
    damaged = bytearray(data)
    for position, byte in flips:
        damaged[position % len(damaged)] = byte
    if cut is not None:
        del damaged[cut:]
    damaged += tail or b""
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        file = GGUFFile.open(path)
        for name, info in file.tensors.items():
            assert file.raw(name).size == info.n_bytes
        ModelConfig.from_file(file)
    except HotneuronError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < (1 << 20) + 40 * len(data)


def test_the_fuzzed_file_is_sound(sound):
    path, data = sound
    path.write_bytes(data)
    assert ModelConfig.from_file(GGUFFile.open(path)).n_layers == 1
    assert len(data) > 11_000
