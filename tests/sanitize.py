"""Small calls of every operator under compute-sanitizer: mem-, race-, sync- and initcheck.

    python tests/sanitize.py [--tool memcheck ...] [--json FILE]

Runs itself once under each tool and reports the errors found; the exit status is 1 unless every
tool ran all cases and found nothing. Needs a GPU and compute-sanitizer, which comes with the CUDA
toolkit. Tensors come straight from the driver instead of torch's cache, so that the tools know
where each one ends and which bytes nobody wrote.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from cases import Case, to_device
from packed import Packed
from reference import (
    assert_close_to_reference,
    assert_gradients_close,
    attention_low,
    attention_ref,
    gradients_low,
    gradients_ref,
)

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TIMEOUT_S = 300
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")

CASES = [
    # Tiles that are full, cut off, or of which a single row or key is left, in every instance.
    Case(torch.float16, batch=1, heads=(2, 1), seqlens=(129, 200), head_dim=64),
    Case(torch.bfloat16, batch=1, heads=(1, 1), seqlens=(130, 257), head_dim=128, is_causal=True),
    Case(torch.float16, batch=1, heads=(1, 1), seqlens=(129, 129), head_dim=256, is_causal=True),
    Case(torch.bfloat16, heads=(4, 2), seqlens=(1, 1), head_dim=1),
    Case(torch.float16, heads=(3, 1), seqlens=(1, 66), head_dim=40),
    Case(
        torch.float16, batch=1, heads=(1, 1), seqlens=(150, 70), is_causal=True, bottom_right=True
    ),
    Case(torch.bfloat16, batch=1, heads=(1, 1), seqlens=(200, 200), window=(20, 5), head_dim=96),
    # Many tiles and blocks, so that every ring of the Hopper kernel comes round, and a window.
    Case(torch.bfloat16, batch=3, heads=(16, 4), seqlens=(520, 700), head_dim=128, is_causal=True),
    Case(torch.float16, batch=3, heads=(16, 4), seqlens=(700, 520), window=(150, 90), head_dim=64),
    Case(torch.bfloat16, batch=1, heads=(40, 8), seqlens=(520, 390), head_dim=256),
    # The portable kernel where the Hopper kernel would be taken for a positive scale.
    Case(torch.float16, batch=1, heads=(2, 1), seqlens=(129, 200), head_dim=64, scale=-0.1),
    Case(torch.bfloat16, batch=1, heads=(1, 1), seqlens=(130, 257), head_dim=128, scale=-0.1),
    Case(torch.float16, batch=1, heads=(1, 1), seqlens=(129, 129), head_dim=256, scale=-0.1),
    # Masks of every dtype, with rows and tiles that are hidden, and broadcast by strides.
    Case(torch.float16, heads=(2, 1), seqlens=(70, 140), mask="bool-bhqk"),
    Case(torch.bfloat16, batch=1, heads=(1, 1), seqlens=(70, 140), mask="own-11qk", head_dim=128),
    Case(torch.float16, seqlens=(66, 129), mask="f32-b11k-expanded", is_causal=True),
    Case(torch.float16, batch=1, seqlens=(66, 129), mask="bool-bhqk-inside", head_dim=256),
    Case(torch.bfloat16, batch=1, heads=(2, 1), seqlens=(300, 300), mask="lowest-11qk"),
    # Rows that cannot be loaded as they lie, at the very end of their memory.
    Case(torch.float16, batch=1, heads=(1, 1), seqlens=(129, 129), head_dim=33, layout="offset1"),
    Case(
        torch.bfloat16, batch=1, heads=(1, 1), seqlens=(129, 129), head_dim=72, layout="transposed"
    ),
    Case(
        torch.float16, batch=1, heads=(1, 1), seqlens=(129, 129), head_dim=65, layout="padded_rows"
    ),
    # The decoding kernels: splits that merge in a cluster and by a kernel of their own, rows for
    # wgmma, and a mask of keys.
    Case(torch.float16, batch=1, heads=(2, 1), seqlens=(20, 90), layout="kv_cache"),
    Case(torch.bfloat16, batch=1, heads=(4, 2), seqlens=(1, 500), head_dim=128),
    Case(torch.float16, batch=1, heads=(4, 2), seqlens=(1, 4000), head_dim=64),
    Case(torch.bfloat16, batch=1, heads=(1, 1), seqlens=(66, 600), head_dim=128, is_causal=True),
    Case(torch.float16, heads=(4, 1), seqlens=(2, 300), head_dim=72, mask="bool-b1qk"),
    # And so many heads that each multiprocessor has several, two at once.
    Case(torch.bfloat16, batch=1, heads=(1056, 528), seqlens=(1, 70), head_dim=64),
]
# fa::forward_kvcache: dtype, heads, head_dim, queries of a sequence, page size, capacity, splits;
# with more pages than shared memory holds at the end.
DECODING = [
    (torch.bfloat16, (8, 2), 128, 1, None, 320, 0),
    (torch.bfloat16, (8, 2), 128, 1, 16, 320, 0),
    (torch.float16, (4, 1), 64, 9, None, 320, 0),
    (torch.bfloat16, (8, 1), 256, 3, None, 320, 0),
    (torch.float16, (3, 3), 33, 2, None, 320, 0),
    (torch.bfloat16, (16, 1), 128, 6, 16, 320, 0),
    (torch.bfloat16, (8, 2), 128, 1, 16, 8960, 1),
    (torch.float16, (16, 1), 64, 6, 16, 17920, 2),
]
# fa::forward_varlen and its gradients: dtype, heads, head_dim; on 9.0 the portable kernels have the
# head_dims that are no multiple of 8.
PACKED = [
    (torch.bfloat16, (4, 2), 64),
    (torch.float16, (2, 1), 128),
    (torch.bfloat16, (2, 2), 256),
    (torch.float16, (2, 1), 33),
    (torch.bfloat16, (2, 1), 127),
    (torch.float16, (2, 2), 250),
]
COUNT = len(CASES) + len(DECODING) + len(PACKED)


def run_cases():
    """What runs under a tool. Inputs are made on the CPU and results judged there, so that hardly
    any kernels but ours run."""
    import flashattn_ext  # noqa: F401  registers the operators

    torch.manual_seed(0)
    for i, case in enumerate(CASES):
        *tensors, mask = case.build("cpu")
        on_gpu = [x if x is None else to_device(x, "cuda") for x in (*tensors, mask)]
        results = torch.ops.fa.forward(*on_gpu, **case.options)
        out, lse = (x.cpu() for x in results)
        reference = attention_ref(*tensors, mask, **case.options)
        low = attention_low(*tensors, mask, **case.options)
        assert_close_to_reference(out, lse, reference, low, case.id)
        grad_out = torch.randn(out.shape).to(out.dtype)
        gradients = torch.ops.fa.backward(
            grad_out.cuda(),
            *on_gpu[:3],
            *results,
            on_gpu[3],
            **case.options,
            deterministic=i % 2 == 1,
        )
        reference = gradients_ref(grad_out, *tensors, mask, **case.options)
        low = gradients_low(grad_out, *tensors, mask, **case.options)
        assert_gradients_close([x.cpu() for x in gradients], reference, low, case.id)
    for case in DECODING:
        decode(*case)
    # Sequences that end inside of tiles, empty ones, keys that do not take part, and padding.
    lengths, used = [(70, 65), (0, 5), (130, 129), (1, 131)], [65, 5, 100, 131]
    for i, (dtype, heads, head_dim) in enumerate(PACKED):
        sequences = Packed("cuda", lengths, heads, head_dim, dtype, used=used, padding=(3, 6))
        sequences.check(is_causal=True, deterministic=i % 2 == 0)
    print(f"ran {COUNT} cases")


def decode(dtype, heads, head_dim, seqlen_q, page_size, capacity, num_splits):
    """Appends a key to sequences of several lengths, one of which then fills the cache."""
    lengths = torch.tensor([0, 1, 2 * capacity // 5, capacity - 1], dtype=torch.int32)
    query = torch.randn(4, seqlen_q, heads[0], head_dim).to(dtype)
    caches = [torch.randn(4, capacity, heads[1], head_dim).to(dtype) for _ in range(2)]
    new = [torch.randn(4, 1, heads[1], head_dim).to(dtype) for _ in range(2)]
    expected = torch.ops.fa.forward_kvcache(query, *map(torch.clone, caches), lengths, None, *new)
    table = None
    if page_size is not None:
        pages = capacity // page_size
        caches = [cache.view(4 * pages, page_size, *cache.shape[2:]) for cache in caches]
        table = torch.arange(4 * pages, dtype=torch.int32).view(4, pages).cuda()
    arguments = (query.cuda(), *(cache.cuda() for cache in caches), lengths.cuda(), table)
    new = [x.cuda() for x in new]
    results = torch.ops.fa.forward_kvcache(*arguments, *new, num_splits=num_splits)
    for ours, cpu in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), cpu, rtol=2e-2, atol=2e-2)


def find_sanitizer():
    from torch.utils.cpp_extension import CUDA_HOME

    found = shutil.which("compute-sanitizer")
    if found is None and CUDA_HOME is not None:
        found = shutil.which("compute-sanitizer", path=str(Path(CUDA_HOME, "bin")))
    if found is None:
        raise SystemExit("compute-sanitizer: not found on PATH nor in the CUDA toolkit")
    return found


def run_tool(sanitizer, tool):
    """One tool over all cases; `clean` only if it came to its summary and every case ran."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "66", "--print-limit", "20"]
    command += [sys.executable, __file__, "--run-cases"]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, which can be killed with all its processes
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = f"stopped after {TIMEOUT_S} s"
    counts = [int(a or b) for a, b in SUMMARY.findall(output)]
    clean = status == 0 and counts == [0] and f"ran {COUNT} cases" in output
    result = {
        "tool": tool,
        "clean": clean,
        "errors": counts[0] if len(counts) == 1 else None,
        "status": status,
        "cases": COUNT,
        "seconds": round(time.monotonic() - start, 1),
    }
    if not clean:
        # What was found comes first; the calls that led to it fill the rest.
        lines = [line for line in output.splitlines() if "Host Frame" not in line]
        result["output"] = lines[:60] + lines[60:][-20:]
    return result


def sanitize(tools=TOOLS):
    """The results of all tools, as dictionaries that json can write. The tools run side by side:
    each keeps a core busy, and the GPU hardly."""
    sanitizer = find_sanitizer()
    results = []
    with concurrent.futures.ThreadPoolExecutor(len(tools)) as pool:
        finished = list(pool.map(lambda tool: run_tool(sanitizer, tool), tools))
    for tool, result in zip(tools, finished, strict=True):
        verdict = "clean" if result["clean"] else f"NOT clean, exit status {result['status']}"
        print(f"{tool}: {verdict}, {result['seconds']} s", flush=True)
        for line in result.get("output", ()):
            print(f"  {line}", flush=True)
        results.append(result)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--run-cases", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_cases:
        run_cases()
        return 0
    results = sanitize(arguments.tool)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["clean"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
