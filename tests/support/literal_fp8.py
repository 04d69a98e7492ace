"""FP8 quantisation written out element by element in Python: the oracle of the precision tests.

It shares no code with the package, uses no torch arithmetic, and states each rule as a sentence
would: the values of a format from its definition, a code as the nearest of them.
"""

import bisect
import math

import numpy as np
import torch
from hypothesis import strategies as st

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}
LARGEST = {
    torch.bfloat16: float.fromhex("0x1.FEp127"),
    torch.float16: 65504.0,
    torch.float32: float.fromhex("0x1.FFFFFEp127"),
}
F32 = np.float32


def fp8_values(dtype):
    """Every finite non-negative value of the format, ascending by code, from its definition."""
    exponent_bits, mantissa_bits = (4, 3) if dtype == E4M3 else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        values.append(math.ldexp(fraction, max(exponent, 1) - bias))
    return [value for value in values if value <= MAX[dtype]]


def literal_code(product, dtype, values):
    """The byte of one scaled element: nearest value, ties to the even code, saturated."""
    if math.isnan(product):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, product) < 0 else 0
    magnitude = min(abs(product), MAX[dtype])
    above = bisect.bisect_left(values, magnitude)
    neighbours = [code for code in (above - 1, above) if 0 <= code < len(values)]
    distance = {code: abs(values[code] - magnitude) for code in neighbours}  # exact in a double
    nearest = [code for code in neighbours if distance[code] == min(distance.values())]
    return sign | (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))


def literal_quantise(x, block_shape, scale_mode, dtype, amax_epsilon):
    """The rule, element by element, in Python floats and NumPy float32 scalars."""
    (m, k), (bm, bk) = x.shape, block_shape
    rows = x.to(torch.float64).tolist()
    values = fp8_values(dtype)
    codes = np.zeros((m, k), np.uint8)
    scale_inv = np.zeros((math.ceil(m / bm), math.ceil(k / bk)), np.float32)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            cells = [
                (r, c)
                for r in range(i * bm, min(m, (i + 1) * bm))
                for c in range(j * bk, min(k, (j + 1) * bk))
            ]
            amax = F32(0)
            for r, c in cells:
                if not math.isnan(rows[r][c]):
                    amax = max(amax, F32(abs(rows[r][c])))
            amax = max(amax, F32(amax_epsilon))
            scale = F32(1)
            if amax != 0 and not math.isinf(amax):
                with np.errstate(over="ignore"):
                    scale = F32(MAX[dtype]) / amax
                if math.isinf(scale):
                    scale = F32(LARGEST[x.dtype])
                if scale_mode == "pow2":
                    scale = F32(2.0 ** (math.frexp(scale)[1] - 1))
            scale_inv[i, j] = F32(1) / scale
            for r, c in cells:
                with np.errstate(over="ignore"):
                    codes[r, c] = literal_code(float(F32(rows[r][c]) * scale), dtype, values)
    return torch.from_numpy(codes), torch.from_numpy(scale_inv)


def literal_mx_quantise(x, dtype):
    """MXFP8 along the columns: codes and biased exponents, element by element."""
    m, k = x.shape
    rows, values = x.to(torch.float64).tolist(), fp8_values(dtype)
    codes = np.zeros((m, k), np.uint8)
    exponents = np.zeros((m, math.ceil(k / 32)), np.uint8)
    for r in range(m):
        for j in range(exponents.shape[1]):
            columns = range(j * 32, min(k, (j + 1) * 32))
            amax = max([abs(rows[r][c]) for c in columns if not math.isnan(rows[r][c])] + [0.0])
            v = float(F32(amax) * F32(1 / MAX[dtype]))
            if math.isinf(v):
                biased = 254
            elif v <= 2.0**-127:
                biased = 0
            else:
                mantissa, exponent = math.frexp(v)
                biased = 127 + exponent - (mantissa == 0.5)
            exponents[r, j] = biased
            scale = F32(1) if biased == 0 else F32(2.0 ** (127 - biased))
            for c in columns:
                codes[r, c] = literal_code(float(F32(rows[r][c]) * scale), dtype, values)
    return torch.from_numpy(codes), torch.from_numpy(exponents)


def bytes_of(tensor):
    """A tensor's bytes, for comparing NaN and signed zeros too."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same_bytes(one, other):
    assert one.shape == other.shape
    assert torch.equal(bytes_of(one), bytes_of(other))


# Every bit pattern, so zeros of both signs, subnormals, infinities and NaN are frequent enough.
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
BLOCKS = st.sampled_from([(1, 128), (128, 128), (128, 1), (1, 4), (3, 4), (2, 1)])


@st.composite
def matrices(draw, dtypes=tuple(BITS), any_bits=True):
    dtype = draw(st.sampled_from(dtypes))
    m, k = draw(st.integers(1, 7)), draw(st.integers(1, 11))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if any_bits and draw(st.booleans()):
        info = torch.iinfo(BITS[dtype])
        bits = torch.randint(info.min, info.max + 1, (m, k), generator=generator)
        return bits.to(BITS[dtype]).view(dtype)
    x = torch.randn((m, k), generator=generator) * draw(st.sampled_from([1e-6, 1.0, 300.0]))
    x = x * torch.exp2(torch.randint(-6, 4, (m, 1), generator=generator))
    if draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = 0.0
    return x.to(dtype)
