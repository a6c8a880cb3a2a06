"""The building blocks of the Hopper kernels, one at a time: tests/primitives_sm90.cu against torch.

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
from test_primitives import CHECKOUT, as_ctypes, each_cols, each_dtype, integers, only_cuda

ARCHITECTURE = "arch=compute_90a,code=sm_90a"
QK_FORMS = ["q_in_smem", "q_in_registers", "one_warp"]  # in the order of QkForm
# head_dim instance, rows of Q, keys: of the kernels' tiles.
QK_TILES = [(64, 192, 128), (64, 192, 64), (128, 192, 80), (128, 192, 64), (128, 128, 128)]
QK_TILES += [(256, 128, 80), (256, 128, 64)]
# Instance and what is left of it for a tensor; rows of 33 elements end inside a chunk of 16 bytes.
HEAD_DIMS = [(64, 33), (64, 40), (64, 64), (128, 72), (128, 96), (128, 128)]
HEAD_DIMS += [(256, 136), (256, 200), (256, 256)]
BATCH, HEADS = 2, 3

each_rows = pytest.mark.parametrize("rows", [64, 80, 128, 192])
each_head_dim = pytest.mark.parametrize(("cols", "head_dim"), HEAD_DIMS)
each_stages = pytest.mark.parametrize("stages", [2, 3, 4])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The shared library of primitives_sm90.cu and what the compiler said."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc found")
    path = tmp_path_factory.mktemp("primitives_sm90") / "primitives_sm90.so"
    command = [nvcc, "-shared", "-Xcompiler=-fPIC", f"-gencode={ARCHITECTURE}"]
    command += shlex.split((CHECKOUT / "csrc/nvcc_flags.txt").read_text(), comments=True)
    command += [CHECKOUT / "tests/primitives_sm90.cu", "-o", path]
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return ctypes.CDLL(str(path)), output


@pytest.fixture
def launch(device, request):
    """A function that calls a launcher of primitives_sm90.cu with tensors and integers."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip(f"needs compute capability 9.0, got {major}.{minor}")
    # Only now, since pytest would otherwise compile before the skips.
    library, _ = request.getfixturevalue("compiled")
    library.error_string.restype = ctypes.c_char_p

    def run(name, *arguments):
        status = getattr(library, f"launch_{name}")(*map(as_ctypes, arguments))
        if status != 0:
            raise RuntimeError(f"launch_{name}: {library.error_string(status).decode()}")

    return run


def image(tile):
    """A tile [rows][cols] as it lies in shared memory: panels [cols / 64][rows][64] in which the
    chunks of 16 bytes of row r have changed places, c with c ^ (r % 8)."""
    rows, cols = tile.shape
    chunks = tile.reshape(rows, cols // 64, 8, 8).transpose(0, 1)
    row = torch.arange(rows)[:, None]
    chunk = torch.arange(8) ^ (row % 8)
    return chunks[:, row, chunk].contiguous()


def view_of(view):
    """TensorView of primitives_sm90.cu for a tensor [batch, heads, seqlen, head_dim]."""
    return torch.tensor([view.data_ptr(), *view.shape, *view.stride()[:3]], dtype=torch.int64)


def poisoned(layout, seqlen, head_dim, dtype):
    """A buffer full of NaN and, inside, a view [BATCH, HEADS, seqlen, head_dim] in which TMA can
    load: rows start on 16 bytes."""
    width = -(-head_dim // 8) * 8 + 16
    if layout == "bshd":
        buffer = torch.full((BATCH + 2, seqlen + 9, HEADS + 1, width), float("nan"), dtype=dtype)
        inside = buffer[1:-1, 3:-6, :HEADS, 8 : 8 + head_dim].transpose(1, 2)
    else:
        buffer = torch.full((BATCH + 2, HEADS + 1, seqlen + 9, width), float("nan"), dtype=dtype)
        inside = buffer[1:-1, :HEADS, 3:-6, 8 : 8 + head_dim]
    return buffer, inside


def same_view(buffer, view):
    """The part of another buffer of the same shape."""
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


def tile_at(view, batch, head, row, rows, cols):
    """Rows from `row` on, as a tile [rows][cols] with zeros outside the tensor."""
    tile = torch.zeros(rows, cols, dtype=view.dtype)
    live = view[batch, head, row : row + rows]
    tile[: live.shape[0], : live.shape[1]] = live
    return tile


def test_compiles_without_complaints(compiled):
    library, output = compiled
    assert library.launch_qk and library.launch_tma_load
    # ptxas says so when it spills, or has to wait for products that should stay in flight.
    assert "ptxas" not in output, output


@only_cuda
@each_dtype
@each_rows
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@each_head_dim
def test_tma_load(launch, device, dtype, rows, layout, cols, head_dim):
    seqlen = rows + 50
    buffer, view = poisoned(layout, seqlen, head_dim, dtype)
    view.copy_(torch.randn(view.shape))
    view_on_device = same_view(buffer.to(device), view)
    out = torch.empty(cols // 64, rows, 8, 8, dtype=dtype, device=device)
    # A whole tile, tiles across the end, and one behind it.
    for i, row in enumerate([0, 13, 64, seqlen - 1, seqlen + 5]):
        batch, head = i % BATCH, i % HEADS
        launch("tma_load", dtype, rows, cols, view_of(view_on_device), batch, head, row, out)
        assert torch.equal(out.cpu(), image(tile_at(view, batch, head, row, rows, cols))), row


@only_cuda
def test_tma_load_of_one_batch_and_head(launch, device):
    """Dimensions of size 1 may have stride 0, and a tensor may be shorter than a box."""
    data = torch.randn(5, 64, dtype=torch.float16)
    on_gpu = data.to(device)
    view = on_gpu.as_strided((1, 1, 5, 64), (0, 0, 64, 1))
    out = torch.empty(1, 64, 8, 8, dtype=torch.float16, device=device)
    launch("tma_load", torch.float16, 64, 64, view_of(view), 0, 0, 0, out)
    assert torch.equal(out.cpu(), image(tile_at(data[None, None], 0, 0, 0, 64, 64)))


@only_cuda
@pytest.mark.parametrize(
    ("index", "change"),
    [(0, 8), (7, 4), (6, 4), (5, 1 << 39)],
    ids=["pointer", "row_stride", "head_stride", "batch_too_far"],
)
def test_tensor_map_refuses(launch, device, index, change):
    """What the copy engine cannot take is an error before anything runs."""
    data = torch.zeros(1 << 16, dtype=torch.float16, device=device)
    view = torch.tensor([data.data_ptr(), 2, 3, 10, 64, 4096, 1024, 64])  # a TensorView
    view[index] += change
    out = torch.empty(64, 64, dtype=torch.float16, device=device)
    with pytest.raises(RuntimeError, match="invalid argument"):
        launch("tma_load", torch.float16, 64, 64, view, 0, 0, 0, out)


@only_cuda
@each_dtype
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
# Stores end at whole chunks of 16 bytes, loads at any element.
@pytest.mark.parametrize(("cols", "head_dim"), [pair for pair in HEAD_DIMS if pair[1] % 8 == 0])
def test_tma_store(launch, device, dtype, layout, cols, head_dim):
    tile_rows = 128 if cols == 256 else 192
    seqlen = 150
    empty, view = poisoned(layout, seqlen, head_dim, dtype)
    tile = torch.randn(tile_rows, cols).to(dtype)
    in_smem = image(tile).to(device)
    # Whole, cut off at the end, a single row, and nothing.
    for i, row in enumerate([0, 21, seqlen - 50, seqlen - 1, seqlen + 7]):
        batch, head, part = i % BATCH, i % HEADS, i % (tile_rows // 64)
        out, expected = empty.to(device), empty.clone()
        target = view_of(same_view(out, view))
        launch("tma_store", dtype, cols, target, in_smem, part, batch, head, row)
        live = same_view(expected, view)[batch, head, row : row + 64]
        live.copy_(tile[64 * part : 64 * part + len(live), :head_dim])
        assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16)), row


@only_cuda
@each_dtype
@pytest.mark.parametrize("form", QK_FORMS)
@pytest.mark.parametrize(("head_dim", "q_rows", "keys"), QK_TILES)
def test_qk(launch, device, dtype, form, head_dim, q_rows, keys):
    """wgmma_qk with Q in shared memory and in registers, and warp_qk: all the same scores."""
    q, k = integers(-8, 8, q_rows, head_dim), integers(-8, 8, keys, head_dim)
    s = torch.empty(q_rows, keys, device=device)
    images = [image(x).to(device, dtype) for x in (q, k)]
    launch("qk", QK_FORMS.index(form), dtype, head_dim, q_rows, keys, *images, s)
    assert torch.equal(s.cpu(), q @ k.T)


@only_cuda
@each_dtype
@pytest.mark.parametrize("keys", [64, 80, 128])
@each_cols
def test_pv(launch, device, dtype, cols, keys):
    """pack_operand_a and wgmma_pv."""
    # Integers up to 4095 have to be rounded in both dtypes.
    p, v, o = integers(0, 4095, 64, keys), integers(-3, 3, keys, cols), integers(-9, 9, 64, cols)
    out = o.to(device)
    launch("pv", dtype, cols, keys, p.to(device), image(v).to(device, dtype), out)
    assert torch.equal(out.cpu(), o + p.to(dtype).float() @ v)


@only_cuda
@each_rows
@each_cols
def test_panel_address_and_stmatrix(launch, device, rows, cols):
    # Every element is another number.
    tile = torch.randperm(1 << 16)[: rows * cols].to(torch.int16).reshape(rows, cols)
    offsets = torch.empty(rows // 16, cols // 16, 32, dtype=torch.int32, device=device)
    out = torch.empty(cols // 64, rows, 8, 8, dtype=torch.int16, device=device)
    launch("stmatrix", rows, cols, tile.to(device), offsets, out)
    # A bijection between the chunks of the tile and its memory.
    offsets = offsets.cpu()
    assert torch.equal(offsets.flatten().sort().values, torch.arange(rows * cols // 8).int() * 16)
    # Lanes 0 to 15 name rows, 16 to 31 the same rows eight columns further.
    row = torch.arange(rows).reshape(-1, 1, 1, 16)
    chunk = torch.arange(cols // 8).reshape(1, -1, 2, 1)
    expected = ((chunk // 8 * rows + row) * 8 + (chunk % 8 ^ row % 8)) * 16
    assert torch.equal(offsets, expected.flatten(2).int())
    assert torch.equal(out.cpu(), image(tile))


@only_cuda
@each_stages
def test_ring_position(launch, device, stages):
    walk = torch.empty(50, 2, dtype=torch.int32, device=device)
    launch("ring_position", stages, len(walk), walk)
    assert walk.tolist() == [[i % stages, i // stages % 2] for i in range(50)]


@only_cuda
@each_stages
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 203])
def test_ring(launch, device, stages, tiles):
    """Tiles through the ring by TMA: a wrong phase shows as the sum of another tile, or a mixed
    one. Of the last tile a part lies past the end; its bytes count all the same."""
    rows = tiles * 64 - 11
    data = torch.randint(0, 2**15, (rows, 128), dtype=torch.int16)
    on_gpu = data.to(device)
    sums = torch.empty(tiles, dtype=torch.int64, device=device)
    launch("ring", torch.float16, stages, view_of(on_gpu[None, None]), tiles, sums)
    padded = torch.cat([data, data.new_zeros(11, 128)]).reshape(tiles, 64, 128)
    weights = torch.arange(1, 64 * 128 + 1)
    assert sums.tolist() == [(image(t).long().flatten() * weights).sum().item() for t in padded]
