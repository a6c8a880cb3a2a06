"""The tests of a GPU machine in one go, with a file that says what ran where and how it ended.

    python tests/gpu_run.py tests/results/h200.json [--full] [--select EXPRESSION] [-- PYTEST ARGS]

Runs pytest on the cases for CUDA and then tests/sanitize.py, against the installed package, and
writes one JSON file. The exit status is 1 if a test failed, none passed, or a tool found something.
"""

import argparse
import collections
import json
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import sanitize
import torch

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.append(str(CHECKOUT / "benchmarks"))

from harness import environment, gpu_state  # noqa: E402

import flashattn_ext  # noqa: E402


def read_junit(path):
    """Counts, failing tests with the first line of their message, skip reasons and slow tests."""
    counts = collections.Counter(passed=0, failed=0, skipped=0)
    failing, reasons, durations = [], collections.Counter(), []
    for case in ElementTree.parse(path).iter("testcase"):
        # classname is the path of the file with dots, which has no folder deeper than tests.
        file = case.get("classname", "").replace("tests.", "", 1)
        name = f"tests/{file}.py::{case.get('name')}"
        durations.append((float(case.get("time", 0)), name))
        outcome = "passed"
        for child in case:
            message = (child.get("message") or child.text or "").split("\n")[0][:500]
            if child.tag in ("failure", "error"):
                outcome = "failed"
                failing.append({"test": name, "message": message})
            elif child.tag == "skipped":
                outcome = "skipped"
                reasons[message] += 1
        counts[outcome] += 1
    slowest = [{"test": name, "seconds": s} for s, name in sorted(durations, reverse=True)[:10]]
    return {
        **counts,
        "failing": failing,
        "skip_reasons": dict(reasons.most_common()),
        "slowest": slowest,
    }


def run_pytest(select, seed, full, extra):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-k", select, "--seed", str(seed)]
        command += ["--full"] if full else []
        command += extra
        start = time.monotonic()
        status = subprocess.run([*command, f"--junitxml={report}"], cwd=CHECKOUT).returncode
        seconds = round(time.monotonic() - start, 1)
        result = read_junit(report) if report.exists() else {"passed": 0, "failing": []}
    shown = shlex.join(["python", *command[1:]])
    return {"command": shown, "status": status, "seed": seed, "seconds": seconds, **result}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--select", default="cuda", help="which tests, as pytest's -k")
    parser.add_argument("--full", action="store_true", help="with the long sweeps and big tensors")
    parser.add_argument("--no-sanitize", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--commit", help="the commit tested, where the files lie outside git")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    # Split here: argparse does not keep what follows "--" apart once options precede it.
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: the tests for a CPU run with pytest alone")
    if not flashattn_ext.build_info()["with_cuda"]:
        raise SystemExit("flashattn_ext was built without CUDA: nothing here would be tested")
    if not arguments.no_sanitize:
        sanitize.find_sanitizer()  # or stop here, not after the tests

    device = torch.device("cuda", torch.cuda.current_device())
    stamp = environment(device) | gpu_state(device) | {"gpus": torch.cuda.device_count()}
    if arguments.commit is not None:
        stamp |= {"commit": arguments.commit, "dirty": None}
    result = {
        "kind": "tests",
        "environment": stamp,
        "package": flashattn_ext.build_info(),
        "pytest": run_pytest(
            arguments.select, arguments.seed, arguments.full, sys.argv[split + 1 :]
        ),
        "sanitize": None if arguments.no_sanitize else sanitize.sanitize(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    tests_pass = result["pytest"]["status"] == 0 and result["pytest"]["passed"] > 0
    tools_pass = all(tool["clean"] for tool in result["sanitize"] or ())
    verdict = "passed" if tests_pass and tools_pass else "FAILED"
    print(f"{verdict}; written to {arguments.output}")
    return 0 if tests_pass and tools_pass else 1


if __name__ == "__main__":
    sys.exit(main())
