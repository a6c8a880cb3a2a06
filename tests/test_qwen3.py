"""examples/qwen3.py against Hugging Face transformers' Qwen3 with the same weights.

The rule for logits: an error against transformers in float64 of at most twice that of transformers'
eager attention in the dtype of the test, and 2 ulp.
"""

import importlib.util
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from reference import ulp

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("safetensors", reason="needs safetensors")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "qwen3.py"
PROMPT = 24


@pytest.fixture(scope="module")
def qwen3():
    spec = importlib.util.spec_from_file_location("qwen3", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["tied", "untied"])
def checkpoint(request, qwen3, tmp_path):
    """A folder as published, with random weights large enough for attention to matter."""
    config = replace(qwen3.TINY, tie_word_embeddings=request.param == "tied")
    sizes = asdict(config)
    theta = sizes.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta}
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, rope_parameters=rope, initializer_range=0.1)
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a fresh norm multiplies by 1: nobody would notice a norm left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    # "untied" is also sharded, as the larger checkpoints are.
    model.save_pretrained(tmp_path, max_shard_size="200KB" if request.param == "untied" else "5GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == (request.param == "untied")
    return tmp_path


def load(qwen3, checkpoint, device, attention):
    """(example, exact, eager): our model and transformers' in float64 and in the same dtype."""
    dtype = torch.bfloat16 if device == "cuda" and attention == "ours" else torch.float32
    example = qwen3.load_model(checkpoint, device, dtype)
    tied = example.lm_head.weight is example.embed_tokens.weight
    assert tied == example.config.tie_word_embeddings
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="eager"
    )
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="sdpa"
    )
    return example, exact.to(device).double(), eager.to(device)


def assert_logits(ours, eager, exact):
    bound = 2 * (eager.double() - exact).abs().max() + 2 * ulp(exact.abs().max(), ours.dtype)
    error = (ours.double() - exact).abs().max()
    assert error <= bound, f"largest error {error:.2e}, accepted is {bound:.2e}"


@pytest.mark.parametrize("attention", ["torch", "ours"])
@torch.inference_mode()
def test_against_transformers(device, attention, checkpoint, qwen3):
    example, exact, eager = load(qwen3, checkpoint, device, attention)
    attend = qwen3.ATTENTION[attention]
    tokens = torch.randint(example.config.vocab_size, (2, PROMPT), device=device)

    def logits(*lengths):
        """Those of all tokens, given to the example in pieces of these lengths."""
        cache = qwen3.KVCache(example, 2, PROMPT)
        cache.keys.fill_(torch.nan)  # slots past the length must not count
        cache.values.fill_(torch.nan)
        pieces = [
            example(piece, cache, attend, keep=PROMPT) for piece in tokens.split(lengths, dim=1)
        ]
        assert cache.length == PROMPT
        return torch.cat(pieces, dim=1)

    right, plain = exact(tokens).logits, eager(tokens).logits
    assert_logits(logits(PROMPT), plain, right)  # prefill
    assert_logits(logits(10, 7, PROMPT - 17), plain, right)  # prefill in chunks
    assert_logits(logits(10, *[1] * (PROMPT - 10)), plain, right)  # decode


@torch.inference_mode()
def test_generate(device, checkpoint, qwen3):
    """Greedy tokens of the example are those of transformers, up to a tie."""
    example, exact, eager = load(qwen3, checkpoint, device, "ours")
    tokens = torch.randint(example.config.vocab_size, (1, PROMPT), device=device)
    new, prefill_seconds, rate = qwen3.generate(
        example, tokens, new_tokens=8, attention=qwen3.ATTENTION["ours"]
    )
    new = new.to(device)
    assert new.shape == (1, 8) and prefill_seconds > 0 and rate > 0
    everything = torch.cat([tokens, new], dim=1)
    right = exact(everything, logits_to_keep=9).logits[0, :-1]
    plain = eager(everything, logits_to_keep=9).logits[0, :-1]
    bound = 2 * (plain.double() - right).abs().max() + 2 * ulp(right.abs().max(), plain.dtype)
    chosen = right.gather(1, new[0, :, None])[:, 0]
    assert ((right.amax(dim=1) - chosen) <= 2 * bound).all()


@pytest.mark.parametrize("only", [None, "torch", "ours"])
def test_main(only, checkpoint, qwen3, monkeypatch, capsys):
    """The command line with a checkpoint: a row for each attention, and their difference."""
    argv = ["qwen3.py", str(checkpoint), "--device", "cpu", "--prompt-length", "5"]
    argv += ["--new-tokens", "4"] + (["--attention", only] if only else [])
    monkeypatch.setattr("sys.argv", argv)
    qwen3.main()
    printed = capsys.readouterr().out
    assert f"Qwen3 from {checkpoint}" in printed
    rows = re.findall(r"^(\w+) +[\d.]+ ms +[\d.]+ tokens/s$", printed, re.MULTILINE)
    assert rows == ([only] if only else ["torch", "ours"])
    difference = float(re.search(r"^largest logit difference: (\S+)$", printed, re.MULTILINE)[1])
    assert difference < 1e-3


def test_cache_is_never_overrun(qwen3):
    model = qwen3.random_model(qwen3.TINY, "cpu", torch.float32)
    cache = qwen3.KVCache(model, 1, 5)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), cache, qwen3.ATTENTION["ours"])
        with pytest.raises(RuntimeError, match="cache: holds 5 tokens, got 6"):
            model(torch.zeros(1, 2, dtype=torch.long), cache, qwen3.ATTENTION["ours"])
        model(torch.zeros(1, 1, dtype=torch.long), cache, qwen3.ATTENTION["ours"])
        with pytest.raises(RuntimeError, match="cache: holds 5 tokens, got 6"):
            model(torch.zeros(1, 1, dtype=torch.long), cache, qwen3.ATTENTION["ours"])


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3_moe"},
        {"use_sliding_window": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_other_models_are_refused(change, qwen3, tmp_path):
    published = {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": None}
    published |= {key: value for key, value in asdict(qwen3.TINY).items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert qwen3.load_config(tmp_path) == qwen3.TINY  # as older files are written
    (tmp_path / "config.json").write_text(json.dumps(published | change))
    with pytest.raises(SystemExit, match="can be loaded"):
        qwen3.load_config(tmp_path)
