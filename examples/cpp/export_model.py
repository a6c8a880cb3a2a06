"""Compiles a model that contains fa::forward with AOTInductor, for the C++ program beside it.

    python export_model.py FOLDER

Writes model.pt2, and example.pt with an input and what the model makes of it in Python.
"""

import argparse
from pathlib import Path

import torch

import flashattn_ext  # noqa: F401  (defines torch.ops.fa)

HEADS, HEADS_K, HEAD_DIM = 4, 2, 32


class Attention(torch.nn.Module):
    """Causal self-attention with fewer key heads than query heads."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.project = torch.nn.Linear(width, (HEADS + 2 * HEADS_K) * HEAD_DIM)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        query, key, value = heads.split((HEADS, HEADS_K, HEADS_K), dim=1)
        # Not F.scaled_dot_product_attention: the code that AOTInductor writes calls torch's own
        # kernels directly, whatever flashattn_ext.enable() put in their place.
        attended, _ = torch.ops.fa.forward(query, key, value, None, True)
        return self.out(attended.transpose(1, 2).flatten(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the two files go")
    folder = parser.parse_args().folder
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    model = Attention().to(device, dtype).eval().requires_grad_(False)
    x = torch.randn(2, 100, HEADS * HEAD_DIM, device=device, dtype=dtype)
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: seqlen},))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "model.pt2"))
    longer = torch.randn(2, 333, HEADS * HEAD_DIM, device=device, dtype=dtype)
    torch.save([longer, model(longer)], folder / "example.pt")


if __name__ == "__main__":
    main()
