"""What every benchmark shares: candidates and their interleaved timing, ceilings, the environment
stamp, progress and the result file. What is timed stands in workload.py.

Method. Candidates run interleaved (A B C A B C ...) in one process, so that clocks and power are
the same for all. One sample is a loop of launches of at least `Settings.sample_ms`; the host queues
ahead of the GPU, so that a sample holds device time only, unless a launch costs the host more than
the GPU. `graph` replays the loop from a CUDA graph, `events` launches it eagerly; both are timed by
CUDA events (by the host clock on the CPU). Inputs are random normal: on constant data the GPU
clocks higher. Small inputs rotate through enough copies to fill three times the L2 cache.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor
from workload import Inputs, Problem, Reference, input_sets, least_bytes, useful_flops

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1  # of the result file


# ------------------------------------------------------------------------------------------------
# Candidates and timing


@dataclass(frozen=True)
class Candidate:
    """A competitor. `bind` turns a problem into the call to time; the call raises RuntimeError for
    what the implementation refuses. `context` is entered around a loop, outside the timed part."""

    name: str  # key in the result file
    label: str  # heading in tables
    bind: Callable[[Problem], Callable[[Inputs], Tensor]]
    context: Callable[[], AbstractContextManager] = nullcontext
    # Names the kernel that the call takes, if anybody knows.
    kernel: Callable[[Problem, Inputs], str | None] | None = None


@dataclass(frozen=True)
class Settings:
    samples: int = 30
    sample_ms: float = 2.0
    warmup_ms: float = 150.0
    noise_limit: float = 0.03  # inter-quartile range / median above which samples are taken again
    reruns: int = 2


QUICK = Settings(samples=8, sample_ms=1.0, warmup_ms=30.0, reruns=0)


@dataclass
class Call:
    context: Callable[[], AbstractContextManager]
    launch: Callable[[int], object]  # runs the operation once on the given input set
    sets: int = 1


@dataclass
class Timing:
    """Microseconds of one launch."""

    median_us: float
    q1_us: float
    q3_us: float
    samples: int
    launches: int  # in one sample


@dataclass
class _Loop:
    context: Callable[[], AbstractContextManager]
    run: Callable[[], None]
    launches: int


def measure(
    calls: dict[str, Call], device: torch.device, settings: Settings, graph: bool = False
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times the calls interleaved. Returns the timings, and a reason for each call that raised
    (one that cannot be captured in a graph, say)."""
    loops, failures = {}, {}
    for name, call in calls.items():
        try:
            with call.context():
                loops[name] = _make_loop(call, device, settings, graph)
        except RuntimeError as error:
            failures[name] = first_line(error)
            synchronize(device)  # an error that killed the device ends the run here
    if not loops:
        return {}, failures
    order = list(loops.values())
    round_ms = sum(sum(times) for times in _time_rounds(order, 1, device))
    warmup = max(1, math.ceil(settings.warmup_ms / max(round_ms, 1e-3)))
    for _ in range(1 + settings.reruns):
        rounds = _time_rounds(order, warmup + settings.samples, device)
        timings = {
            name: summary(times[warmup:], loop.launches)
            for (name, loop), times in zip(loops.items(), rounds, strict=True)
        }
        if all(t.q3_us - t.q1_us <= settings.noise_limit * t.median_us for t in timings.values()):
            break
        warmup = 1
    return timings, failures


def _make_loop(call: Call, device: torch.device, settings: Settings, graph: bool) -> _Loop:
    """A loop of at least sample_ms that visits all input sets equally often."""

    def launch_all(launches: int) -> None:
        for i in range(launches):
            call.launch(i % call.sets)

    launch_all(2)
    trial = _Loop(nullcontext, lambda: launch_all(2), 2)
    launch_ms = min(_time_rounds([trial], 3, device)[0]) / 2
    launches = call.sets * math.ceil(settings.sample_ms / (launch_ms * call.sets))
    if not graph:
        return _Loop(call.context, lambda: launch_all(launches), launches)

    captured = torch.cuda.CUDAGraph()
    # The outer context: a capture that fails would leave its own stream current.
    with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(captured):
        launch_all(launches)
    captured.replay()
    # The trial ran eagerly, so a launch-bound call was over-estimated: replay more than once.
    replay_ms = _time_rounds([_Loop(nullcontext, captured.replay, launches)], 1, device)[0][0]
    replays = math.ceil(settings.sample_ms / replay_ms)

    def replay() -> None:
        for _ in range(replays):
            captured.replay()

    return _Loop(call.context, replay, launches * replays)


def _time_rounds(loops: Sequence[_Loop], rounds: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of every loop in every round, in the order A B C A B C ... The host waits only
    at the end, so that the GPU never idles between loops."""

    def mark():
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(start, end) -> float:
        return (end - start) * 1e3 if device.type == "cpu" else start.elapsed_time(end)

    marks: list[list[tuple]] = [[] for _ in loops]
    with no_garbage_collection():
        for _, (i, loop) in itertools.product(range(rounds), enumerate(loops)):
            with loop.context():
                start = mark()
                loop.run()
                marks[i].append((start, mark()))
        synchronize(device)
    return [[milliseconds(*pair) for pair in pairs] for pairs in marks]


def summary(sample_ms: list[float], launches: int) -> Timing:
    times = [1e3 * ms / launches for ms in sample_ms]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(round(median, 3), round(q1, 3), round(q3, 3), len(times), launches)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def run_problem(
    problem: Problem, candidates: Sequence[Candidate], device: torch.device, settings: Settings
) -> dict:
    """Checks every candidate against the reference, then times those that passed. Returns the row
    of the result file: the problem, its work, and per candidate either `error` (refused) or
    `wrong` (failed the check) or its times; and the kernel of the candidate that names one."""
    sets = input_sets(problem, device)
    calls, results = checked_calls(problem, candidates, sets, device)
    graph = problem.graph and device.type == "cuda"
    flops = useful_flops(problem)
    timings = add_timings(results, calls, flops, device, settings, graph)
    if graph:
        short = replace(settings, samples=min(10, settings.samples), warmup_ms=20.0, reruns=0)
        eager, _ = measure({name: calls[name] for name in timings}, device, short)
        for name, timing in eager.items():
            results[name]["eager_us"] = timing.median_us
    kernels = (c.kernel(problem, sets[0]) for c in candidates if c.kernel is not None)
    kernel = next(filter(None, kernels), None)
    return problem_fields(problem) | {
        "mode": "graph" if graph else eager_mode(device),
        "input_sets": len(sets),
        "flops": flops,
        "bytes": least_bytes(problem),
        **({"kernel": kernel} if kernel else {}),
        "results": results,
    }


def checked_calls(
    problem: Problem, candidates: Sequence[Candidate], sets: list[Inputs], device: torch.device
) -> tuple[dict[str, Call], dict[str, dict]]:
    """The calls of the candidates that agree with the reference, and for every candidate its
    error, with `wrong` where it is too large, or `error` where it refused. Calls hold the sets."""
    reference = Reference.of(problem, sets[0])
    calls: dict[str, Call] = {}
    results: dict[str, dict] = {}
    for candidate in candidates:
        call = candidate.bind(problem)
        # Whatever the candidate leaves unwritten shows as NaN, when the allocator hands it this
        # block.
        poison = torch.full_like(sets[0].query, math.nan)
        del poison
        results[candidate.name] = checked(
            candidate.context, lambda call=call: reference.error_share(call(sets[0])), device
        )
        if not results[candidate.name].keys() & {"error", "wrong"}:
            calls[candidate.name] = Call(
                candidate.context, lambda i, call=call: call(sets[i]), len(sets)
            )
    return calls, results


def checked(
    context: Callable[[], AbstractContextManager],
    error_share: Callable[[], float],
    device: torch.device,
) -> dict:
    """What the result file says of one check: the error as a share of what is allowed, and `wrong`
    where that is above 1; or `error`, where the implementation refused."""
    try:
        with context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every backend that it rules out
            share = error_share()
    except RuntimeError as error:
        synchronize(device)  # an error that killed the device ends the run here
        return {"error": first_line(error)}
    result = {"error_share": round(share, 4)}
    if not share <= 1:
        result["wrong"] = f"error {share:.3g} times the tolerance"
    return result


def add_timings(
    results: dict[str, dict],
    calls: dict[str, Call],
    flops: int,
    device: torch.device,
    settings: Settings,
    graph: bool = False,
) -> dict[str, Timing]:
    """Times the calls interleaved and notes times and TFLOPS in the results, or why there are
    none."""
    timings, failures = measure(calls, device, settings, graph)
    for name, timing in timings.items():
        tflops = float(f"{flops / timing.median_us * 1e-6:.6g}")  # never 0, however small
        results[name] |= asdict(timing) | {"tflops": tflops}
    for name, reason in failures.items():
        results[name] = {"error": reason}
    return timings


def eager_mode(device: torch.device) -> str:
    """How eager launches are timed."""
    return "events" if device.type == "cuda" else "host clock"


def problem_fields(problem: Problem) -> dict:
    """What a row of the result file says about its problem."""
    fields = {"label": problem.label()} | asdict(problem)
    del fields["graph"], fields["in_l2"]  # as mode and input_sets say
    return fields | {"dtype": str(problem.dtype).removeprefix("torch.")}


# ------------------------------------------------------------------------------------------------
# Ceilings and the environment stamp


def ceilings(dtypes: Iterable[torch.dtype], device: torch.device, settings: Settings) -> dict:
    """The rates of a square matrix product (cuBLAS on the GPU) in each dtype and of a device copy
    (bytes read + bytes written), measured like a candidate."""
    size, copy_bytes = (8192, 2**30) if device.type == "cuda" else (1024, 2**26)
    calls = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        name = f"gemm_{str(dtype).removeprefix('torch.')}_tflops"
        calls[name] = Call(nullcontext, lambda _, a=a, b=b: torch.mm(a, b))
    source = torch.randn(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    calls["copy_gbs"] = Call(nullcontext, lambda _: target.copy_(source))
    timings, failures = measure(calls, device, settings)
    work = {name: 2 * size**3 / 1e6 for name in calls} | {"copy_gbs": 2 * copy_bytes / 1e3}
    rates = {name: round(work[name] / timing.median_us, 3) for name, timing in timings.items()}
    return rates | {f"{name}_error": reason for name, reason in failures.items()}


def roofline_share(row: dict, name: str, rates: dict) -> float | None:
    """The least time the work of a row could take at the measured ceilings, over the time taken.
    It can pass 1: a GPU at its power limit runs some attention kernels faster than the product."""
    gemm, copy = rates.get(f"gemm_{row['dtype']}_tflops"), rates.get("copy_gbs")
    median = row["results"].get(name, {}).get("median_us")
    if not (gemm and copy and median):
        return None
    return max(row["flops"] / (gemm * 1e6), row["bytes"] / (copy * 1e3)) / median


def settle(device: torch.device, least_seconds: float = 1.0, most_seconds: float = 5.0) -> dict:
    """Loads the GPU until its speed changes by less than 1 % between tenths of a second, and
    returns the clocks and the power under that load. Nothing to do on the CPU."""
    if device.type == "cpu":
        return {}
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    product = _Loop(nullcontext, lambda: [torch.mm(a, a) for _ in range(10)], 10)
    start, previous = time.perf_counter(), math.inf
    while time.perf_counter() - start < most_seconds:
        window = statistics.median(_time_rounds([product], 50, device)[0])
        steady = abs(window / previous - 1) < 0.01
        if steady and time.perf_counter() - start > least_seconds:
            break
        previous = window
    query = _start_gpu_query(device)
    start = time.perf_counter()
    while query is not None and query.poll() is None and time.perf_counter() - start < 5:
        _time_rounds([product], 5, device)
    return _read_gpu_query(query, device)


GPU_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def gpu_state(device: torch.device) -> dict:
    """Driver, clocks, power and temperature as nvidia-smi reads them now; empty where it cannot."""
    return _read_gpu_query(_start_gpu_query(device), device)


def _start_gpu_query(device: torch.device) -> subprocess.Popen | None:
    if device.type == "cpu":
        return None
    fields = ",".join(["uuid", *GPU_FIELDS])
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _read_gpu_query(query: subprocess.Popen | None, device: torch.device) -> dict:
    if query is None:
        return {}
    try:
        text, _ = query.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        query.kill()
        query.communicate()
        return {}
    # nvidia-smi lists every GPU of the machine, in an order of its own.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for line in text.splitlines():
        found, *values = (value.strip() for value in line.split(","))
        if found.endswith(uuid) and len(values) == len(GPU_FIELDS):
            return dict(zip(GPU_FIELDS.values(), values, strict=True))
    return {}


def environment(device: torch.device) -> dict:
    """Versions, hardware, and the commit of the checkout (None outside one). `dirty` tells whether
    a tracked file differs from the commit."""
    changes = _output("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no")
    stamp = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _output("git", "-C", ROOT, "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        return stamp | {"device": _cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()
    cuda_home = os.environ.get("CUDA_HOME")
    nvcc = _output(Path(cuda_home, "bin", "nvcc") if cuda_home else "nvcc", "--version")
    return stamp | {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nvcc": nvcc.splitlines()[-1] if nvcc else None,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


def _output(*command: object) -> str | None:
    """The output of a command; None if it is missing or fails."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------
# Progress and the result file


class Progress:
    """Prints finished lines to stdout, and on a terminal a progress bar below them: tqdm's where it
    is installed."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.perf_counter()
        self.shown = sys.stderr.isatty()
        self.bar = None
        if self.shown:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(total=total)

    def advance(self, line: str) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.write(line)
            self.bar.update()
        elif self.shown:
            print(f"\r\033[K{line}", flush=True)
            filled = "#" * (30 * self.done // self.total)
            seconds = time.perf_counter() - self.start
            text = f"[{filled:.<30}] {self.done}/{self.total}  {seconds:.0f} s"
            print(text, end="", file=sys.stderr, flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            print(file=sys.stderr)


def write_result(path: Path, result: dict) -> None:
    """Writes a result file: JSON with one row per line, so that differences read well. Replaces
    the file in one step: a run that is cut short leaves what it has measured."""
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    text = f'{head.removesuffix("}").rstrip()},\n "rows": [\n{rows}\n ]\n}}\n'
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)


def read_result(path: Path) -> dict:
    """Reads a result file; RuntimeError if it has another schema."""
    result = json.loads(Path(path).read_text())
    if result.get("schema") != SCHEMA:
        raise RuntimeError(f"{path}: schema must be {SCHEMA}, got {result.get('schema')}")
    return result
