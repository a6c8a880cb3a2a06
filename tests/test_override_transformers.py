"""An unmodified Qwen3 of Hugging Face transformers with its default attention, before, during and
after enable(): our kernels run in between, and logits and gradients are right.

The rule for logits is that of test_transformers.py: an error against the model in float64 of at
most twice that of "eager" in the model's dtype, and 2 ulp.
"""

import pytest
import torch
from overriding import kernels_of

transformers = pytest.importorskip("transformers", reason="needs transformers")

from test_transformers import (  # noqa: E402
    assert_close,
    assert_same_tokens,
    generate,
    in_float64,
    padded_batch,
    tiny_model,
    training_gradients,
)

import flashattn_ext  # noqa: E402

LENGTH = 11


@pytest.fixture
def enabled_for(device):
    transformers.utils.logging.set_verbosity_error()
    return lambda: flashattn_ext.enable(device)


def plain_model(device, **changes):
    """As from_pretrained would load it without a word on attention."""
    model = tiny_model(device, **changes)
    model.set_attn_implementation("sdpa")
    return model


def by_eager(model, function):
    model.set_attn_implementation("eager")
    result = function(model)
    model.set_attn_implementation("sdpa")
    return result


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@torch.no_grad()
def test_prefill(device, enabled_for, padding, sliding):
    model = plain_model(device, sliding=sliding)
    tokens, mask = padded_batch(device, padding, LENGTH)
    real = ... if mask is None else mask.bool()

    def logits(model):
        return model(tokens, attention_mask=mask, use_cache=False).logits

    exact, eager = logits(in_float64(model)), by_eager(model, logits)
    stock = logits(model)
    with enabled_for():
        layers = model.config.num_hidden_layers
        assert kernels_of(lambda: logits(model)) == (layers, 0)
        ours = logits(model)
    assert ours.isfinite().all()
    assert_close(ours[real], eager[real], exact[real])
    assert logits(model).equal(stock)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@torch.no_grad()
def test_generate(device, enabled_for, padding, cache):
    model = plain_model(device)
    tokens, mask = padded_batch(device, padding, LENGTH)
    mask = torch.ones_like(tokens) if mask is None else mask
    options = {"disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    eager = by_eager(model, lambda model: generate(model, tokens, mask, **options))
    exact, results = in_float64(model), []
    with enabled_for():
        kernels = kernels_of(lambda: results.append(generate(model, tokens, mask, **options)))
    # torch gives a call of one query and no mask to its plain kernel on the CPU, never on CUDA.
    assert kernels[0] >= model.config.num_hidden_layers * (1 if device == "cpu" else 10)
    assert_same_tokens(results[0], eager, exact, model, mask)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_training(device, enabled_for, padding):
    model = plain_model(device)
    tokens, mask = padded_batch(device, padding, LENGTH)
    mask = torch.ones_like(tokens) if mask is None else mask

    def gradients(model):
        return torch.cat(training_gradients(model, tokens, mask))

    exact, eager, results = gradients(in_float64(model)), by_eager(model, gradients), []
    with enabled_for():
        kernels = kernels_of(lambda: results.append(gradients(model)))
    layers = model.config.num_hidden_layers
    assert kernels == (layers, layers)
    assert_close(results[0], eager, exact)


@torch.no_grad()
def test_compiled(device, enabled_for):
    torch.compiler.reset()
    model = plain_model(device)
    tokens, mask = padded_batch(device, "left", LENGTH)
    real = mask.bool()

    def logits(model):
        return model(tokens, attention_mask=mask, use_cache=False).logits[real]

    exact, eager = logits(in_float64(model)), by_eager(model, logits)
    backend = "inductor" if device == "cuda" else "aot_eager"  # a minute less
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with enabled_for():
        logits(compiled)
        assert kernels_of(lambda: logits(compiled)) == (model.config.num_hidden_layers, 0)
        assert_close(logits(compiled), eager, exact)
