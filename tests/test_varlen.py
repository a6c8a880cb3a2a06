"""fa::forward_varlen and fa::backward_varlen, sequence by sequence against the reference."""

import random

import pytest
import torch
from cases import DTYPES, HALF, randn
from packed import Packed, backward_varlen, forward_varlen, int32, starts
from reference import close

from flashattn_ext import flash_attn_varlen_func

# Around the tiles of every kernel, and nothing.
LENGTHS = [
    (0, 0), (1, 1), (63, 63), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (0, 70),
    (70, 0), (1, 300), (300, 1), (37, 260), (260, 37), (193, 192),
]  # fmt: skip

# Of every kernel: on a GPU of 9.0, the portable ones take what is no multiple of 8.
HEAD_DIMS = [60, 64, 128, 127, 256, 250]


@pytest.fixture(params=HEAD_DIMS)
def head_dim(request, device):
    if device == "cpu" and request.param not in (64, 127):
        pytest.skip("the CPU has one kernel for all")
    return request.param


def mixed_lengths():
    """In a new order each time: every length meets other neighbours."""
    return random.sample(LENGTHS, len(LENGTHS))


def dtypes_of(device):
    return HALF if device == "cuda" else (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1)], ids=str)
def test_lengths(device, heads, head_dim):
    random.seed(torch.initial_seed())
    for dtype, is_causal in zip(dtypes_of(device), random.choice([(0, 1), (1, 0)]), strict=True):
        lengths = mixed_lengths()
        packed = Packed(device, lengths, heads, head_dim, dtype, padding=(0, 45))
        packed.check(f"{dtype} {lengths}", is_causal=bool(is_causal))


@pytest.mark.parametrize("head_dim", [1, 7, 31, 64, 80, 96, 128, 160, 200, 256])
def test_head_dims(device, head_dim):
    for dtype in DTYPES[device]:
        packed = Packed(
            device, [(65, 129), (0, 3), (130, 64), (70, 70)], (4, 2), head_dim, dtype,
            padding=(3, 70),
        )  # fmt: skip
        for is_causal in (False, True):
            packed.check(f"{dtype}", is_causal=is_causal, deterministic=is_causal)


@pytest.mark.parametrize(
    ("window", "is_causal"),
    [
        ((0, 0), False),
        ((40, 0), False),
        ((40, 3), True),
        ((5, -1), True),
        ((-1, 2), False),
        ((1000, 1000), False),
    ],
    ids=str,
)
def test_windows(device, window, is_causal, head_dim):
    random.seed(torch.initial_seed())
    lengths = [*mixed_lengths()[:7], (250, 400), (400, 250)]
    packed = Packed(device, lengths, (4, 2), head_dim)
    packed.check(
        f"{lengths}",
        is_causal=is_causal,
        window_left=window[0],
        window_right=window[1],
        deterministic=is_causal,
    )


def test_seqused_k(device, head_dim):
    """Keys that do not take part are NaN, move the diagonal, and get gradient 0."""
    lengths = [(70, 200), (65, 65), (1, 129), (0, 5), (128, 128), (30, 300)]
    for dtype in dtypes_of(device):
        packed = Packed(
            device, lengths, (4, 2), head_dim, dtype, used=[130, 0, 129, 5, 127, 1],
            padding=(0, 9),
        )  # fmt: skip
        for is_causal in (False, True):
            packed.check(f"{dtype}", is_causal=is_causal, deterministic=not is_causal)


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.3], ids=str)
def test_scales(device, scale):
    packed = Packed(device, [(70, 90), (0, 4), (130, 65)], (4, 2))
    packed.check(scale=scale, is_causal=True)


def test_random_lengths(device):
    """Many batches, small ones of long sequences and large ones of short sequences."""
    random.seed(torch.initial_seed())
    for _ in range(8 if device == "cuda" else 3):
        longest = random.choice([3, 40, 150, 600])
        count = random.randint(1, 6 if longest > 150 else 12)
        lengths = [(random.randint(0, longest), random.randint(0, longest)) for _ in range(count)]
        packed = Packed(
            device, lengths, random.choice([(1, 1), (4, 2), (8, 1)]),
            random.choice([64, 96, 128, 256]), random.choice(HALF),
            padding=(random.choice([0, 7]), random.choice([0, 1, 100])),
        )  # fmt: skip
        options = {"is_causal": random.random() < 0.5}
        if random.random() < 0.5:
            options["window_left"] = random.randint(0, 200)
        packed.check(f"{lengths}", deterministic=random.random() < 0.5, **options)


@pytest.mark.parametrize("count", [1, 31, 33, 1100, 5000])
def test_many_short_sequences(device, count):
    """More than a warp and a CTA take at once when the list of tiles is made."""
    random.seed(torch.initial_seed())
    lengths = [(random.randint(0, 3), random.randint(0, 3)) for _ in range(count)]
    packed = Packed(device, lengths, (2, 1), 64, padding=(0, 1))
    out, lse = packed.forward(is_causal=True)
    gradients = packed.backward(out, lse, is_causal=True)
    # All of one pair of lengths together are a batch, which the other tests compare.
    for seqlen_q in range(1, 4):
        for seqlen_k in range(1, 4):
            chosen = [b for b, pair in enumerate(lengths) if pair == (seqlen_q, seqlen_k)]
            if not chosen:
                continue

            def rows(tensor, begins, length, chosen=chosen):
                found = [tensor[begins[b] : begins[b] + length] for b in chosen]
                return torch.stack(found).transpose(1, 2)

            q = rows(packed.query, packed.starts_q, seqlen_q)
            k, v = (rows(x, packed.starts_k, seqlen_k) for x in (packed.key, packed.value))
            g = rows(packed.grad_out, packed.starts_q, seqlen_q)
            expected = torch.ops.fa.forward(q, k, v, None, True, bottom_right=True)
            close(rows(out, packed.starts_q, seqlen_q), expected[0], out.dtype)
            expected = torch.ops.fa.backward(g, q, k, v, *expected, None, True, bottom_right=True)
            for ours, begins, length, dense in zip(
                gradients,
                (packed.starts_q, packed.starts_k, packed.starts_k),
                (seqlen_q, seqlen_k, seqlen_k),
                expected,
                strict=True,
            ):
                close(rows(ours, begins, length), dense, out.dtype)


def compare_with_batch(device, sequences, seqlen, heads, head_dim, is_causal, **options):
    """Packed sequences of one length, beside the operators for a batch."""
    heads_q, heads_k = heads
    dense = [
        randn(sequences, seqlen, h, head_dim, device=device)
        for h in (heads_q, heads_k, heads_k, heads_q)
    ]
    query, key, value, grad_out = (x.flatten(0, 1) for x in dense)
    cu_seqlens = int32(starts([seqlen] * sequences), device)
    out, lse = forward_varlen(query, key, value, cu_seqlens, cu_seqlens, is_causal)
    batch = [x.transpose(1, 2) for x in dense]
    expected, expected_lse = torch.ops.fa.forward(*batch[:3], None, is_causal)
    close(out, expected.transpose(1, 2).flatten(0, 1), out.dtype)
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-3)
    gradients = backward_varlen(
        grad_out, query, key, value, out, lse, cu_seqlens, cu_seqlens, is_causal, **options
    )
    expected = torch.ops.fa.backward(batch[3], *batch[:3], expected, expected_lse, None, is_causal)
    for ours, other in zip(gradients, expected, strict=True):
        close(ours, other.transpose(1, 2).flatten(0, 1), out.dtype)


@pytest.mark.parametrize("seqlen", [1, 64, 200, 513])
def test_equal_lengths(device, seqlen, head_dim):
    """A batch, packed."""
    for is_causal in (False, True):
        compare_with_batch(device, 3, seqlen, (4, 2), head_dim, is_causal)


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_lengths_in_sections(cuda, deterministic):
    """So many rows that the backward's list of tiles has eleven sections, of 256 rows."""
    for is_causal in (False, True):
        compare_with_batch(cuda, 11, 250, (64, 1), 256, is_causal, deterministic=deterministic)


# --- Neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_poisoned_neighbours(device, poison, head_dim):
    """NaN and infinity in every other sequence: the bits of the others do not change."""
    lengths = [(70, 70), (1, 1), (129, 200), (64, 64), (33, 33), (200, 129), (65, 1), (300, 310)]
    for dtype in dtypes_of(device):
        packed = Packed(device, lengths, (4, 2), head_dim, dtype)
        for parity in range(2):
            for is_causal in (False, True):
                options = {"is_causal": is_causal}
                kept = [x.clone() for x in (*packed.tensors, packed.grad_out)]
                expected = packed.forward(**options)
                expected += packed.backward(*expected, deterministic=True, **options)
                for b in range(parity, len(lengths), 2):
                    for tensor in (packed.query, packed.grad_out):
                        packed.queries(tensor, b).fill_(poison)
                    for tensor in (packed.key, packed.value):
                        packed.keys(tensor, b).fill_(poison)
                results = packed.forward(**options)
                results += packed.backward(*results, deterministic=True, **options)
                (out, lse, *gradients), expected = (
                    [x.cpu() for x in r] for r in (results, expected)
                )
                for b in range(1 - parity, len(lengths), 2):
                    begin, end = packed.starts_q[b : b + 2]
                    assert torch.equal(lse[:, begin:end], expected[1][:, begin:end])
                    for ours, other in ((out, expected[0]), (gradients[0], expected[2])):
                        assert torch.equal(packed.queries(ours, b), packed.queries(other, b))
                    for ours, other in zip(gradients[1:], expected[3:], strict=True):
                        assert torch.equal(packed.keys(ours, b), packed.keys(other, b))
                for tensor, old in zip((*packed.tensors, packed.grad_out), kept, strict=True):
                    tensor.copy_(old)


def test_nan_shows_in_its_own_sequence(device):
    packed = Packed(device, [(70, 70), (65, 65), (30, 30)])
    packed.value[80] = torch.nan
    out, _ = packed.forward()
    assert out[70:135].isnan().all() and not out[:70].isnan().any()
    assert not out[135:].isnan().any()


# --- Layouts --------------------------------------------------------------------------------------

LAYOUTS = {
    "heads first": lambda t, h, d, **o: randn(h, t, d, **o).transpose(0, 1),
    "fused": lambda t, h, d, **o: randn(t, 3, h, d, **o)[:, 1],
    "columns of a wider tensor": lambda t, h, d, **o: randn(t, h, d + 24, **o)[..., 5 : 5 + d],
    "every second row": lambda t, h, d, **o: randn(2 * t, h, d, **o)[::2],
    "every second column": lambda t, h, d, **o: randn(t, h, 2 * d, **o)[..., ::2],
    "last dimension outside": lambda t, h, d, **o: randn(d, t, h, **o).permute(1, 2, 0),
    "odd offset": lambda t, h, d, **o: randn(1 + t * h * d, **o)[1:].view(t, h, d),
    "rows of a longer tensor": lambda t, h, d, **o: randn(t + 90, h, d, **o)[40 : 40 + t],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_layouts(device, layout, head_dim):
    packed = Packed(
        device, [(70, 65), (0, 3), (129, 200)], (4, 2), head_dim, padding=(2, 5),
        new=LAYOUTS[layout],
    )  # fmt: skip
    packed.check(layout, is_causal=True)


def test_one_head_for_all(device):
    """Expanded tensors: stride 0."""
    packed = Packed(device, [(70, 65), (129, 200)], (4, 4))
    packed.key, packed.value = (x[:, :1].expand(-1, 4, -1) for x in (packed.key, packed.value))
    packed.grad_out = packed.grad_out[:1, :1, :1].expand(packed.query.shape)
    packed.check(is_causal=True)


@pytest.mark.parametrize("total", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("sequences", [0, 1, 3])
def test_nothing(device, total, sequences):
    """No row, no key, no sequence."""
    packed = Packed(device, [(0, 0)] * sequences, padding=(0, 0))
    options = {"device": device, "dtype": torch.bfloat16}
    packed.query = packed.grad_out = torch.ones(total[0], 2, 64, **options)
    packed.key = packed.value = torch.ones(total[1], 2, 64, **options)
    packed.check()
    for heads in ((0, 0), (0, 2)):
        query, key = (torch.ones(3, h, 64, **options).requires_grad_() for h in heads)
        cu_seqlens = int32([0, 3], device)
        flash_attn_varlen_func(query, key, key, cu_seqlens, cu_seqlens).sum().backward()
        assert (key.grad == 0).all()


def test_padding_alone(device):
    """A batch of no sequences, and of empty ones: everything is padding."""
    for sequences in (0, 3):
        packed = Packed(device, [(0, 0)] * sequences, padding=(100, 150))
        packed.check()


# --- Lengths on the device ------------------------------------------------------------------------


@pytest.fixture
def cuda(device):
    if device == "cpu":
        pytest.skip("CUDA only")
    return device


def test_wrong_lengths_on_the_cpu():
    query, key = torch.ones(10, 2, 16), torch.ones(12, 2, 16)
    right = int32([0, 4, 10], "cpu")
    for wrong, message in (
        ([0, 4, 11], "cu_seqlens_q: must ascend from 0 to at most the 10 rows of query, got 11"),
        ([-1, 4, 10], "cu_seqlens_q: must ascend .*, got -1 after 0 at 0"),
        ([0, 7, 4], "cu_seqlens_q: must ascend .*, got 4 after 7 at 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward_varlen(query, key, key, int32(wrong, "cpu"), right)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_k: must ascend .* 12 rows of key, got 13"):
        forward_varlen(query, key, key, right, int32([0, 4, 13], "cpu"))
    for used in ([4, 7], [-1, 0]):
        with pytest.raises(RuntimeError, match="seqused_k: must be 0 to the keys of the sequence"):
            forward_varlen(query, key, key, right, right, seqused_k=int32(used, "cpu"))


def test_wrong_lengths_on_cuda(cuda, head_dim):
    """Those that lead out of the tensors are clamped; whatever they are, nothing outside of the
    results is written, and no call hangs."""
    options = {"device": cuda, "dtype": torch.float16}
    tensors = [randn(200, h, head_dim, **options) for h in (4, 2, 2, 4)]
    outside = [
        ([0, 100, 600], [0, 100, 200]),
        ([-50, 100, 2**31 - 1], [0, 100, 200]),
        ([-(2**31), 300, 400], [0, 200, 200]),
    ]
    for wrong, right in outside:
        wrong, right = int32(wrong, cuda), int32(right, cuda)
        used = int32([-4, 1000], cuda)
        used_right = (right.diff().clamp(min=0) * int32([0, 1], cuda)).int()
        results = []
        for lengths, seqused_k in ((wrong, used), (right, used_right)):
            out, lse = forward_varlen(*tensors[:3], lengths, lengths, True, seqused_k=seqused_k)
            gradients = backward_varlen(
                tensors[3], *tensors[:3], out, lse, lengths, lengths, True, seqused_k=seqused_k,
                deterministic=True,
            )  # fmt: skip
            results.append((out, lse, *gradients))
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)
    for wrong in ([0, 150, 50, 200], [200, 0, 200, 0], [0] + [200, 0] * 40):
        lengths = int32(wrong, cuda)
        out, lse = forward_varlen(*tensors[:3], lengths, lengths)
        for deterministic in (False, True):
            backward_varlen(
                tensors[3], *tensors[:3], out, lse, lengths, lengths, deterministic=deterministic
            )
    torch.cuda.synchronize()


def test_graph_with_new_lengths(cuda, head_dim):
    """Captured once, replayed with other lengths, numbers and padding."""
    random.seed(torch.initial_seed())
    packed = Packed(cuda, [(100, 60), (200, 140), (0, 0)], (4, 2), head_dim, padding=(0, 100))
    options = {"is_causal": True, "deterministic": True}

    def step():
        out, lse = packed.forward(is_causal=True)
        return out, lse, *packed.backward(out, lse, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    cu_seqlens_q, cu_seqlens_k = packed.cu_seqlens_q, packed.cu_seqlens_k
    for lengths in ([(1, 1), (64, 65), (300, 200)], [(400, 300), (0, 0), (0, 0)], [(0, 0)] * 3):
        rest = 400 - sum(q for q, _ in lengths), 300 - sum(k for _, k in lengths)
        fresh = Packed(cuda, lengths, (4, 2), head_dim)
        for ours, other, missing in zip(
            (*packed.tensors, packed.grad_out), (*fresh.tensors, fresh.grad_out),
            (rest[0], rest[1], rest[1], rest[0]), strict=True,
        ):  # fmt: skip
            ours.copy_(torch.nn.functional.pad(other, (0, 0, 0, 0, 0, missing), value=torch.nan))
        cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        cu_seqlens_k.copy_(fresh.cu_seqlens_k)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        expected = fresh.check(f"{lengths}", **options)
        total_q, total_k = fresh.query.shape[0], fresh.key.shape[0]
        assert torch.equal(results[1][:, :total_q], expected[1])
        assert (results[1][:, total_q:] == -torch.inf).all()
        for i, total in ((0, total_q), (2, total_q), (3, total_k), (4, total_k)):
            assert torch.equal(results[i][:total], expected[i])
            assert (results[i][total:] == 0).all()


def test_no_host_synchronisation(cuda):
    packed = Packed(cuda, [(100, 60), (0, 4), (300, 140)], (4, 2), used=[60, 0, 100])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            out, lse = forward_varlen(*packed.arguments, True, seqused_k=packed.seqused_k)
            for deterministic in (False, True):
                backward_varlen(
                    packed.grad_out, *packed.tensors, out, lse, packed.cu_seqlens_q,
                    packed.cu_seqlens_k, True, seqused_k=packed.seqused_k,
                    deterministic=deterministic,
                )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_causal", [False, True])
def test_deterministic(device, head_dim, is_causal):
    """Thirty runs, bit by bit."""
    lengths = [(900, 900), (65, 700), (700, 65), (1, 1), (300, 300)]
    if device == "cpu":
        lengths = lengths[2:]
    packed = Packed(device, lengths, (4, 2), head_dim)
    out, lse = packed.forward(is_causal=is_causal)
    first = packed.check_gradients(out, lse, deterministic=True, is_causal=is_causal)
    for _ in range(30 if device == "cuda" else 2):
        again = packed.forward(is_causal=is_causal)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        gradients = packed.backward(out, lse, is_causal=is_causal, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("head_dim", [60, 64, 127, 128, 256])
def test_deterministic_turns_in_every_order_of_work(cuda, window_left, head_dim):
    """Tiles come longest first, and turns in the order of keys: where later keys have more rows to
    see them, no CTA may wait for one that has not started."""
    lengths = [(2000, 200), (200, 4000), (3000, 3000), (64, 5000), (5000, 64)]
    packed = Packed(cuda, lengths, (16, 8), head_dim)
    for options in ({"is_causal": True}, {"window_right": 5}, {}):
        options = options | {"window_left": window_left}
        out, lse = packed.forward(**options)
        first = packed.backward(out, lse, deterministic=True, **options)
        plain = packed.backward(out, lse, **options)
        for a, b in zip(first, plain, strict=True):
            close(a, b, torch.bfloat16)
