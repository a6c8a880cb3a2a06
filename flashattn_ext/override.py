"""`enable()`: plain torch code runs our kernels, with no change to it.

Owns when torch's fused attention operators are ours. What such an operator then does, and which
calls it leaves to torch's own kernel, stands in csrc/ops/override.cpp. Its life is that of a member
of torch's registry of flash attention implementations (torch.nn.attention), of which one at most is
active: activating another, by torch's functions too, ends ours first.
"""

import functools
import os

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ._build import CPU_ONLY_REASON

NAME = "FA_EXT"  # in torch's registry
VARIABLE = "FLASHATTN_EXT_ENABLE"

# Each with its backward. On CUDA F.scaled_dot_product_attention picks among the first three: on
# Hopper cuDNN's before the others. varlen_attn calls the last.
_OPERATORS = {
    "cuda": (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_flash_attention_forward",
    ),
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
}
_BUILT = ("cpu",) if CPU_ONLY_REASON is not None else ("cuda", "cpu")


class _Active:
    """What torch's registry keeps while ours is active."""

    def __init__(self, device_types):
        self.device_types = device_types
        self._overrides = [
            torch.classes.fa.Override(device_type.upper(), list(_OPERATORS[device_type]))
            for device_type in device_types
        ]

    def remove(self):
        global _active
        _active = None
        for override in self._overrides:
            override.remove()
        _register(_BUILT[:1])


_active = None


def _activate(device_types):
    global _active
    _active = _Active(device_types)
    return _active


def _register(device_types):
    """What activating ours overrides, by torch's functions too."""
    register_flash_attention_impl(NAME, register_fn=functools.partial(_activate, device_types))


class _Enabled:
    """Leaving it as a context brings back what was active before it, and entering it again enables
    again."""

    def __init__(self, device_types):
        self._device_types = device_types
        self._enable()

    def _enable(self):
        self._impl = current_flash_attention_impl()
        self._impl_device_types = _active.device_types if self._impl == NAME else None
        _enable(self._device_types)

    def __enter__(self):
        if not is_enabled() or _active.device_types != self._device_types:
            self._enable()

    def __exit__(self, *error):
        if self._impl == NAME:
            _enable(self._impl_device_types)
        elif self._impl is not None:
            activate_flash_attention_impl(self._impl)
        else:
            restore_flash_attention_impl(_raise_warn=False)


def _enable(device_types):
    if is_enabled() and _active.device_types == device_types:
        return
    before = current_flash_attention_impl()
    restore_flash_attention_impl(_raise_warn=False)
    _register(device_types)
    try:
        activate_flash_attention_impl(NAME)
    except BaseException:
        if before not in (None, NAME):
            activate_flash_attention_impl(before)
        raise


def _checked(device_types):
    if device_types is None:
        return _BUILT[:1]
    if isinstance(device_types, (str, torch.device)):
        device_types = (device_types,)
    if not isinstance(device_types, (tuple, list, set, frozenset)):
        raise RuntimeError(f'device_types: must be of "cuda" and "cpu", got {device_types!r}')
    device_types = tuple(str(device_type) for device_type in device_types)
    if not device_types:
        raise RuntimeError('device_types: must name "cuda" or "cpu", got none')
    for device_type in device_types:
        if device_type not in _OPERATORS:
            raise RuntimeError(f'device_types: must be of "cuda" and "cpu", got {device_type!r}')
        if device_type not in _BUILT:
            raise RuntimeError(
                f"device_types: this build has no kernels for cuda ({CPU_ONLY_REASON}), got "
                f"{device_type!r}"
            )
    return device_types


def enable(device_types=None):
    """Make plain torch code run our kernels: `F.scaled_dot_product_attention` and what calls it.

        flashattn_ext.enable()          # until flashattn_ext.disable()

        with flashattn_ext.enable():    # inside of the block
            model(tokens)

    Puts our kernels behind torch's fused attention operators and their backwards; everything above
    them is torch's own: autograd, autocast, torch.compile, vmap, DTensor, context parallelism, the
    flop counter. On CUDA these are the operators that F.scaled_dot_product_attention picks,
    cuDNN's, flash-attention's and the memory-efficient one, and `aten::_flash_attention_forward`,
    which `torch.nn.attention.varlen` calls. Which of them a call comes to is still torch's choice,
    and `torch.nn.attention.sdpa_kernel` still restricts it.

    Calls that our kernels cannot do run torch's kernel as before, without a warning: dropout, a
    head_dim above 256, value with another head_dim, dtypes other than float16 and bfloat16 on CUDA,
    a mask that requires grad, GPUs below compute capability 8.0. So do calls for which torch picks
    no fused operator, such as three-dimensional ones, and programs made by AOTInductor, which do
    not look at what is registered: give those `torch.ops.fa.forward`.

    Results are as from `flashattn_ext.scaled_dot_product_attention`: a query that sees no key gives
    0 and gradients of 0. For cuDNN torch 2.11 turns a bool mask into one of numbers with -65504 at
    hidden keys, and so -65504 (in bfloat16 -65536) in a mask of query's dtype hides a key. The
    kernels for decoding read no masks of numbers; the attention "fa_ext" of
    `flashattn_ext.transformers` gives them bool ones.

    Does the same as `torch.nn.attention.activate_flash_attention_impl("FA_EXT")`. The environment
    variable FLASHATTN_EXT_ENABLE=1 does it when torch is imported, in programs that do not know of
    this package too; FLASHATTN_EXT_ENABLE=cuda,cpu names the device types.

    Args:
        device_types: "cuda", "cpu" or several of them. Default: "cuda", or "cpu" if the build has
            the CPU backend only. On CPUs torch's own kernel is faster than ours without a mask.

    Returns:
        A context manager that restores what was active before. Enabling again changes nothing, so
        that blocks may be nested.

    What another library has put behind the same operators must stay there until disable(). Do not
    call it while other threads run attention. A forward and its backward may run on different sides
    of it, but then a query that sees no key may get gradients of NaN.

    Raises:
        RuntimeError: device_types has an unknown name, or one that the build has no kernels for.
    """
    return _Enabled(_checked(device_types))


def disable():
    """Give torch's operators their own kernels back. Changes nothing where ours are not active."""
    if is_enabled():
        restore_flash_attention_impl()


def is_enabled():
    """Whether torch's operators run our kernels, by `enable` or by torch's own functions."""
    return current_flash_attention_impl() == NAME


def enable_as_environment_says():
    """What the environment variable asks for when the package is imported."""
    value = os.environ.get(VARIABLE, "").strip()
    if value in ("", "0"):
        return
    try:
        enable(None if value == "1" else [name.strip() for name in value.split(",")])
    except RuntimeError as error:
        raise ImportError(f"{VARIABLE}={value}: {error} (or 1, or 0 for none)") from error


_register(_BUILT[:1])
