"""The walls of CONTRIBUTING.md, read from the sources: who may include what, how long a file gets,
which words stay out, and that README says what the committed files say. Needs no GPU and no build.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
CSRC = CHECKOUT / "csrc"
README = (CHECKOUT / "README.md").read_text()

# What is checked for length and words: everything somebody wrote by hand.
FOLDERS = ("csrc", "flashattn_ext", "tests", "benchmarks", "examples")
TOP = ("*.md", "*.py", "*.toml", ".ci/run", ".pre-commit-config.yaml")
GENERATED = {"_build.py"}
TEXT_FILES = sorted(
    path
    for path in [
        *(path for folder in FOLDERS for path in (CHECKOUT / folder).rglob("*")),
        *(path for pattern in TOP for path in CHECKOUT.glob(pattern)),
    ]
    if path.suffix in {".py", ".md", ".toml", ".h", ".cuh", ".cu", ".cpp", ".txt", ".yaml", ""}
    and path.is_file()
    and path.name not in GENERATED
)
SOURCES = [
    path
    for path in TEXT_FILES
    if path.suffix in {".h", ".cuh", ".cu", ".cpp"}
    and not path.is_relative_to(CHECKOUT / "examples")  # programs of users
]
KERNEL_SIDE = [path for path in SOURCES if path.parent != CSRC / "ops"]

# Folder -> folders and files its files may include, as written relative to csrc/.
MAY_INCLUDE = {
    ".": (),
    "ptx": ("ptx/", "params.h"),
    "tile": ("ptx/", "tile/", "params.h"),
    "attn": ("ptx/", "tile/", "attn/", "params.h"),
    "kernels": ("ptx/", "tile/", "attn/", "kernels/", "params.h"),
    "ops": ("ops/", "params.h", "kernels/launch.h"),
}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
HOPPER = {"ptx/sm90.cuh", "ptx/wgmma.cuh", "tile/mma_sm90.cuh", "tile/tma.cuh", "tile/pipeline.cuh"}
HOPPER_KERNELS = sorted((CSRC / "kernels").glob("*_sm90*.cu*"))
PORTABLE = [
    path
    for path in SOURCES
    if path.is_relative_to(CSRC)
    and path not in HOPPER_KERNELS
    and path.relative_to(CSRC).as_posix() not in HOPPER
]


def name_of(path):
    return path.relative_to(CHECKOUT).as_posix()


def system_includes(path):
    return re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(), re.MULTILINE)


def own_includes(path):
    """The "..." includes of a file, relative to csrc/; each has to exist."""
    found = []
    for text in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
        target = (path.parent / text).resolve()
        assert target.is_file(), f'{name_of(path)}: #include "{text}" is not a file'
        found.append(target.relative_to(CSRC).as_posix())
    return found


def everything_included(path):
    """own_includes, and theirs."""
    seen = set()
    todo = [path]
    while todo:
        new = set(own_includes(todo.pop())) - seen
        seen |= new
        todo += [CSRC / name for name in new]
    return seen


def test_the_checks_see_the_sources():
    """A moved folder must not turn the checks below into loops over nothing."""
    assert {path.parent.name for path in SOURCES} >= set(MAY_INCLUDE) - {"."}
    assert all((CSRC / name).is_file() for name in HOPPER)
    assert HOPPER_KERNELS and any(path.name.endswith("_sm80.cu") for path in PORTABLE)


@pytest.mark.parametrize("path", KERNEL_SIDE, ids=name_of)
def test_no_torch_left_of_the_wall(path):
    assert not [name for name in system_includes(path) if TORCH.search(name)]


@pytest.mark.parametrize("path", sorted((CSRC / "ops").iterdir()), ids=name_of)
def test_no_device_code_right_of_the_wall(path):
    assert path.suffix in {".h", ".cpp"}
    assert not [name for name in everything_included(path) if name.endswith((".cuh", ".cu"))]
    assert "<<<" not in path.read_text() and "__global__" not in path.read_text()


@pytest.mark.parametrize("path", PORTABLE, ids=name_of)
def test_no_hopper_in_the_portable_family(path):
    assert not everything_included(path) & HOPPER


@pytest.mark.parametrize("path", [p for p in HOPPER_KERNELS if p.suffix == ".cu"], ids=name_of)
def test_hopper_kernels_are_empty_for_other_archs(path):
    """setup.py compiles every file for every arch, and their assemblers refuse TMA and wgmma."""
    kernels = re.split(r"\b__global__\b", path.read_text())[1:]
    assert kernels
    for kernel in kernels:
        body = kernel[kernel.index(" {\n") : kernel.index("\n}\n")]
        assert body.startswith(" {\n#if defined(__CUDA_ARCH_FEAT_SM90_ALL)\n")
        assert body.endswith("\n#endif")


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.is_relative_to(CSRC)], ids=name_of
)
def test_includes_point_to_the_left(path):
    allowed = MAY_INCLUDE[path.parent.relative_to(CSRC).as_posix()]
    assert not [name for name in own_includes(path) if not name.startswith(allowed)]


def test_params_is_plain():
    assert system_includes(CSRC / "params.h") == ["cstdint"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_instructions_stay_in_ptx(path):
    assert path.parent.name == "ptx" or not re.search(
        r"\basm\b\s*(volatile)?\s*\(", path.read_text()
    )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_do_not_print_or_exit(path):
    """Errors travel as cudaError_t and exceptions."""
    text = re.sub(r"//.*", "", path.read_text())
    assert not re.search(r"\b(printf|fprintf|puts|abort|exit)\s*\(|std::c(out|err)\b", text)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_open_with_what_they_own(path):
    assert path.read_text().startswith("// ")


@pytest.mark.parametrize("path", TEXT_FILES, ids=name_of)
def test_length(path):
    limit = 1000 if path.parent.name == "tests" else 600  # tables of cases are long, not complex
    assert len(path.read_text().splitlines()) <= limit, "split the file"


# A word and where it is allowed all the same.
FORBIDDEN = [
    (r"\b(pypi\.org|pythonhosted|index-url|find-links|/simple/)", ()),
    (r"(?<![\w.])/(root|work|home|mnt|workspace)/", ()),
    (r"\bsessions?\b(?!\s*[\"'=)])", ("tests/conftest.py",)),  # pytest's own word
    (r"\b(TODO|FIXME|XXX|HACK)\b(?!.*#\d+)", ()),
    (r"\bxfail\b(?!.*#\d+)", ()),
    (r"--?use_fast_math\b", ("CONTRIBUTING.md",)),
]


@pytest.mark.parametrize("path", TEXT_FILES, ids=name_of)
def test_words_that_stay_out(path):
    if path == Path(__file__).resolve():
        return  # it has to spell them
    found = [
        f"line {number}: {match.group(0)}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, allowed in FORBIDDEN
        if (match := re.search(pattern, line)) and name_of(path) not in allowed
    ]
    assert not found


def test_results_in_documents_come_from_committed_files():
    command = [sys.executable, "benchmarks/report.py", "check"]
    result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_names_files_that_exist():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (CHECKOUT / target).exists(), target
