"""Hugging Face transformers: this package's attention as ``attn_implementation="fa_ext"``.

    import flashattn_ext.transformers
    flashattn_ext.transformers.register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", attn_implementation="fa_ext")

Owns the translation between the attention contract of transformers 5 and our public functions, and
nothing else. The name has no "flash" in it: transformers sends every name with that word to its own
flash-attn loader.
"""

import torch

from flashattn_ext.interface import _unsupported_reason, scaled_dot_product_attention
from flashattn_ext.varlen import flash_attn_varlen_func

NAME = "fa_ext"

# Terms of some models' attention that the kernels do not have. Dropping one would change the model.
_UNSUPPORTED = ("softcap", "s_aux", "head_mask")


def register() -> str:
    """Make ``attn_implementation="fa_ext"`` known to transformers, and return that name.

    Registers the attention function together with its mask function: for a name without a mask
    function transformers builds no mask at all, and padding would silently be attended to. Call it
    before the model is loaded or before ``model.set_attn_implementation("fa_ext")``; calling it
    again changes nothing.

    Raises:
        ImportError: transformers is missing or older than 5.0.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "flashattn_ext.transformers.register() needs the package transformers, 5.0 or newer, "
            "which is not installed"
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(
            "flashattn_ext.transformers.register() needs transformers 5.0 or newer, "
            f"found {transformers.__version__}"
        )
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention_forward)
    # The mask function of "sdpa": None where causal alone says it all, otherwise a bool mask (True:
    # take part) of shape (batch, 1, seqlen_q, seqlen_k), broadcast by stride where it can be.
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention function in the form that transformers 5 calls.

    Args:
        module: the attention layer; ``module.is_causal`` (default True) counts when ``is_causal``
            is None.
        query: (batch, heads_q, seqlen_q, head_dim).
        key, value: (batch, heads_k, seqlen_k, head_dim); heads_k divides heads_q, never repeated.
        attention_mask: None, bool (True: take part) or additive, broadcast to
            (batch, heads_q, seqlen_q, seqlen_k). When given, neither ``is_causal`` nor
            ``sliding_window`` counts: it holds them already.
        dropout: probability. Above 0 PyTorch's own attention computes the result, with one
            warning.
        scaling: factor on query times key, default head_dim ** -0.5.
        sliding_window: keys a query sees up to its own position, which is included.
        position_bias: added to the scaled scores, broadcast to
            (batch, heads_q, seqlen_q, seqlen_k).
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (sequences + 1,), are where packed
            sequences begin and end in a batch of 1: none sees another. Without a mask they run as
            :func:`flashattn_ext.flash_attn_varlen_func`, and no mask is formed. Those that do not
            bear on attention are ignored.

    Returns:
        ((batch, seqlen_q, heads_q, head_dim) contiguous, None). Rows that see no key, as those of
        left padding, are 0.

    Raises:
        RuntimeError: ``softcap``, ``s_aux`` or ``head_mask`` is given, or ``output_attentions`` is
            True; also every error of :func:`flashattn_ext.scaled_dot_product_attention`.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise RuntimeError(
                f'{name}: not supported by attn_implementation="{NAME}"; use "eager" for this model'
            )
    if kwargs.get("output_attentions"):
        raise RuntimeError(
            f'output_attentions: attn_implementation="{NAME}" never forms the attention weights; '
            'use "eager" to read them'
        )

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    seqlen_q = query.shape[2]
    causal = bool(is_causal) if attention_mask is None and seqlen_q > 1 else False
    packed = kwargs.get("cu_seq_lens_q") is not None
    if causal and not packed and key.shape[2] > seqlen_q:
        # Prefill into an empty static cache: query i stands at key i, and nothing is written after
        # the last query. (Prefill after earlier tokens always comes with a mask.)
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        if position_bias is not None:
            position_bias = position_bias[..., :seqlen_q]

    if (
        packed
        and attention_mask is None
        and position_bias is None
        and not dropout
        and _takes_packed(query, key, value)
    ):
        return _packed_attention(
            query,
            key,
            value,
            kwargs["cu_seq_lens_q"],
            kwargs.get("cu_seq_lens_k"),
            causal=causal,
            sliding_window=sliding_window,
            scaling=scaling,
        ), None

    windowed = (
        attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window
    )
    if packed or windowed or (attention_mask is None and position_bias is not None):
        visible = _dense_mask(
            query,
            key,
            causal=causal,
            sliding_window=sliding_window if windowed else None,
            cu_seqlens_q=kwargs.get("cu_seq_lens_q"),
            cu_seqlens_k=kwargs.get("cu_seq_lens_k"),
        )
        causal = False
        if attention_mask is None:
            attention_mask = visible
        elif attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & visible
        else:
            attention_mask = attention_mask.masked_fill(~visible, float("-inf"))
    if position_bias is not None:
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.where(attention_mask, position_bias, float("-inf"))
        else:
            attention_mask = attention_mask + position_bias

    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _takes_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the operator of packed sequences takes the call; for others a mask is formed, and
    torch's own attention computes with it."""
    return _unsupported_reason(query, key, value, None, 0.0, query.device.type) is None


def _packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    causal: bool,
    sliding_window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """(1, tokens, heads_q, head_dim), contiguous. The last query of each sequence stands at its
    last key."""
    _check_one_row(query)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    window = -1 if sliding_window is None else sliding_window - 1
    out = flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        softmax_scale=scaling,
        causal=causal,
        window_size=(window, window),
    )
    return out.contiguous()[None]


def _check_one_row(query: torch.Tensor) -> None:
    if query.shape[0] != 1:
        raise RuntimeError(
            f"cu_seq_lens_q: packed sequences need a batch of 1, got {query.shape[0]}"
        )


def _dense_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    causal: bool,
    sliding_window: int | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> torch.Tensor:
    """Bool mask (seqlen_q, seqlen_k), True where the query sees the key.

    The last query of each sequence stands at the last key of that sequence.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    rows = torch.arange(seqlen_q, device=query.device)[:, None]
    cols = torch.arange(seqlen_k, device=query.device)[None, :]
    if cu_seqlens_q is None:
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
        distance = (seqlen_k - cols) - (seqlen_q - rows)  # keys from this one to the query's own
    else:
        _check_one_row(query)
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        rows_sequence, rows_left = _place_in_sequence(rows, cu_seqlens_q)
        cols_sequence, cols_left = _place_in_sequence(cols, cu_seqlens_k)
        visible = rows_sequence == cols_sequence
        distance = cols_left - rows_left
    if causal:
        visible = visible & (distance >= 0)
    if sliding_window is not None:
        visible = visible & (distance.abs() < sliding_window)
    return visible


def _place_in_sequence(
    token: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of the packed sequence that holds each token, and its distance from the end."""
    ends = cu_seqlens[1:].to(token.dtype)
    sequence = torch.bucketize(token, ends, right=True)
    return sequence, torch.cat([ends, ends[-1:]])[sequence] - token
