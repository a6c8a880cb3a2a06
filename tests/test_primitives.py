"""The building blocks of the CUDA kernels, one at a time: tests/primitives.cu against plain loops.

Products use small integers, which are exact in every order of summation: results must be equal.

One file, though above 700 lines: every worker of pytest compiles the library once for it.
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

INF = float("inf")

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
    kernels = CHECKOUT / "csrc/kernels"
    command += [CHECKOUT / "tests/primitives.cu", kernels / "mask_summary.cu"]
    command += [kernels / "value_range.cu"]
    command += ["-o", path]
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


# Of the tiles of launch_tile_copy, by columns; half the rows by a warp.
TILE_ROWS = {64: 64, 128: 32, 256: 64}
ROW_STEP = {64: 16, 128: 8, 256: 32}  # rows that its threads copy at once; a warp, 4
by_warp_or_more = pytest.mark.parametrize("by_warp", [False, True], ids=["threads", "warp"])


def poisoned_matrix(rows, live_cols, row_stride):
    """A matrix inside a buffer full of NaN: the buffer, and the view [rows, live_cols]."""
    buffer = torch.full((rows + 80, row_stride), float("nan"), dtype=torch.float16)
    matrix = buffer[8 : 8 + rows, 8 : 8 + live_cols]
    matrix.copy_(torch.randn(matrix.shape))
    return buffer, matrix


def copy_tile(launch, device, cols, by_warp, buffer, head_dim, rows, valid_steps):
    buffer = buffer.to(device)
    out = torch.empty(TILE_ROWS[cols] >> by_warp, cols, dtype=torch.float16, device=device)
    row_stride = buffer.shape[1]
    matrix = buffer.flatten()[8 * row_stride + 8 :]
    launch("tile_copy", cols, by_warp, matrix, row_stride, head_dim, rows, valid_steps, out)
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
@by_warp_or_more
def test_tile_copy_load_bounded(launch, device, cols, by_warp, head_dim, rows):
    tile_rows = TILE_ROWS[cols] >> by_warp
    live_rows = min(rows, tile_rows)
    # Rows end on a multiple of 16 bytes.
    buffer, matrix = poisoned_matrix(live_rows, -(-head_dim // 8) * 8, cols + 24)
    expected = torch.zeros(tile_rows, cols, dtype=torch.float16)
    expected[:live_rows, : matrix.shape[1]] = matrix
    out = copy_tile(launch, device, cols, by_warp, buffer, head_dim, rows, -1)
    assert torch.equal(out, expected)


@only_cuda
@pytest.mark.parametrize("cols,head_dim", [(64, 56), (128, 128), (256, 200)])
@pytest.mark.parametrize("valid_steps", [0b1111, 0b0000, 0b0101, 0b0010])
@by_warp_or_more
def test_tile_copy_load_step(launch, device, cols, by_warp, head_dim, valid_steps):
    tile_rows, step = TILE_ROWS[cols] >> by_warp, 4 if by_warp else ROW_STEP[cols]
    buffer, matrix = poisoned_matrix(tile_rows, head_dim, cols + 16)
    expected = torch.zeros(tile_rows, cols, dtype=torch.float16)
    for row in range(tile_rows):
        if valid_steps >> (row // step) & 1:
            expected[row, :head_dim] = matrix[row]
    out = copy_tile(launch, device, cols, by_warp, buffer, head_dim, tile_rows, valid_steps)
    assert torch.equal(out, expected)


@only_cuda
@pytest.mark.parametrize("cols,head_dim", [(64, 56), (128, 128), (128, 72)])
@pytest.mark.parametrize("panel_rows", [64, 128])
@by_warp_or_more
def test_panel_copy(launch, device, cols, by_warp, head_dim, panel_rows):
    buffer, matrix = poisoned_matrix(128, head_dim, cols + 16)
    expected = torch.zeros(128, cols, dtype=torch.float16)
    expected[:, :head_dim] = matrix
    buffer, out = buffer.to(device), torch.empty_like(expected, device=device)
    source = buffer.flatten()[8 * (cols + 16) + 8 :]
    launch("panel_copy", cols, by_warp, panel_rows, source, cols + 16, head_dim, out)
    assert torch.equal(out.cpu(), expected)


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
    expected = scores.masked_fill(~visible(bands, rows, keys), -INF)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@only_cuda
@pytest.mark.parametrize("words", [1, 2])
def test_mask_bits(launch, device, words):
    bits = torch.randint(-(2**63), 2**63 - 1, (100, 16, words))
    bits[0], bits[1] = 0, -1
    scores = torch.randn(len(bits), 16, 64 * words)
    scores[torch.rand(scores.shape) < 0.02] = float("nan")
    out = scores.to(device)
    launch("mask_bits", words, bits.to(device), len(bits), out)
    hidden = (bits[..., None] >> torch.arange(64) & 1).flatten(2) == 0
    expected = scores.masked_fill(hidden, -INF)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# Masks as the kernels see them: a buffer, an offset and strides. The dtypes of the elements, bool
# as bytes of any value; with torch.float32 and bool, half the cases have a query in bf16.
MASK_DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]
MASK_LAYOUTS = ["dense", "padded", "odd offset", "odd rows", "every other key", "transposed"]
each_mask_dtype = pytest.mark.parametrize("dtype", MASK_DTYPES, ids=["bool", "f16", "bf16", "f32"])
each_layout = pytest.mark.parametrize("layout", MASK_LAYOUTS)


def poison(dtype, *shape):
    """What must not be read: no mask of these tests consists of it."""
    if dtype == torch.uint8:
        return torch.randint(0, 2, shape).to(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


def lay_out(values, layout):
    """The values [batch, heads, rows, keys] somewhere in a larger buffer, as a view of it."""
    batch, heads, rows, keys = values.shape
    align = 16 // values.element_size()
    wide = -(-keys // align) * align + align
    if layout == "dense":
        view = poison(values.dtype, *values.shape)
    elif layout == "padded":
        view = poison(values.dtype, batch, heads, rows + 1, wide)[:, :, :rows, align:][..., :keys]
    elif layout == "odd offset":
        view = poison(values.dtype, batch, heads, rows, wide)[..., 1 : keys + 1]
    elif layout == "odd rows":
        view = poison(values.dtype, batch, heads, rows, wide + 1)[..., :keys]
    elif layout == "every other key":
        view = poison(values.dtype, batch, heads, rows, 2 * keys)[..., ::2]
    else:
        view = poison(values.dtype, batch, heads, keys, rows).transpose(2, 3)
    return view.copy_(values)


def mask_arguments(view, shape, device):
    """Arguments mask_case and mask of the launchers, for a mask that broadcasts to shape."""
    strides = [0 if view.size(dim) == 1 else view.stride(dim) for dim in range(4)]
    if view.dtype == torch.uint8:
        dtype, mask_dtype = shape[2] % 2, 0
    elif view.dtype == torch.float32:
        dtype, mask_dtype = shape[2] % 2, 2
    else:
        dtype, mask_dtype = DTYPES.index(view.dtype), 1
    buffer = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(device)
    case = torch.tensor([*shape, *strides, dtype, mask_dtype])
    return case, buffer[view.storage_offset() :]


def as_bias(values):
    if values.dtype == torch.uint8:
        return torch.zeros(values.shape).masked_fill(values == 0, -INF)
    return values.float()


def random_block(dtype, rows, keys):
    """A block of a mask, or what is inside of it: of one value, nearly, of 0 and -inf, or any."""
    if dtype == torch.uint8:
        kinds = [torch.zeros(rows, keys), torch.randint(1, 256, (rows, keys)).float()]
        kinds.append((torch.rand(rows, keys) < 0.5) * kinds[1])
        others = [0.0, 1.0, 128.0]
    else:
        lowest = torch.finfo(dtype).min
        constants = [0.0, -0.0, -INF, INF, lowest, -10000.0, 0.5, float("nan")]
        constants += [-99840.0, -100352.0]  # on both sides of kFarBias, exact in bfloat16
        kinds = [torch.full((rows, keys), value) for value in constants]
        random = torch.rand(rows, keys)
        kinds += [
            torch.zeros(rows, keys).masked_fill(random < 0.5, -0.0),
            torch.zeros(rows, keys).masked_fill(random < 0.5, -INF),
            torch.zeros(rows, keys).masked_fill(random < 0.5, -INF).masked_fill(random < 0.1, -0.0),
            torch.zeros(rows, keys).masked_fill(random < 0.5, lowest),
            torch.full((rows, keys), lowest).masked_fill(random < 2 / keys, -1.0),
            torch.full((rows, keys), lowest).masked_fill(random < 2 / keys, float("nan")),
            torch.randn(rows, keys),
        ]
        others = [0.0, -0.0, -INF, INF, lowest, 2.0**-24, -1.0, float("nan"), -99840.0, -100352.0]
    block = kinds[torch.randint(len(kinds), ())]
    if torch.rand(()) < 0.4:  # a single element that may differ
        place = torch.randint(rows, ()), torch.randint(keys, ())
        if torch.rand(()) < 0.3:
            place = rows - 1, keys - 1
        block[place] = others[torch.randint(len(others), ())]
    return block.to(dtype)


def random_mask(dtype, batch, heads, rows, keys):
    mask = torch.empty(batch, heads, rows, keys, dtype=dtype)
    for matrix in mask.flatten(0, 1):
        for row in range(0, rows, 64):
            for key in range(0, keys, 64):
                block = matrix[row : row + 64, key : key + 64]
                block.copy_(random_block(dtype, *block.shape))
    return mask


@only_cuda
@each_mask_dtype
@each_layout
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_mask_tensor(launch, device, dtype, layout, row_tiles):
    height, width = 16 * row_tiles, 64 // row_tiles
    batch, heads, seqlen_q, seqlen_k = shape = (2, 3, 41, 119)
    mask = torch.randn(shape)
    mask[torch.rand(shape) < 0.3] = -INF
    mask[torch.rand(shape) < 0.05] = float("nan")
    mask[:, 1] = torch.finfo(torch.bfloat16).min
    mask = mask.isfinite().to(dtype) if dtype == torch.uint8 else mask.to(dtype)
    view = lay_out(mask, layout)
    scores = torch.randn(batch, heads, height, width)
    scores[torch.rand(scores.shape) < 0.05] = float("nan")
    for row, key in [(0, 0), (16, 34), (32, 64), (25, 96), (9, 118)]:
        out = scores.to(device)
        launch("mask_tensor", *mask_arguments(view, shape, device), row_tiles, row, key, out)
        rows = (row + torch.arange(height)).clamp(max=seqlen_q - 1)
        keys = torch.arange(key, min(key + width, seqlen_k))
        bias = as_bias(mask)[:, :, rows][..., keys]
        expected = scores.clone()
        expected[..., : len(keys)] += bias
        expected[..., : len(keys)][bias == -INF] = -INF
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# Of csrc/attn/mask_summary.cuh, as int32.
MIXED_BITS, MIXED_FAR, MIXED_ELEMENTS = 0x7FC00001, 0x7FC00002, 0x7FC00003


def expected_entry(block):
    first = block.flatten()[0]
    if (block == first).all():
        return (first + 0.0).view(torch.int32).item()  # -0 + 0 is 0
    if ((block == 0) | (block == -INF)).all():
        return MIXED_BITS
    return MIXED_FAR if ((block == 0) | (block < -1e30)).all() else MIXED_ELEMENTS


def expected_summary(values, shape):
    """Entries [batch, heads, row blocks, key blocks] as int32 and bits [.., seqlen_q, key blocks],
    where a mask that broadcasts the keys has the bit of its key everywhere."""
    keys = shape[3] if values.size(3) > 1 else -(-shape[3] // 64) * 64
    bias = as_bias(values).expand(*shape[:3], keys)
    row_blocks, key_blocks = -(-shape[2] // 64), -(-keys // 64)
    entries = torch.empty(*shape[:2], row_blocks, key_blocks, dtype=torch.int32)
    for index in torch.cartesian_prod(*map(torch.arange, entries.shape)).tolist():
        batch_idx, head_idx, row, key = index
        block = bias[batch_idx, head_idx, 64 * row : 64 * row + 64, 64 * key : 64 * key + 64]
        entries[tuple(index)] = expected_entry(block)
    seen = torch.zeros(*shape[:3], 64 * key_blocks, dtype=torch.int64)
    seen[..., :keys] = bias == 0
    bits = (seen.unflatten(3, (key_blocks, 64)) << torch.arange(64)).sum(4)
    used = ((entries == MIXED_BITS) | (entries == MIXED_FAR)).repeat_interleave(64, 2)[
        :, :, : shape[2]
    ]
    return entries, bits * used


SUMMARY_SHAPES = [
    (1, 1, 64, 64),
    (2, 3, 130, 208),  # rows of 16-byte pieces, as are those of the next
    (1, 2, 63, 16),
    (1, 2, 70, 325),
    (2, 1, 1, 200),
    (3, 1, 200, 1),
    (1, 1, 1, 1),
]
BROADCASTS = [(), (0, 1), (1,), (0, 1, 2), (0, 2), (3,), (1, 2, 3)]


def summarize(launch, device, view, shape, value=1.0):
    """The arguments of the launchers that read the summary of a mask. Every element of query, key
    and value is value."""
    case, mask = mask_arguments(view, shape, device)
    batch, heads, rows, keys = view.shape
    row_blocks, key_blocks = -(-rows // 64), -(-keys // 64)
    size = -(-batch * heads * row_blocks * key_blocks * 4 // 16) * 16
    size += batch * heads * rows * key_blocks * 8
    if view.dtype != torch.uint8:
        size += batch * heads * row_blocks * key_blocks * 8 + 8
    scratch = torch.full((size + 64,), 0x5A, dtype=torch.uint8, device=device)
    values = torch.full((8,), value, dtype=DTYPES[case[8]], device=device)
    launch("summarize_mask", case, mask, scratch, size, values)
    assert (scratch[size:] == 0x5A).all()
    return case, scratch


@only_cuda
@each_mask_dtype
@each_layout
@pytest.mark.parametrize("broadcast", BROADCASTS, ids=str)
def test_mask_summary(launch, device, dtype, layout, broadcast):
    for shape in SUMMARY_SHAPES:
        values = random_mask(dtype, *(1 if dim in broadcast else shape[dim] for dim in range(4)))
        summary = summarize(launch, device, lay_out(values, layout), shape)
        expected_entries, expected_bits = expected_summary(values, shape)
        entries = torch.empty(expected_entries.shape, device=device)
        bits = torch.empty(expected_bits.shape, dtype=torch.int64, device=device)
        launch("read_mask_summary", *summary, entries, bits)
        assert torch.equal(entries.cpu().view(torch.int32), expected_entries)
        assert torch.equal(bits.cpu(), expected_bits)


def expected_normal_rows(values, shape):
    """[batch, heads, row blocks, key blocks]: bits of the rows with an element above -1e5. Rows
    past the last one have the bit, unless one row stands for all."""
    keys = shape[3] if values.size(3) > 1 else -(-shape[3] // 64) * 64
    row_blocks, key_blocks = -(-shape[2] // 64), -(-keys // 64)
    all_rows = shape[2] if values.size(2) > 1 else 64 * row_blocks
    bias = values.float().expand(*shape[:2], all_rows, keys)
    normal = torch.ones(*shape[:2], 64 * row_blocks, key_blocks, dtype=torch.int64)
    for key_block in range(key_blocks):
        block = bias[..., 64 * key_block : 64 * key_block + 64]
        normal[:, :, :all_rows, key_block] = (block > -1e5).any(3).long()
    shifts = torch.arange(64)[:, None]
    return (normal.unflatten(2, (row_blocks, 64)) << shifts).sum(3)


@only_cuda
@pytest.mark.parametrize("dtype", MASK_DTYPES[1:], ids=["f16", "bf16", "f32"])
@each_layout
@pytest.mark.parametrize("broadcast", BROADCASTS, ids=str)
def test_normal_rows(launch, device, dtype, layout, broadcast):
    for shape in SUMMARY_SHAPES:
        values = random_mask(dtype, *(1 if dim in broadcast else shape[dim] for dim in range(4)))
        expected = expected_normal_rows(values, shape)
        entries = expected_summary(values, shape)[0].view(torch.float32)
        far = ((entries < -1e30) & (entries > -INF)).any().item()
        for value in (1.0, INF):
            case, scratch = summarize(launch, device, lay_out(values, layout), shape, value)
            rows = torch.empty(expected.shape, dtype=torch.int64, device=device)
            may_skip = torch.empty(1, dtype=torch.int32, device=device)
            launch("read_normal_rows", case, scratch, rows, may_skip)
            assert torch.equal(rows.cpu(), expected)
            assert may_skip.item() == (far and value == 1.0)


@only_cuda
def test_a_bool_mask_has_no_far_blocks(launch, device):
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    case, scratch = summarize(launch, device, mask, (1, 1, 64, 64))
    rows = torch.empty(1, dtype=torch.int64, device=device)
    may_skip = torch.empty(1, dtype=torch.int32, device=device)
    launch("read_normal_rows", case, scratch, rows, may_skip)
    assert may_skip.item() == 0


def is_unsafe(launch, device, tensors, scale=1, far=1):
    """The flag that value_range.cu sets for query, key and value, anywhere in larger buffers."""
    query, key, _ = tensors
    sizes = [*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3]]
    strides = [0 if x.size(d) == 1 else x.stride(d) for x in tensors for d in range(3)]
    case = torch.tensor([*sizes, DTYPES.index(query.dtype), *strides])
    buffers = [
        torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)[x.storage_offset() :]
        for x in tensors
    ]
    flags = torch.tensor([far, 0], dtype=torch.int32, device=device)
    launch("value_range", case, *buffers, scale, flags)
    assert flags[0] == far
    return bool(flags[1])


@only_cuda
@each_dtype
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 256])
def test_value_range(launch, device, dtype, head_dim):
    """A single element decides, wherever it lies; what surrounds the tensors does not."""
    largest = torch.finfo(dtype).max
    below, above = torch.tensor([9.96e11, 1.01e12]).to(dtype).tolist()
    for shapes in (
        [(2, 3, 1, head_dim), (2, 1, 700, head_dim), (2, 1, 700, head_dim)],
        [(1, 2, 1500, head_dim), (1, 2, 33, head_dim), (1, 2, 33, head_dim)],
    ):
        tensors = []
        for batch, heads, rows, cols in shapes:
            memory = torch.full((batch, rows + 1, heads, cols + 8), float("nan"), dtype=dtype)
            tensors.append(memory.transpose(1, 2)[:, :, :rows, :cols].copy_(torch.randn(cols)))
        assert not is_unsafe(launch, device, tensors)
        assert is_unsafe(launch, device, tensors, scale=257)
        for i, tensor in enumerate(tensors):
            last = tuple(size - 1 for size in tensor.shape)
            places = [last, (0, 0, 0, 0)]
            places += [tuple(int(torch.randint(n, ())) for n in tensor.shape) for _ in range(4)]
            for place in places:
                saved = tensor[place].item()
                for wrong in (float("nan"), INF, -INF):
                    tensor[place] = wrong
                    assert is_unsafe(launch, device, tensors)
                assert not is_unsafe(launch, device, tensors, far=0)
                for number in (largest, -largest):
                    tensor[place] = number
                    assert is_unsafe(launch, device, tensors) == (i < 2 and dtype == DTYPES[1])
                for number in (below, -below) if dtype == DTYPES[1] else ():
                    tensor[place] = number
                    assert not is_unsafe(launch, device, tensors)
                for number in (above, -above) if dtype == DTYPES[1] else ():
                    tensor[place] = number
                    assert is_unsafe(launch, device, tensors) == (i < 2)
                tensor[place] = saved


@only_cuda
@each_dtype
def test_value_range_of_expanded_tensors(launch, device, dtype):
    """Dimensions that are not there in memory do not have to be read, whatever their length."""
    shape = (1000, 1000, 2**31 - 1000, 64)
    row = torch.randn(64).to(dtype)
    tensors = [row.clone().expand(shape) for _ in range(3)]
    assert not is_unsafe(launch, device, tensors)
    for tensor in tensors:
        tensor[0, 0, 0, 63] = INF
        assert is_unsafe(launch, device, tensors)
        tensor[0, 0, 0, 63] = 1.0


@only_cuda
@each_mask_dtype
@pytest.mark.parametrize("block_m,block_n", [(64, 32), (128, 32), (128, 64)])
@pytest.mark.parametrize("broadcast", BROADCASTS, ids=str)
def test_masked_blocks(launch, device, dtype, block_m, block_n, broadcast):
    shape = batch, heads, seqlen_q, seqlen_k = (2, 3, 300, 325)
    sizes = [1 if dim in broadcast else shape[dim] for dim in range(4)]
    values = torch.full(sizes, 0 if dtype == torch.uint8 else -INF, dtype=dtype)
    live = torch.rand(sizes[0], sizes[1], 5, 6) < 0.4
    live = live.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, : sizes[2], : sizes[3]]
    values = torch.where(live, random_mask(dtype, *sizes), values)
    summary = summarize(launch, device, values, shape)
    m_blocks, n_blocks = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    out = torch.empty(batch, heads, m_blocks, n_blocks, 2, dtype=torch.int32, device=device)
    launch("masked_blocks", *summary, block_m, block_n, out)
    classes, visible_from = out.cpu().unbind(-1)

    entries, _ = expected_summary(values, shape)
    entries = entries.view(torch.float32).repeat_interleave(64 // block_n, 3)[..., :n_blocks]
    last = (torch.arange(m_blocks) * block_m + block_m - 1).clamp(max=seqlen_q - 1) // 64
    first = torch.arange(m_blocks) * block_m // 64
    top, bottom = entries[:, :, first], entries[:, :, last]
    expected = torch.ones(classes.shape, dtype=torch.int32)
    expected[(top == -INF) & (bottom == -INF)] = 0
    expected[(top == 0) & (bottom == 0)] = 2
    assert torch.equal(classes, expected)
    for block in range(n_blocks):
        below = expected[..., block // 2 : block + 1] != 0
        index = torch.arange(block // 2, block + 1, dtype=torch.int32)
        found = torch.where(below, index, block // 2 - 1).amax(-1)
        assert torch.equal(visible_from[..., block], found)
