"""enable() and disable(): what is active when, nothing left behind, the environment variable."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from overriding import OPERATORS, backward_name, kernels_of
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

import flashattn_ext

BUILT = ("cuda", "cpu") if flashattn_ext.build_info()["with_cuda"] else ("cpu",)


def registered():
    """What the dispatcher knows of all operators that are ever overridden."""
    names = [f"aten::{each}" for name in OPERATORS for each in (name, backward_name(name))]
    return [torch._C._dispatch_dump(name) + torch._C._dispatch_dump_table(name) for name in names]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = registered()
    yield
    assert current_flash_attention_impl() is None
    assert registered() == before


def runs_ours(device="cpu"):
    query, key, value = torch.randn(3, 2, 4, 9, 16).to(device)
    if device == "cuda":
        query, key, value = query.half(), key.half(), value.half()
    forwards, _ = kernels_of(lambda: F.scaled_dot_product_attention(query, key, value))
    return forwards == 1


def test_importing_activates_nothing():
    assert "FA_EXT" in list_flash_attention_impls()
    assert not flashattn_ext.is_enabled()
    assert not runs_ours()


def test_enable_and_disable(device):
    flashattn_ext.enable(device)
    assert flashattn_ext.is_enabled() and current_flash_attention_impl() == "FA_EXT"
    assert runs_ours(device)
    flashattn_ext.enable(device)
    assert runs_ours(device)
    flashattn_ext.disable()
    assert not flashattn_ext.is_enabled() and not runs_ours(device)
    flashattn_ext.disable()  # changes nothing


def test_device_types_by_default():
    with flashattn_ext.enable():
        assert runs_ours("cpu") == (BUILT == ("cpu",))
    with flashattn_ext.enable(BUILT):
        assert runs_ours("cpu")


def test_as_a_context():
    with flashattn_ext.enable("cpu"):
        assert runs_ours()
        with flashattn_ext.enable("cpu"):
            assert runs_ours()
        assert runs_ours()
    assert not runs_ours()
    with pytest.raises(ZeroDivisionError), flashattn_ext.enable("cpu"):
        1 / 0  # noqa: B018
    assert not runs_ours()


def test_a_context_around_disable():
    with flashattn_ext.enable("cpu"):
        flashattn_ext.disable()
        assert not runs_ours()
    assert not runs_ours()
    flashattn_ext.enable("cpu")
    with flashattn_ext.enable("cpu"):
        flashattn_ext.disable()
    assert runs_ours()  # what was before the block
    flashattn_ext.disable()


def test_nested_device_types():
    if BUILT == ("cpu",):
        pytest.skip("a build with one backend")
    with flashattn_ext.enable("cuda"):
        with flashattn_ext.enable("cpu"):
            assert runs_ours("cpu")
        assert not runs_ours("cpu") and flashattn_ext.is_enabled()


def test_functions_of_torch():
    activate_flash_attention_impl("FA_EXT")
    assert flashattn_ext.is_enabled()
    restore_flash_attention_impl()
    assert not flashattn_ext.is_enabled()
    flashattn_ext.enable("cpu")
    restore_flash_attention_impl()
    assert not flashattn_ext.is_enabled() and not runs_ours()


@pytest.fixture
def other_impl(monkeypatch):
    """Another member of torch's registry; the list says whether it is active."""
    active = []

    class Handle:
        def remove(self):
            active.clear()

    def activate():
        active.append(True)
        return Handle()

    registry = torch.nn.attention._registry
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", dict(registry._FLASH_ATTENTION_IMPLS))
    register_flash_attention_impl("OTHER", register_fn=activate)
    return active


def test_another_implementation(other_impl):
    activate_flash_attention_impl("OTHER")
    flashattn_ext.disable()  # ours is not active
    assert other_impl
    with flashattn_ext.enable("cpu"):
        assert not other_impl and runs_ours()
        activate_flash_attention_impl("OTHER")
        assert other_impl and not runs_ours() and not flashattn_ext.is_enabled()
        flashattn_ext.enable("cpu")
        assert not other_impl and runs_ours()
    assert other_impl and not runs_ours()
    restore_flash_attention_impl()


def test_device_types_that_do_not_exist():
    with pytest.raises(RuntimeError, match=r'device_types: must be of "cuda" and "cpu", got \'x'):
        flashattn_ext.enable(("cpu", "xpu"))
    if BUILT == ("cpu",):
        with pytest.raises(RuntimeError, match=r"device_types: this build has no kernels for cuda"):
            flashattn_ext.enable("cuda")


def run(code, folder, variable=None, **environment):
    """stdout and stderr of a fresh interpreter."""
    environment = dict(os.environ) | environment
    environment.pop("FLASHATTN_EXT_ENABLE", None)
    if variable is not None:
        environment["FLASHATTN_EXT_ENABLE"] = variable
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    return result.stdout.strip(), result.stderr.strip()


# A program that does not know of the package.
PROGRAM = """
import sys, torch
from torch.nn.attention import current_flash_attention_impl
print(current_flash_attention_impl(), "flashattn_ext" in sys.modules)
"""


def test_environment_variable(tmp_path):
    assert run(PROGRAM, tmp_path, "0") == ("None False", "")
    assert run(PROGRAM, tmp_path, "1") == ("FA_EXT True", "")
    # The package first, which imports torch, which imports the package.
    code = "import flashattn_ext" + PROGRAM
    assert run(code, tmp_path, "cpu") == ("FA_EXT True", "")
    # Where torch loads no extensions by itself.
    assert run(code, tmp_path, "1", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ("FA_EXT True", "")


def test_environment_variable_with_a_wrong_value(tmp_path):
    _, error = run(PROGRAM, tmp_path, "yes")
    assert "FLASHATTN_EXT_ENABLE=yes: device_types: must be of" in error


def test_nothing_is_printed(tmp_path):
    """The dispatcher warns of kernels that replace others, unless it is told not to."""
    code = "import flashattn_ext; flashattn_ext.enable(); flashattn_ext.disable()"
    assert run(f"import warnings; warnings.simplefilter('error'); {code}", tmp_path) == ("", "")


def test_a_context_entered_again():
    context = flashattn_ext.enable("cpu")
    flashattn_ext.disable()
    for _ in range(2):
        with context:
            assert runs_ours()
        assert not runs_ours()


@pytest.mark.parametrize("device_types", [(), [], 5, True, "tpu", ["cpu", "tpu"]])
def test_device_types_that_are_none(device_types):
    with pytest.raises(RuntimeError, match=r"^device_types: must .*, got "):
        flashattn_ext.enable(device_types)
    assert not flashattn_ext.is_enabled()


def test_what_was_active_stays_where_enabling_fails(monkeypatch):
    class Handle:
        def remove(self):
            pass

    def fails(*arguments):
        raise ZeroDivisionError

    register_flash_attention_impl("OTHER", register_fn=Handle)
    activate_flash_attention_impl("OTHER")
    try:
        monkeypatch.setattr(flashattn_ext.override, "_Active", fails)
        with pytest.raises(ZeroDivisionError):
            flashattn_ext.enable("cpu")
        assert current_flash_attention_impl() == "OTHER"
    finally:
        restore_flash_attention_impl()


def test_no_gradient_reaches_attention(device):
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = torch.randn(3, 1, 2, 9, 16, device=device, dtype=dtype).requires_grad_().unbind()
    with flashattn_ext.enable(device):
        out = Drop.apply(F.scaled_dot_product_attention(*inputs))
        assert torch.autograd.grad(out.sum(), inputs, allow_unused=True) == (None, None, None)
