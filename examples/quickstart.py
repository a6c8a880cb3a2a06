"""Our attention beside PyTorch's: the same call, the outputs, the errors and the times.

Runs on the GPU if there is one, else on the CPU (or where --device says); needs nothing but torch.
"""

import argparse
import statistics
import time
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import flashattn_ext  # noqa: E402

CPU_ONLY_REASON = flashattn_ext.build_info()["cpu_only_reason"]  # None in a build with CUDA
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B


def exact_attention(query, key, value):
    """Causal attention by its formula in float64, one head at a time to keep memory low."""
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    heads = []
    for head in range(query.shape[1]):
        kv_head = head * key.shape[1] // query.shape[1]
        scores = query[:, head].double() @ key[:, kv_head].double().mT / query.shape[3] ** 0.5
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        heads.append(weights @ value[:, kv_head].double())
    return torch.stack(heads, dim=1)


def median_ms(run, device, repeats=20):
    """Median time of one call in milliseconds, after a warm-up."""
    times = []
    for step in range(5 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 5:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and CPU_ONLY_REASON is None
    device = torch.device(args.device or ("cuda" if on_gpu else "cpu"))
    on_gpu = device.type == "cuda"
    seqlen, dtypes = (4096, (torch.float16, torch.bfloat16)) if on_gpu else (512, (torch.float32,))

    where = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    print(f"flashattn_ext {flashattn_ext.__version__} and torch {torch.__version__} on {where}")
    if torch.cuda.is_available() and CPU_ONLY_REASON is not None:
        print(f"The GPU is not used: built without CUDA kernels, because {CPU_ONLY_REASON}.")
    print(f"causal attention, {HEADS} query and {KV_HEADS} key/value heads of {HEAD_DIM}, ", end="")
    print(f"{seqlen} tokens\n")
    print(f"{'':<10}{'':<7}{'output of the last token':<33}{'largest error':>14}{'time':>12}")

    torch.manual_seed(0)
    for dtype in dtypes:
        query, key, value = (
            torch.randn(1, heads, seqlen, HEAD_DIM, device=device, dtype=dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        exact = exact_attention(query, key, value)
        for name, attention in (
            ("ours", flashattn_ext.scaled_dot_product_attention),
            ("torch", F.scaled_dot_product_attention),
        ):

            def run(attention=attention, query=query, key=key, value=value):
                return attention(query, key, value, is_causal=True, enable_gqa=True)

            out = run()
            numbers = " ".join(f"{x:+.4f}" for x in out[0, 0, -1, :4].tolist())
            error = (out.double() - exact).abs().max().item()
            label = str(dtype).removeprefix("torch.") if name == "ours" else ""
            ms = median_ms(run, device)
            print(f"{label:<10}{name:<7}{numbers:<33}{error:>14.1e}{ms:>9.3f} ms")
    print("\nErrors are against the formula in float64.")


if __name__ == "__main__":
    main()
