"""Cases that need several ranks: all of a test file in one program, on gloo and the CPU.

The test file is the program too, so its end calls main().
"""

import datetime
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def check_cases(file, cases, ranks, seed, folder):
    """Runs the program `file` with so many ranks. case(mesh, ranks) passes if no rank raises."""
    result = subprocess.run(
        [sys.executable, file, str(ranks), str(seed), folder],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [case.__name__ for case in cases]


def main(cases, prepare):
    """The program. prepare() comes before the cases on each rank."""
    ranks = int(sys.argv[1])
    # Nothing has run yet that would have started threads, so that a fork is safe.
    torch.multiprocessing.start_processes(
        _run_rank,
        (cases, prepare, ranks, int(sys.argv[2]), sys.argv[3]),
        nprocs=ranks,
        start_method="fork",
    )


def _run_rank(rank, cases, prepare, ranks, seed, folder):
    """One rank; an exception ends the others too."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = dist.init_device_mesh("cpu", (ranks,))
    prepare()
    for case in cases:
        torch.manual_seed(seed)
        case(mesh, ranks)
        if rank == 0:
            print(case.__name__)
    dist.destroy_process_group()
