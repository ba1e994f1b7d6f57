"""The vector operations, each against NumPy to the bit, on the instruction path in use."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from hotneuron.kernels.jit import njit

import numba  # isort: skip
from hotneuron.kernels import cpu, matmul, simd, tokens  # isort: skip
from hotneuron.kernels.llvm import MAGIC, MAGIC_BITS  # isort: skip
from kernel_arrays import aligned

PATH = cpu.path()


@njit
def halves_to_floats(source, n, to):
    for i in range(n // 16):
        simd.store_f32(to + 64 * i, simd.load_f16(source + 32 * i))


@njit
def floats_to_halves(source, n, to):
    for i in range(n // 16):
        simd.store_f16(to + 32 * i, simd.load_f32(source + 64 * i))


@njit
def bfloats_to_floats(source, n, to):
    for i in range(n // 16):
        simd.store_f32(to + 64 * i, simd.load_bf16(source + 32 * i))


@njit
def each_unary(source, to):
    x = simd.load_f32(source)
    simd.store_f32(to, simd.rounded(x))
    simd.store_f32(to + 64, simd.absolute(x))
    simd.store_f32(to + 128, simd.two_to_the(simd.rounded(x)))
    return simd.sum_lanes(x), simd.max_lanes(x)


@njit
def each_binary(a, b, c, to):
    x, y, z = simd.load_f32(a), simd.load_f32(b), simd.load_f32(c)
    simd.store_f32(to, simd.add(x, y))
    simd.store_f32(to + 64, simd.sub(x, y))
    simd.store_f32(to + 128, simd.mul(x, y))
    simd.store_f32(to + 192, simd.div(x, y))
    simd.store_f32(to + 256, simd.maximum(x, y))
    simd.store_f32(to + 320, simd.minimum(x, y))
    simd.store_f32(to + 384, simd.fma(x, y, z))


@njit
def kept_and_dropped(a, n, to):
    simd.store_f32(to, simd.keep_first(simd.load_f32(a), n))
    simd.store_f32(to + 64, simd.drop_first(simd.load_f32(a), n))


@njit
def dots(start, u8, s8, to):
    """Four tokens: start + dot products."""
    acc = tokens.dot_each(tokens.splats_i32(4, start), simd.load_u8(u8), s8)
    tokens.store_each(to, 64, acc)
    small = tokens.dot_each_small(tokens.splats_i32(4, start), simd.low_nibbles(simd.load_u8(u8)), s8)
    small = tokens.dot_each_small(small, simd.high_nibbles(simd.load_u8(u8)), s8)
    tokens.store_each(to + 256, 64, small)


@njit
def dots_of_seven_bits(start, u8, s8, to):
    total = tokens.dot_each_small(tokens.splats_i32(4, start), simd.load_u8(u8), s8)
    tokens.store_each(to, 64, total)


@njit
def quads(source, to):
    return simd.store_quads(to, 12, simd.load_f32(source))


def floats(n):
    return aligned(4 * n).view(np.float32)


def test_every_half_goes_there_and_back():
    halves = aligned(2 << 16).view(np.uint16)
    halves[:] = np.arange(1 << 16)
    out = floats(1 << 16)
    halves_to_floats(halves.ctypes.data, 1 << 16, out.ctypes.data)
    finite = (halves & 0x7C00) != 0x7C00
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    back = aligned(2 << 16).view(np.uint16)
    floats_to_halves(out.ctypes.data, 1 << 16, back.ctypes.data)
    np.testing.assert_array_equal(back[finite], halves[finite])


def test_floats_round_to_halves_as_numpy_does():
    rng = np.random.default_rng(1)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)  # exact ties, and their neighbours on both sides
    random = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    special = np.array([0, -0.0, 65504, 65519, 65520, 1e38, -1e38, np.inf, -np.inf, 1e-45, -1e-40, 2**-25, 2**-24])
    neighbours = [np.nextafter(middles, np.float32(to)) for to in (0, 1e9)]
    x = np.concatenate([middles, *neighbours, -middles, random[~np.isnan(random)], special.astype(np.float32)])
    x = np.pad(x, (0, -len(x) % 16))
    source, out = floats(len(x)), aligned(2 * len(x)).view(np.uint16)
    source[:] = x
    floats_to_halves(source.ctypes.data, len(x), out.ctypes.data)
    np.testing.assert_array_equal(out, np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16))


def test_bfloats():
    bits = aligned(2 << 16).view(np.uint16)
    bits[:] = np.arange(1 << 16)
    out = floats(1 << 16)
    bfloats_to_floats(bits.ctypes.data, 1 << 16, out.ctypes.data)
    np.testing.assert_array_equal(out.view(np.uint32), bits.astype(np.uint32) << 16)


def folded(x, op):
    """Sixteen lanes to one in the documented order."""
    while len(x) > 1:
        x = op(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


@pytest.mark.parametrize("seed", range(20))
def test_unary(seed):
    rng = np.random.default_rng(seed)
    x, out = floats(16), floats(48)
    x[:] = rng.uniform(-126, 127, 16)
    x[::4] = np.rint(x[::4]) // 2 + 0.5  # ties
    total, largest = each_unary(x.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out[:16], np.rint(x))
    np.testing.assert_array_equal(out[16:32], np.abs(x))
    np.testing.assert_array_equal(out[32:], np.exp2(np.rint(x).astype(np.float64)).astype(np.float32))
    assert total == folded(x, np.add)
    assert largest == x.max()


@pytest.mark.parametrize("seed", range(20))
def test_binary(seed):
    rng = np.random.default_rng(seed)
    x, y, z, out = (floats(n) for n in (16, 16, 16, 112))
    for a in (x, y, z):
        a[:] = rng.standard_normal(16) * 10.0 ** rng.integers(-3, 4)
    each_binary(x.ctypes.data, y.ctypes.data, z.ctypes.data, out.ctypes.data)
    for k, op in enumerate((np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum)):
        np.testing.assert_array_equal(out[16 * k : 16 * k + 16], op(x, y))
    # The product of two floats is exact in a double, and a double's sum rounds twice only in one of 2^29.
    np.testing.assert_array_equal(out[96:], (x.astype(np.float64) * y + z).astype(np.float32))


@pytest.mark.parametrize("n", range(17))
def test_lanes_kept_and_dropped(n):
    x, out = floats(16), floats(32)
    x[:] = np.arange(16) - 7.5
    kept_and_dropped(x.ctypes.data, n, out.ctypes.data)
    lane = np.arange(16)
    np.testing.assert_array_equal(out[:16], np.where(lane < n, x, -np.inf))
    np.testing.assert_array_equal(out[16:], np.where(lane < n, -np.inf, x))


@njit
def scaled_sums(start, scale, out):
    by_row = simd.load_f16(scale)
    minus_magic = simd.mul(by_row, simd.splat(np.float32(-MAGIC)))
    tokens.store_each(out, 64, tokens.scale_each(tokens.splats_i32(4, start), by_row, minus_magic))


def test_sums_that_began_at_magic_are_scaled_with_one_rounding():
    """Every product of a sum below 2^21 in magnitude and a half, however small, is the nearest float."""
    rng = np.random.default_rng(2)
    start, out = aligned(16).view(np.int32), floats(64)
    for scale in (rng.standard_normal(16) * 0.01, rng.standard_normal(16) * 1e-6, np.full(16, 65504.0), np.zeros(16)):
        halves = aligned(32).view(np.float16)
        halves[:] = scale
        sums = np.array([0, -(2**21), 2**21 - 1, rng.integers(-(2**21), 2**21)])
        start[:] = MAGIC_BITS + sums
        scaled_sums(start.ctypes.data, halves.ctypes.data, out.ctypes.data)
        expected = (sums[:, None] * halves.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(out.reshape(4, 16), expected)


def dot_cases():
    rng = np.random.default_rng(1)
    for u, s in [(255, -127), (255, -128), (255, 127), (127, -128), (127, 127), (0, -128), (128, 127)]:
        yield np.full(64, u), np.full((4, 4), s)
    for _ in range(30):
        yield rng.integers(0, 256, 64), rng.integers(-128, 128, (4, 4))
        yield rng.choice([0, 1, 127, 128, 254, 255], 64), rng.choice([-128, -127, -1, 0, 1, 127], (4, 4))


def test_integer_dot_products_are_exact():
    u8, s8 = aligned(64), aligned(16).view(np.int8)
    start, out = aligned(16).view(np.int32), aligned(512).view(np.int32)
    start[:] = [0, 1000, -77777, 12]
    for u, s in dot_cases():
        u8[:], s8[:] = u, s.reshape(-1)
        addresses = (start.ctypes.data, u8.ctypes.data, s8.ctypes.data, out.ctypes.data)

        def expected(u, s=s):
            return start[:, None] + s @ u.reshape(16, 4).T

        dots(*addresses)
        np.testing.assert_array_equal(out[:64].reshape(4, 16), expected(u))
        nibbles = expected(u & 15) + expected(u >> 4) - start[:, None]
        np.testing.assert_array_equal(out[64:].reshape(4, 16), nibbles)
        u8[:] &= 127
        dots_of_seven_bits(*addresses)
        np.testing.assert_array_equal(out[:64].reshape(4, 16), expected(u & 127))


@pytest.mark.parametrize("seed", range(10))
def test_quads(seed):
    rng = np.random.default_rng(seed)
    x, out = floats(16), aligned(48, fill=0x55).view(np.int8)
    x[:] = rng.uniform(-127, 127, 16)
    x[:4] = [127, -127, 0.5, 1.5]
    expected = np.rint(x).astype(np.int8)
    assert quads(x.ctypes.data, out.ctypes.data) == expected.sum(dtype=np.int32)
    written = out.reshape(4, 12)
    np.testing.assert_array_equal(written[:, :4].reshape(-1), expected)
    assert (written[:, 4:] == 0x55).all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 registers")
def test_machine_code_stays_within_the_path():
    # Compiled anew: Numba shows no machine code of cached functions.
    tile = numba.njit(error_model="numpy")(matmul._nibble_tile(4, True, 640)._pyfunc)
    tile.compile("void(int64, int64, int64, int64, int64, int64)")
    (asm,) = tile.inspect_asm().values()
    assert ("%zmm" in asm) == (PATH == "avx512")
    assert "%ymm" not in asm if PATH == "portable" else "%ymm" in asm or "%zmm" in asm
    assert ("vpdpbusd" in asm) == (PATH == "avx512")
    assert ("vpmaddubsw" in asm) == (PATH == "avx2")
