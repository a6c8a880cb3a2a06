"""The building blocks of the CUDA kernels, one at a time: tests/primitives.cu against plain loops.

Products use small integers, which are exact in every order of summation: results must be equal.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a"]
UNLIMITED = 1 << 40  # kUnlimited of csrc/params.h
INT_MAX = 2**31 - 1

DTYPES = [torch.float16, torch.bfloat16]  # in the order of fa::Dtype
COLS = [64, 128, 256]
KEYS = 32  # kKeys of primitives.cu

only_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
each_cols = pytest.mark.parametrize("cols", COLS)


@pytest.fixture(scope="session")
def library_path(tmp_path_factory):
    """The shared library of primitives.cu, for the architectures of the build."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc found")
    path = tmp_path_factory.mktemp("primitives") / "primitives.so"
    command = [nvcc, "--threads=0", "-shared", "-Xcompiler=-fPIC"]
    command += shlex.split((CHECKOUT / "csrc/nvcc_flags.txt").read_text(), comments=True)
    command += [f"-gencode={architecture}" for architecture in ARCHITECTURES]
    command += [CHECKOUT / "tests/primitives.cu", "-o", path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return path


@pytest.fixture
def launch(device, request):
    """A function that calls a launcher of primitives.cu with tensors and integers."""
    # Only now, since pytest would otherwise compile before `device` skips.
    library = ctypes.CDLL(str(request.getfixturevalue("library_path")))
    library.error_string.restype = ctypes.c_char_p

    def run(name, *arguments):
        status = getattr(library, f"launch_{name}")(*map(as_ctypes, arguments))
        assert status == 0, f"launch_{name}: {library.error_string(status).decode()}"

    return run


def as_ctypes(argument):
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, torch.dtype):
        return ctypes.c_int64(DTYPES.index(argument))
    return ctypes.c_int64(argument)


def integers(low, high, *shape):
    """Random integers in [low, high] as float32."""
    return torch.randint(low, high + 1, shape).float()


def test_compiles_for_the_architectures_of_the_build(library_path):
    library = ctypes.CDLL(str(library_path))
    assert library.launch_gemm_qk and library.launch_mask_columns


@only_cuda
@each_cols
def test_swizzle(launch, device, cols):
    rows, chunks = 64, cols // 8
    offsets = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    launch("swizzle", cols, rows, offsets)
    offsets = offsets.cpu()
    # A bijection between the chunks of the tile and its memory, row by row.
    assert torch.equal(offsets.flatten().sort().values, torch.arange(rows * chunks) * 16)
    assert torch.equal(offsets // (cols * 2), torch.arange(rows)[:, None].expand(rows, chunks))
    # Any eight consecutive rows of a chunk column lie in eight different groups of banks.
    groups = (offsets // 16 % 8).unfold(0, 8, 1).sort(-1).values
    assert torch.equal(groups, torch.arange(8).expand_as(groups))


# Of the tiles of launch_tile_copy, by columns.
TILE_ROWS = {64: 64, 128: 32, 256: 64}
ROW_STEP = {64: 16, 128: 8, 256: 32}  # rows that its threads copy at once


def poisoned_matrix(rows, live_cols, row_stride):
    """A matrix inside a buffer full of NaN: the buffer, and the view [rows, live_cols]."""
    buffer = torch.full((rows + 80, row_stride), float("nan"), dtype=torch.float16)
    matrix = buffer[8 : 8 + rows, 8 : 8 + live_cols]
    matrix.copy_(torch.randn(matrix.shape))
    return buffer, matrix


def copy_tile(launch, device, cols, buffer, head_dim, rows, valid_steps):
    buffer = buffer.to(device)
    out = torch.empty(TILE_ROWS[cols], cols, dtype=torch.float16, device=device)
    row_stride = buffer.shape[1]
    matrix = buffer.flatten()[8 * row_stride + 8 :]
    launch("tile_copy", cols, matrix, row_stride, head_dim, rows, valid_steps, out)
    return out.cpu()


@only_cuda
@pytest.mark.parametrize(
    ("cols", "head_dim"),
    [
        *((64, head_dim) for head_dim in (1, 40, 64)),
        *((128, head_dim) for head_dim in (72, 97, 128)),
        *((256, head_dim) for head_dim in (8, 136, 233, 256)),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 7, 17, 31, 1000])
def test_tile_copy_load_bounded(launch, device, cols, head_dim, rows):
    tile_rows = TILE_ROWS[cols]
    live_rows = min(rows, tile_rows)
    # Rows end on a multiple of 16 bytes.
    buffer, matrix = poisoned_matrix(live_rows, -(-head_dim // 8) * 8, cols + 24)
    expected = torch.zeros(tile_rows, cols, dtype=torch.float16)
    expected[:live_rows, : matrix.shape[1]] = matrix
    out = copy_tile(launch, device, cols, buffer, head_dim, rows, -1)
    assert torch.equal(out, expected)


@only_cuda
@pytest.mark.parametrize("cols,head_dim", [(64, 56), (128, 128), (256, 200)])
@pytest.mark.parametrize("valid_steps", [0b1111, 0b0000, 0b0101, 0b0010])
def test_tile_copy_load_step(launch, device, cols, head_dim, valid_steps):
    tile_rows = TILE_ROWS[cols]
    buffer, matrix = poisoned_matrix(tile_rows, head_dim, cols + 16)
    expected = torch.zeros(tile_rows, cols, dtype=torch.float16)
    for row in range(tile_rows):
        if valid_steps >> (row // ROW_STEP[cols]) & 1:
            expected[row, :head_dim] = matrix[row]
    out = copy_tile(launch, device, cols, buffer, head_dim, tile_rows, valid_steps)
    assert torch.equal(out, expected)


@only_cuda
@each_dtype
@pytest.mark.parametrize("operands", ["a_identity", "identity_b", "a_b"])
def test_fragments(launch, device, dtype, operands):
    """Every way to load an operand agrees with mma and with fragment_row and fragment_col."""
    a, b = integers(-8, 8, 16, 16), integers(-8, 8, 16, 16)
    if operands == "a_identity":
        b = torch.eye(16)
    if operands == "identity_b":
        a = torch.eye(16)
    d = torch.empty(3, 3, 16, 16, device=device)
    on_device = [m.contiguous().to(device, dtype) for m in (a, b, b.T)]
    launch("fragment", dtype, *on_device, d)
    for i, load_a in enumerate(["by hand", "as_operand_a", "ldmatrix"]):
        for j, load_b in enumerate(["by hand", "ldmatrix", "ldmatrix.trans"]):
            assert torch.equal(d[i, j].cpu(), a @ b), f"A {load_a}, B {load_b}"


@only_cuda
@each_dtype
@each_cols
@pytest.mark.parametrize("quarters", [0, 1, 4])
def test_gemm_qk(launch, device, dtype, cols, quarters):
    rows = 2 * 16 * (2 if dtype == torch.float16 else 1)
    q, k, s = (
        integers(-8, 8, rows, cols),
        integers(-8, 8, KEYS, cols),
        integers(-99, 99, rows, KEYS),
    )
    out = s.to(device)
    calls = torch.empty(64, dtype=torch.int32, device=device)
    launch("gemm_qk", dtype, cols, quarters, q.to(device, dtype), k.to(device, dtype), out, calls)
    assert torch.equal(out.cpu(), s + q @ k.T)
    assert (calls == cols // 16 * (KEYS // 16)).all()


@only_cuda
@each_dtype
@pytest.mark.parametrize("cols,row_tiles", [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1)])
def test_gemm_pv(launch, device, dtype, cols, row_tiles):
    rows = 2 * 16 * row_tiles
    # Integers up to 4095 have to be rounded in both dtypes.
    p, v, o = (
        integers(0, 4095, rows, KEYS),
        integers(-3, 3, KEYS, cols),
        integers(-9, 9, rows, cols),
    )
    out = o.to(device)
    calls = torch.empty(64, dtype=torch.int32, device=device)
    launch("gemm_pv", dtype, cols, row_tiles, p.to(device), v.to(device, dtype), out, calls)
    assert torch.equal(out.cpu(), o + p.to(dtype).float() @ v)
    assert (calls == KEYS // 16 * (cols // 16)).all()


@only_cuda
@each_dtype
def test_cvt_rn_x2(launch, device, dtype):
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0]
    special += [3.3895e38, 3.4028e38, -3.4028e38, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 1e-40, 2049.0]
    # Random bit patterns: every exponent, subnormal numbers and NaN; and with their last bits
    # zero, those halfway between two numbers of fp16 or bf16.
    bits = torch.randint(-(2**31), 2**31, (1 << 16,)).to(torch.int32)
    halfway = torch.cat([bits & ~0x0FFF, bits & ~0x7FFF])
    near_one = torch.randn(1 << 14) * 100
    x = torch.cat([torch.tensor(special), bits.view(torch.float32), halfway.view(torch.float32)])
    x = torch.cat([x, near_one])
    packed = torch.empty(len(x), dtype=dtype, device=device)
    launch("cvt_rn_x2", dtype, x.to(device), len(x) // 2, packed)
    got, expected = packed.cpu(), x.to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    live = ~expected.isnan()
    assert torch.equal(got[live].view(torch.int16), expected[live].view(torch.int16))


@only_cuda
def test_ex2_approx_ftz(launch, device):
    special = [0.0, -0.0, 1.0, -1.0, -126.0, 127.0, 128.0, -127.0, -150.0, -3.4e38, 3.4e38, 1e-40]
    special += [float("inf"), -float("inf"), float("nan")]
    x = torch.cat([torch.tensor(special), torch.rand(1 << 18) * 290 - 150, torch.randn(1 << 16)])
    y = torch.empty_like(x, device=device)
    launch("ex2_approx_ftz", x.to(device), x.numel(), y)
    y, exact = y.cpu().double(), torch.exp2(x.double())
    assert torch.equal(y.isnan(), x.isnan())
    assert (y[x == -float("inf")] == 0).all()
    assert torch.isposinf(y[x >= 128]).all()
    # Below the smallest normal number, results are flushed to zero.
    assert (y[x < -126.001] == 0).all()
    normal = (x >= -126) & (x < 127.999)
    error = (y[normal] - exact[normal]).abs() / exact[normal]
    assert error.max() <= 2.0**-21


@only_cuda
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("tiles", [1, 3, 4, 5, 203])
def test_ring(launch, device, tiles, ahead):
    """Tiles through the ring: a wrong phase shows as the sum of another tile, or a mixed one."""
    data = torch.randint(0, 2**15, (tiles, 2048), dtype=torch.int16)
    sums = torch.empty(4, tiles, dtype=torch.int64, device=device)
    launch("ring", data.to(device), tiles, ahead, sums)
    expected = (data.long() * torch.arange(1, 2049)).sum(1)
    assert torch.equal(sums.cpu(), expected.expand(4, tiles))


@only_cuda
def test_fast_divide(launch, device):
    powers = [2**n for n in range(31)]
    divisors = {d for power in powers for d in (power - 1, power, power + 1)} | {3, 5, 7, 10, 1000}
    divisors |= {INT_MAX, INT_MAX - 1} | set(torch.randint(1, INT_MAX, (200,)).tolist())
    divisors |= set(torch.randint(1, 5000, (100,)).tolist())
    divisors = torch.tensor(sorted(d for d in divisors if 1 <= d <= INT_MAX))[:, None]
    size = 1 << 12
    # Multiples of the divisor, where a quotient that is off by one shows, and the numbers before.
    random = torch.randint(0, INT_MAX + 1, (len(divisors), size))
    multiples = random // divisors * divisors
    ends = torch.tensor([0, 1, INT_MAX - 1, INT_MAX]).expand(len(divisors), 4)
    n = torch.cat([random, multiples, (multiples - 1).clamp(min=0), ends], 1)
    last_multiple = INT_MAX // divisors * divisors
    n = torch.cat([n, last_multiple, last_multiple - 1], 1)
    quotients = torch.empty(n.shape, dtype=torch.int32, device=device)
    launch("fast_divide", divisors, len(divisors), n.to(device, torch.int32), n.shape[1], quotients)
    wrong = (quotients.cpu() != n // divisors).nonzero().tolist()
    assert not wrong, f"{n[tuple(wrong[0])]} / {divisors[wrong[0][0]]}"


@only_cuda
@pytest.mark.parametrize(
    ("batch", "heads", "group", "m_blocks", "section"),
    [
        (1, 1, 1, 1, 1),
        (3, 6, 2, 7, 1),  # no band: m_block runs fastest
        (3, 6, 2, 7, 2),
        (3, 6, 3, 7, 18),  # one section
        (3, 6, 6, 5, 4),  # the last one is smaller
        (2, 5, 5, 33, 7),
        (7, 32, 4, 129, 100),
        (1, 7, 1, 1, 3),
    ],
)
def test_tile_of_cta(launch, device, batch, heads, group, m_blocks, section):
    pairs = batch * heads
    tiles = torch.empty(pairs * m_blocks, 4, dtype=torch.int32, device=device)
    launch("tile_of_cta", batch, heads, group, m_blocks, section, tiles)
    expected = [
        [m_block, pair % heads, pair % heads // group, pair // heads]
        for first in range(0, pairs, section)
        for m_block in reversed(range(m_blocks))
        for pair in range(first, min(first + section, pairs))
    ]
    assert tiles.tolist() == expected
    assert len({tuple(tile) for tile in expected}) == pairs * m_blocks


def random_bands(count):
    """Row ranges, bands and lengths: int64 [count, 7], the fields of BandCase of primitives.cu."""
    seqlen_q, seqlen_k = torch.randint(1, 60, (count,)), torch.randint(1, 100, (count,))
    row_begin = (torch.rand(count) * (seqlen_q + 1)).long()
    row_end = torch.minimum(row_begin + torch.randint(0, 40, (count,)), seqlen_q)
    key_begin = torch.randint(0, 120, (count,))
    bottom_right = torch.randint(0, 2, (count,))
    diagonal = bottom_right * (seqlen_k - seqlen_q)

    def window():
        sizes = [torch.randint(0, limit, (count,)) for limit in (1, 12, 150)]
        sizes = torch.stack([*sizes, torch.full((count,), UNLIMITED)])
        return sizes.gather(0, torch.randint(0, 4, (1, count)))[0]

    return torch.stack([row_begin, row_end, key_begin, diagonal, window(), window(), seqlen_k], 1)


def shift_rows(bands, shift):
    """The same bands for rows that lie `shift` further down."""
    shifted = bands.clone()
    shifted[:, :2] += shift
    shifted[:, 3] -= shift
    return shifted


def visible(bands, rows, keys):
    """Whether the band and the sequence end show a key to a row; rows and keys [cases, n]."""
    diagonal, left, right, seqlen_k = (bands[:, i, None, None] for i in (3, 4, 5, 6))
    center, key = rows[:, :, None] + diagonal, keys[:, None, :]
    return (key < seqlen_k) & (key >= center - left) & (key <= center + right)


@only_cuda
@pytest.mark.parametrize("shift", [0, INT_MAX - 64], ids=["near", "far"])
def test_key_range(launch, device, shift):
    bands = random_bands(2000)
    ranges = torch.empty(len(bands), 4, dtype=torch.int32, device=device)
    launch("key_range", shift_rows(bands, shift).to(device), len(bands), ranges)
    first, end, full_first, full_end = ranges.cpu().long().T

    row_begin, row_end = bands[:, :1], bands[:, 1:2]
    rows = torch.arange(60).expand(len(bands), 60)
    keys = torch.arange(110).expand(len(bands), 110)
    seen = visible(bands, rows, keys)
    inside = ((rows >= row_begin) & (rows < row_end))[:, :, None]
    to_some = (seen & inside).any(1)
    to_all = (seen | ~inside).all(1) & (row_begin < row_end)

    key = torch.arange(110)
    assert torch.equal(to_some, (key >= first[:, None]) & (key < end[:, None]))
    assert torch.equal(to_all, (key >= full_first[:, None]) & (key < full_end[:, None]))


@only_cuda
@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("shift", [0, INT_MAX - 200], ids=["near", "far"])
def test_mask_columns(launch, device, row_tiles, shift):
    count, height, width = 1000, 16 * row_tiles, 64 // row_tiles
    bands = random_bands(count)
    scores = torch.randn(count, height, width)
    scores[torch.rand(scores.shape) < 0.02] = float("nan")
    moved = shift_rows(bands, shift)
    moved[:, 2] += shift  # keys and their end as well, so that the diagonal is back where it was
    moved[:, 3] += shift
    moved[:, 6] += shift
    out = scores.to(device)
    launch("mask_columns", row_tiles, moved.to(device), count, out)

    rows, keys = bands[:, :1] + torch.arange(height), bands[:, 2:3] + torch.arange(width)
    expected = scores.masked_fill(~visible(bands, rows, keys), -float("inf"))
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
