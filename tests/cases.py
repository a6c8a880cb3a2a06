"""The inputs of the forward tests: what varies, how it is built, and the lists of cases."""

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
HALF = (torch.float16, torch.bfloat16)
# What each backend computes in.
DTYPES = {"cpu": (*HALF, torch.float32, torch.float64), "cuda": HALF}

UNLIMITED = -1


def randn(*shape, device, dtype=torch.float16):
    """Normal numbers: the same on every device, but for tensors that are long to draw on a CPU."""
    large = math.prod(shape) > 2**24
    return torch.randn(shape, device=device if large else "cpu").to(dtype).to(device)


def qkv(heads, seqlens, head_dim, *, device, batch=1, dtype=torch.float16):
    """query, key, value for heads and lengths (of query, of key and value)."""
    (heads_q, heads_k), (seqlen_q, seqlen_k) = heads, seqlens
    return [
        randn(batch, h, s, head_dim, device=device, dtype=dtype)
        for h, s in ((heads_q, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k))
    ]


@dataclass(frozen=True)
class Case:
    """One call of fa::forward, up to the random numbers in its tensors."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # of query, of key and value
    # Of query, of key and value: more rows than the decoding kernels take.
    seqlens: tuple[int, int] = (129, 193)
    head_dim: int = 64
    # kind-dims[-memory] as in build_mask, for example "bool-b11k" or "own-bhqk-transposed"
    mask: str | None = None
    is_causal: bool = False
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    bottom_right: bool = False
    scale: float | None = None
    layout: str = "contiguous"  # a key of LAYOUTS
    values: str = "normal"  # a key of VALUES

    @property
    def id(self):
        (heads_q, heads_k), (seqlen_q, seqlen_k) = self.heads, self.seqlens
        parts = [
            DTYPE_NAMES[self.dtype],
            f"B{self.batch}",
            f"H{heads_q}" if heads_q == heads_k else f"H{heads_q}.{heads_k}",
            f"S{seqlen_q}.{seqlen_k}",
            f"D{self.head_dim}",
        ]
        if self.is_causal:
            parts.append("causal")
        if self.window != (UNLIMITED, UNLIMITED):
            parts.append("window{}.{}".format(*self.window))
        if self.bottom_right:
            parts.append("bottomright")
        if self.mask is not None:
            parts.append(self.mask)
        if self.scale is not None:
            parts.append(f"scale{self.scale:g}")
        parts += [name for name in (self.layout, self.values) if name not in DEFAULT_NAMES]
        return "-".join(parts)

    @property
    def options(self):
        """The keyword arguments of fa::forward, without the mask."""
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "window_left": self.window[0],
            "window_right": self.window[1],
            "bottom_right": self.bottom_right,
        }

    def build(self, device):
        """query, key, value, attn_mask. The random numbers are the same on every device."""
        (heads_q, heads_k), (seqlen_q, seqlen_k) = self.heads, self.seqlens
        query, key, value = VALUES[self.values](
            (self.batch, heads_q, seqlen_q, self.head_dim),
            (self.batch, heads_k, seqlen_k, self.head_dim),
        )
        tensors = lay_out(*(x.to(self.dtype) for x in (query, key, value)), self.layout)
        mask = None
        if self.mask is not None:
            mask = build_mask(self.mask, self.dtype, self.batch, heads_q, seqlen_q, seqlen_k)
        return [x if x is None else to_device(x, device) for x in (*tensors, mask)]


def to_device(x, device):
    """The tensor on another device with strides, offset and surroundings as they are."""
    if torch.device(device).type == "cpu":
        return x
    surroundings = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return surroundings.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


# Values: how query, key and value are drawn, given the shape of query and that of the other two.


def normal(shape_q, shape_k):
    # The shift makes a lost sign or a lost term visible.
    return [torch.randn(shape) + 0.5 for shape in (shape_q, shape_k, shape_k)]


def wide(shape_q, shape_k):
    return [3 * torch.randn(shape) for shape in (shape_q, shape_k, shape_k)]


def constant_256(shape_q, shape_k):
    """Products of 2^16 * head_dim overflow float16."""
    return torch.full(shape_q, 256.0), torch.full(shape_k, 256.0), torch.randn(shape_k)


def directed(shape_q, shape_k, logits):
    """A query along one direction and keys such that key j has about the scaled logit logits[j]."""
    head_dim = shape_q[-1]
    query = torch.ones(shape_q)
    key = (logits / math.sqrt(head_dim))[:, None] + 0.01 * torch.randn(shape_k)
    return query, key, torch.randn(shape_k) + 0.5


def cold(shape_q, shape_k):
    """All logits about -120: exp of them underflows float32, softmax does not care."""
    return directed(shape_q, shape_k, torch.full((shape_k[2],), -120.0))


def rising(shape_q, shape_k):
    """The running maximum of an online softmax rises with every key."""
    return directed(shape_q, shape_k, 0.5 * torch.arange(shape_k[2]) - 100.0)


def falling(shape_q, shape_k):
    """The first key has the maximum."""
    return directed(shape_q, shape_k, 100.0 - 0.5 * torch.arange(shape_k[2]))


def stairs_up(shape_q, shape_k):
    """Tile after tile has larger scores, by amounts from small to more than a float16 can hold."""
    logits = (16 * torch.rand(shape_k[2] // 32 + 1)).cumsum(0).repeat_interleave(32)
    return directed(shape_q, shape_k, logits[: shape_k[2]])


def stairs_down(shape_q, shape_k):
    query, key, value = stairs_up(shape_q, shape_k)
    return query, key.flip(2), value


def outlier(shape_q, shape_k):
    tensors = normal(shape_q, shape_k)
    for x in tensors:
        x.view(-1)[x.numel() // 2] = 1000.0
    return tensors


def tiny(shape_q, shape_k):
    """Subnormal numbers in float16."""
    return [2e-6 * torch.randn(shape) for shape in (shape_q, shape_k, shape_k)]


def zeros(shape_q, shape_k):
    return [torch.zeros(shape) for shape in (shape_q, shape_k, shape_k)]


VALUES = {
    "normal": normal,
    "wide": wide,
    "constant256": constant_256,
    "cold": cold,
    "rising": rising,
    "falling": falling,
    "stairs_up": stairs_up,
    "stairs_down": stairs_down,
    "outlier": outlier,
    "tiny": tiny,
    "zeros": zeros,
}


# Layouts: where the same values lie in memory. All that surrounds them is NaN.


def embed(x, order=(0, 1, 2, 3), margin=(0, 0, 0, 0), offset=0, step=1):
    """A view equal to x in NaN-filled memory.

    order: the dimensions from the outermost to the innermost in memory. margin: elements of NaN on
    both sides of each dimension of x. offset: elements in front of all. step: stride of the
    innermost dimension.
    """
    sizes = [x.shape[d] + 2 * margin[d] for d in order]
    sizes[-1] *= step
    memory = torch.full((offset + math.prod(sizes),), torch.nan, dtype=x.dtype)
    view = memory[offset:].view(sizes)[..., ::step]
    for i, d in enumerate(order):
        view = view.narrow(i, margin[d], x.shape[d])
    view = view.permute([order.index(d) for d in range(4)])
    return view.copy_(x)


def embed_all(**options):
    return lambda *tensors: [embed(x, **options) for x in tensors]


def packed_qkv(query, key, value):
    """Views of one tensor [batch, seqlen, heads_q + 2 heads_k, head_dim], as a fused projection
    writes it. Lengths that differ are padded with NaN."""
    seqlen = max(query.shape[2], key.shape[2])
    heads = [x.shape[1] for x in (query, key, value)]
    packed = query.new_full((query.shape[0], seqlen, sum(heads), query.shape[3]), torch.nan)
    views = [
        part.transpose(1, 2)[:, :, : x.shape[2]]
        for part, x in zip(packed.split(heads, dim=2), (query, key, value), strict=True)
    ]
    return [view.copy_(x) for view, x in zip(views, (query, key, value), strict=True)]


def kv_cache(query, key, value):
    """Key and value are the filled part of a longer cache."""
    cache = [
        key.new_full((*x.shape[:2], 2 * x.shape[2] + 3, x.shape[3]), torch.nan)[
            :, :, : x.shape[2]
        ].copy_(x)
        for x in (key, value)
    ]
    return [query, *cache]


def padded_rows(query, key, value):
    """Rows begin at multiples of 16 bytes, and NaN lies between the end of one and the next."""
    padded = [
        x.new_full((*x.shape[:3], -(-x.shape[3] // 8) * 8 + 8), torch.nan)
        for x in (query, key, value)
    ]
    return [p[..., : x.shape[3]].copy_(x) for p, x in zip(padded, (query, key, value), strict=True)]


def stride0_heads(query, key, value):
    return [query, *(x[:, :1].expand(x.shape) for x in (key, value))]


def stride0_batch(query, key, value):
    return [x[:1].expand(x.shape) for x in (query, key, value)]


def stride0_rows(query, key, value):
    return [query, *(x[:, :, :1].expand(x.shape) for x in (key, value))]


def stride0_head_dim(query, key, value):
    return [x[..., :1].expand(x.shape) for x in (query, key, value)]


def overlapping_rows(query, key, value):
    """Row j of key and value starts one element after row j - 1."""
    tensors = [query]
    for x in (key, value):
        batch, heads, seqlen, head_dim = x.shape
        row = seqlen + head_dim
        memory = torch.randn(batch * heads * row).to(x.dtype)
        tensors.append(memory.as_strided(x.shape, (heads * row, row, 1, 1)))
    return tensors


def same_tensor(query, key, value):
    return [query, query, query]


LAYOUTS = {
    "contiguous": embed_all(),
    "bshd": embed_all(order=(0, 2, 1, 3)),
    "sbhd": embed_all(order=(2, 0, 1, 3)),
    "transposed": embed_all(order=(0, 1, 3, 2)),  # the stride of head_dim is not 1
    "channels_last": embed_all(order=(0, 2, 3, 1)),
    "step2": embed_all(step=2),
    "surrounded": embed_all(margin=(1, 1, 3, 8)),
    "surrounded_odd": embed_all(margin=(1, 1, 1, 3)),  # rows start anywhere
    **{f"offset{n}": embed_all(offset=n) for n in range(1, 8)},
    "bshd_offset4": embed_all(order=(0, 2, 1, 3), margin=(0, 0, 1, 0), offset=4),
    "padded_rows": padded_rows,
    "packed_qkv": packed_qkv,
    "kv_cache": kv_cache,
    "stride0_heads": stride0_heads,
    "stride0_batch": stride0_batch,
    "stride0_rows": stride0_rows,
    "stride0_head_dim": stride0_head_dim,
    "overlapping_rows": overlapping_rows,
    "same_tensor": same_tensor,
    "mixed": lambda q, k, v: [
        embed(q, order=(0, 1, 3, 2)),
        embed(k, order=(0, 2, 1, 3), offset=1),
        embed(v, margin=(0, 0, 0, 5)),
    ],
}

DEFAULT_NAMES = ("contiguous", "normal")


def lay_out(query, key, value, layout):
    return LAYOUTS[layout](query, key, value)


# Masks


def build_mask(spec, dtype, batch, heads, seqlen_q, seqlen_k):
    """The mask that a spec "kind-dims" or "kind-dims-memory" names.

    kind: bool; own and f32, additive in dtype or float32, with -inf; bias, additive in dtype
    without -inf; lowest, 0 or the lowest finite number of dtype. dims: one letter per dimension,
    its size (b, h, q, k) or 1 for a broadcast one; "0" for a mask without dimensions. memory:
    expanded (every dimension at full size, broadcast ones with stride 0), transposed, step2, or
    inside, a slice of a larger tensor with rows at odd addresses.
    """
    kind, dims, memory = (*spec.split("-"), "plain")[:3]
    sizes = {"b": batch, "h": heads, "q": seqlen_q, "k": seqlen_k, "1": 1}
    shape = [sizes[letter] for letter in dims.strip("0")]
    # Keys come in runs, so that whole tiles are hidden in some rows and whole rows in some heads.
    visible = torch.rand(shape) > 0.3
    if shape and shape[-1] > 1:
        first, last = sorted(random.Random(spec).sample(range(shape[-1] + 1), 2))
        visible[..., first:last] &= torch.rand([*shape[:-1], 1]) > 0.5
        rows = visible.view(-1, shape[-1])
        rows[3::7] = False
    if kind == "bool":
        mask = visible
    elif kind == "lowest":
        mask = torch.zeros(shape, dtype=dtype).where(visible, torch.finfo(dtype).min)
    else:
        mask = 2 * torch.randn(shape)
        if kind != "bias":
            mask = mask.where(visible, -torch.inf)
        mask = mask.to(torch.float32 if kind == "f32" else dtype)
    if memory == "expanded":
        mask = mask.expand(batch, heads, seqlen_q, seqlen_k)
    elif memory == "transposed":
        mask = mask.mT.contiguous().mT
    elif memory == "step2":
        mask = torch.stack([mask, ~mask if kind == "bool" else mask + 1], dim=-1)[..., 0]
    elif memory == "inside":
        poison = True if kind == "bool" else torch.nan
        larger = mask.new_full([n + 3 for n in shape], poison)
        inside = larger[tuple(slice(1, n + 1) for n in shape)]
        mask = inside.copy_(mask)
    return mask


# The lists. Every one is a plain list of cases, the same in every run.

BANDS = (
    {},
    {"is_causal": True},
    {"is_causal": True, "bottom_right": True},
    {"window": (7, 11)},
    {"window": (100, UNLIMITED), "bottom_right": True},
    {"window": (UNLIMITED, 40)},
    {"window": (0, 0), "bottom_right": True},
    {"window": (130, 70), "is_causal": True},
)
LENGTH_PAIRS = (
    (1, 1),
    (64, 128),
    (113, 203),
    (239, 1),
    (1, 799),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
)
LENGTHS = (
    *(1, 2, 3, 9, 15, 33, 63, 64, 65, 88, 127, 128, 129, 137, 192, 257, 441, 448, 503, 513, 704),
    *(1001, 1025, 4095, 4096, 4097),
)
HEADS = (
    *((1, 1), (8, 2), (9, 3), (12, 2), (14, 2), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8)),
    *((64, 4), (64, 8), (5, 1), (6, 1), (64, 1)),
)
HEAD_DIMS = (1, 8, 16, 33, 40, 64, 72, 80, 96, 128, 192, 256)
MASK_DIMS = (
    *("bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "1h1k", "1hq1", "b11k", "b1q1", "bh11"),
    *("111k", "11q1", "1h11", "b111", "1111", "hqk", "qk", "1k", "q1", "k", "1", "0"),
)


def alternate(values):
    return itertools.cycle(values)


def smoke():
    """The features and sizes, each with few others."""
    dtypes, heads = alternate(HALF), alternate(((2, 2), (4, 2), (3, 1)))
    head_dims = alternate((64, 128, 256, 96, 40))
    for seqlens in LENGTH_PAIRS:
        large = seqlens[0] * seqlens[1] > 2**18
        for band in BANDS[: 3 if seqlens == (2048, 2048) else None]:
            yield Case(
                dtype=next(dtypes),
                batch=1 if large else 2,
                heads=(2, 1) if large else next(heads),
                seqlens=seqlens,
                head_dim=next(head_dims),
                **band,
            )
    for head_dim in HEAD_DIMS:
        for dtype in HALF:
            yield Case(dtype=dtype, head_dim=head_dim)
            yield Case(dtype=dtype, head_dim=head_dim, is_causal=True, mask="own-b1qk")
    for pair in HEADS:
        yield Case(dtype=next(dtypes), heads=pair, seqlens=(70, 150), is_causal=True, batch=1)
        yield Case(dtype=next(dtypes), heads=pair, seqlens=(1, 90), mask="bool-b11k")
    for kind in ("bool", "own", "f32"):
        for dims in MASK_DIMS:
            mask = f"{kind}-{dims}"
            yield Case(dtype=next(dtypes), heads=(4, 2), seqlens=(70, 200), head_dim=40, mask=mask)
    for seqlen in LENGTHS:
        if seqlen <= 1025:
            other = alternate((64, 1, 200))
            yield Case(dtype=next(dtypes), seqlens=(seqlen, seqlen), batch=1)
            yield Case(dtype=next(dtypes), seqlens=(next(other), seqlen), is_causal=True)
            yield Case(dtype=next(dtypes), seqlens=(seqlen, next(other)), bottom_right=True)


def edge():
    """Layouts, unusual masks, windows, scales and values, empty tensors."""
    dtypes = alternate(HALF)
    # Layouts
    for layout in LAYOUTS:
        if layout not in ("contiguous", "same_tensor"):
            for head_dim in (64, 72, 128):
                case = Case(next(dtypes), heads=(4, 2), layout=layout, head_dim=head_dim)
                yield dataclasses.replace(case, seqlens=(66, 66), is_causal=head_dim == 64)
            yield dataclasses.replace(case, head_dim=33, mask="bool-1h1k")
    yield Case(next(dtypes), seqlens=(130, 130), layout="same_tensor", is_causal=True)
    for head_dim in (1, 3):
        yield Case(next(dtypes), seqlens=(2, 1), head_dim=head_dim, layout="step2")
    for head_dim in (1, 7, 65, 100, 129, 250, 255):
        for layout in ("padded_rows", "surrounded_odd"):
            yield Case(next(dtypes), head_dim=head_dim, layout=layout, is_causal=head_dim > 100)
    # Masks
    for kind in ("bool", "own", "f32", "bias", "lowest"):
        for memory in ("expanded", "transposed", "step2", "inside"):
            case = Case(next(dtypes), heads=(4, 2), seqlens=(77, 139))
            yield dataclasses.replace(case, mask=f"{kind}-bhqk-{memory}")
            if memory != "transposed":
                yield dataclasses.replace(case, mask=f"{kind}-b11k-{memory}", is_causal=True)
        for band in BANDS:
            yield Case(next(dtypes), seqlens=(150, 133), mask=f"{kind}-b1qk", **band)
        yield Case(next(dtypes), seqlens=(300, 700), mask=f"{kind}-b1qk", batch=1, head_dim=128)
    # Windows and corners: one-sided, of no width, wider than all keys, beside all keys
    huge = 2**63 - 1
    for window in ((0, 0), (5, 0), (0, 5), (-1, 3), (3, -1), (64, 64), (1000, 1000), (huge, huge)):
        for seqlens in ((40, 300), (300, 40), (129, 129)):
            for bottom_right in (False, True):
                yield Case(
                    next(dtypes), window=window, seqlens=seqlens, bottom_right=bottom_right, batch=1
                )
    for seqlens in ((1, 5), (2, 5), (5, 2), (200, 100), (100, 200), (1, 400), (400, 1)):
        for bottom_right in (False, True):
            yield Case(next(dtypes), is_causal=True, seqlens=seqlens, bottom_right=bottom_right)
    # Scales
    for scale in (0.0, 1.0, -0.3, 1e-3, 4.0):
        yield Case(next(dtypes), scale=scale)
        yield Case(next(dtypes), scale=scale, is_causal=True, mask="own-b1qk", head_dim=40)
    # Values
    for values in VALUES:
        yield Case(torch.float16, values=values, seqlens=(65, 704), batch=1)
        yield Case(torch.bfloat16, values=values, seqlens=(704, 704), is_causal=True, batch=1)
        yield Case(next(dtypes), values=values, mask="f32-b1qk", head_dim=40)
    # Empty
    for seqlens in ((0, 0), (0, 5), (5, 0), (200, 0)):
        for mask in (None, "bool-bhqk", "own-11qk"):
            yield Case(next(dtypes), seqlens=seqlens, mask=mask, is_causal=mask is None)
    yield Case(next(dtypes), batch=0)
    yield Case(next(dtypes), batch=0, mask="bool-bhqk")
    yield Case(next(dtypes), heads=(0, 0))
    # Many batches and heads
    yield Case(next(dtypes), batch=70, heads=(12, 3), seqlens=(5, 17), head_dim=8, is_causal=True)


def cpu_dtypes():
    """What the CPU computes in besides the half types: each feature in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        for band, seqlens in zip(BANDS, LENGTH_PAIRS, strict=True):
            if math.prod(seqlens) <= 2**18:
                yield Case(dtype, seqlens=seqlens, heads=(4, 2), **band)
            else:
                yield Case(dtype, seqlens=(seqlens[0] // 4, seqlens[1] // 4), **band)
        for head_dim in HEAD_DIMS:
            yield Case(dtype, head_dim=head_dim, is_causal=True)
        for kind in ("bool", "own", "lowest"):
            for dims in ("bhqk", "b11k", "1hq1", "qk", "0"):
                yield Case(dtype, heads=(4, 2), mask=f"{kind}-{dims}", head_dim=40)
            yield Case(dtype, mask=f"{kind}-b1qk", is_causal=True, seqlens=(150, 133))
        for layout in LAYOUTS:
            seqlens = (66, 66)
            heads = (2, 2) if layout == "same_tensor" else (4, 2)
            yield Case(dtype, layout=layout, heads=heads, seqlens=seqlens, head_dim=40)
        for values in VALUES:
            yield Case(dtype, values=values, seqlens=(70, 300))
        for scale in (0.0, -0.3):
            yield Case(dtype, scale=scale)


def full():
    """Each length, head pair and head_dim of the sweeps with all else drawn at random."""
    draw = random.Random(0)
    masks = (
        None,
        None,
        *(f"{kind}-{dims}" for kind in ("bool", "own", "f32") for dims in MASK_DIMS),
    )
    layouts = [name for name in LAYOUTS if name != "same_tensor"]

    def drawn(**fixed):
        free = {
            "dtype": draw.choice(HALF),
            "batch": draw.choice((1, 2, 3)),
            "heads": draw.choice(((1, 1), (3, 3), (4, 2), (6, 1), (8, 2))),
            "seqlens": (draw.choice(LENGTHS[:23]), draw.choice(LENGTHS[:23])),
            "head_dim": draw.choice(HEAD_DIMS),
            "mask": draw.choice(masks) if draw.random() < 0.7 else None,
            "layout": draw.choice(layouts),
            "scale": draw.choice((None, None, None, 0.2, -0.1)),
            "values": draw.choice(("normal", "normal", "wide", "cold", "rising", "stairs_down")),
            **draw.choice(BANDS),
        }
        return Case(**{**free, **fixed})

    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        large = seqlen_q * seqlen_k > 2**20
        fixed = {"batch": 1, "heads": (2, 1)} if large else {}
        yield drawn(seqlens=(seqlen_q, seqlen_k), **fixed)
    for heads, head_dim in itertools.product(HEADS, HEAD_DIMS):
        yield drawn(heads=heads, head_dim=head_dim, seqlens=(draw.choice((1, 70, 200)), 150))
    for layout, head_dim in itertools.product(layouts, HEAD_DIMS):
        yield drawn(layout=layout, head_dim=head_dim)
    for mask, band in itertools.product(masks, BANDS):
        yield drawn(mask=mask, seqlens=(draw.choice(LENGTHS[:16]), draw.randrange(1, 300)), **band)


def on_devices(cases, devices=("cpu", "cuda")):
    """Parametrizes a test over device and case."""
    return pytest.mark.parametrize(
        "device,case",
        [
            pytest.param(device, case, id=f"{device}-{case.id}")
            for device in devices
            for case in cases
        ],
        indirect=["device"],
    )


SMOKE = list(smoke())
EDGE = list(edge())
CPU_DTYPES = list(cpu_dtypes())
FULL = list(full())
FULL_LENGTHS = sorted({case.seqlens[0] for case in FULL})


def check_full(check_case, device, seqlen_q):
    """All of FULL with this many queries; one test for each would take long to list."""
    failures = []
    for case in FULL:
        if case.seqlens[0] == seqlen_q:
            try:
                check_case(case, device)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)
