"""Breaks one line of the package at a time, and asks whether the tests notice: a script.

`tests/data/breaks.toml` holds the breaks, each with the few tests that must turn red. When tests
are merged, or code is moved, the same breaks must still be caught:

    python tests/breaks.py -j 2              all, two at a time
    python tests/breaks.py --room worker     one room
    python tests/breaks.py victim-order      by id
    python tests/breaks.py --check           runs no test: each line and each test is there

A break is applied in a copy of the working tree in a temporary folder, so an interrupted run leaves
nothing behind. It is caught if a test fails by itself, not in a fixture or for a name that is not
there, and if the same tests pass without the break. A break of the CPU kernels builds them for the
generic instruction set alone; compiled objects stay in build/breaks.

Where code moves: a line that is no longer in its file is looked for in all files of that kind, and
a test whose id is gone is looked for by the name of its function. The table names what was found
elsewhere, so renamed files need no change here. If a line itself changes, write the new line into
breaks.toml, with a break that a user would notice in the same way; if a test becomes part of
another one, write that one's id.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "breaks.toml"
OBJECTS = ROOT / "build" / "breaks"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w")
LIBRARY = "libtpengine_cpu.so"
QUICK = ("-m", "not soak and not check")
CAUGHT, GREEN = "caught", "green"
NOT_OWN = (
    "NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "UnboundLocalError",
    "Failed: Timeout",
)  # fmt: skip
"""Beginnings of failures that are none of the test: a name is not there, or time is up."""
_PRELOADED = ("torch._dynamo", "transformers.models.llama.modeling_llama", "hypothesis.strategies")
"""Imported once, since each break runs in a fork of this process. Not the package itself."""
Known = Mapping[str, Sequence[str]]
"""Ids of all tests, by the id of their function."""


class LostError(Exception):
    """A break cannot be applied or asked for any more; the text says why."""


@dataclass(frozen=True)
class Break:
    """One wrong line.

    Attributes:
        old, new: the line without its indentation, and what replaces it.
        notice: what a user would notice.
        tests: ids of tests, of which at least one must fail.
        moved: where line and tests were found, if not where the data says.
    """

    id: str
    room: str
    file: str
    old: str
    new: str
    notice: str
    tests: Sequence[str]
    moved: str = ""

    @property
    def needs_build(self) -> bool:
        """Whether the compiled library of the CPU kernels changes."""
        return self.file.startswith(("csrc/cpu/", "csrc/common/"))

    @property
    def line(self) -> re.Pattern[str]:
        """The line with any indentation, and nothing else."""
        return re.compile(rf"^([ \t]*){re.escape(self.old)}$", re.MULTILINE)

    def apply(self, text: str) -> str:
        """A file's text with the break."""
        return self.line.sub(lambda match: match[1] + self.new, text)


def tracked_files() -> list[Path]:
    """Files of the working tree that Git knows or would add, relative to it."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if (ROOT / name).is_file()]


def collect(places: Sequence[str]) -> Known:
    """Collects the tests of some files or folders of the working tree."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *QUICK, *places]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=False)
    known: dict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        known[line.partition("[")[0]].append(line)
    return dict(known)


def find_line(one: Break, files: Sequence[Path]) -> str:
    """The file that holds the line of a break, once; LostError: no file does, or not once."""

    own, counts = Path(one.file), Counter[str]()
    for file in files:
        if file.suffix == own.suffix and file.parts[0] in ("tpengine", "csrc"):
            counts[str(file)] = len(one.line.findall((ROOT / file).read_text()))
    found = [one.file] if counts[one.file] else list(counts.elements())
    if len(found) != 1 or counts[found[0]] != 1:
        raise LostError(f"the line is there {counts.total()} times {' '.join(found)}".rstrip())
    return found[0]


def find_test(test: str, known: Known) -> str:
    """The id of a test, or of the only one of its name in another file."""
    function, bracket, values = test.partition("[")
    name = f"::{function.rpartition('::')[2]}"
    same = [function] if function in known else [x for x in known if x.endswith(name)]
    found = [x + bracket + values for x in same if not bracket or x + bracket + values in known[x]]
    if len(found) != 1:
        raise LostError(f"tests not found: {test}")
    return found[0]


def locate(one: Break, files: Sequence[Path], known: Known) -> Break:
    """Brings a break to where its line and its tests are now, or raises LostError."""
    before = [one.file, *one.tests]
    now = [find_line(one, files), *(find_test(test, known) for test in one.tests)]
    moved = " ".join(new for new in now if new not in before)
    try:
        if now[0].endswith(".py"):
            ast.parse(one.apply((ROOT / now[0]).read_text()))
    except SyntaxError as error:
        raise LostError(f"the new line is no Python there: {error}") from error
    return replace(one, file=now[0], tests=now[1:], moved=moved and f"  (now {moved})")


def make_tree(tree: Path, files: Sequence[Path]) -> Path:
    """Copies the working tree, with its compiled libraries as links."""
    for file in files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)
    # An editable install would import the working tree before any folder of PYTHONPATH.
    hook = "import sys\nsys.meta_path[:] = [x for x in sys.meta_path if 'Scikit' not in repr(x)]\n"
    (tree / "sitecustomize.py").write_text(hook)
    libraries, spec = tree / "tpengine" / "lib", importlib.util.find_spec("tpengine")
    libraries.mkdir()
    for place in (ROOT / "tpengine", *((spec and spec.submodule_search_locations) or ())):
        for library in Path(place, "lib").glob("*.so"):
            if not (libraries / library.name).exists():
                (libraries / library.name).symlink_to(library)
    return tree


def build_cpu(tree: Path) -> None:
    """Builds the CPU kernels of a tree for the generic instruction set, or raises LostError."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    objects, stub = [], tree / "libtorch_cpu.so"
    for source in (tree / "csrc" / "cpu").glob("*.cpp"):
        if "avx" not in source.name:
            name = hashlib.sha256(_compile("-E", "-P", str(source))).hexdigest()
            objects.append(OBJECTS / f"{name}.o")
            if not objects[-1].exists():
                part = objects[-1].with_suffix(f".{tree.name}")
                _compile("-c", str(source), "-o", str(part))
                part.replace(objects[-1])
    library = tree / "tpengine" / "lib" / LIBRARY
    library.unlink(missing_ok=True)
    _compile("-shared", "-x", "c", "/dev/null", "-o", str(stub), f"-Wl,-soname,{stub.name}")
    torch = ("-Wl,--no-as-needed", f"-L{tree}", "-ltorch_cpu")
    _compile("-shared", *map(str, objects), *torch, "-o", str(library))


def _compile(*args: str) -> bytes:
    done = subprocess.run(["g++", *FLAGS, *args], capture_output=True, check=False, timeout=300)
    if done.returncode:
        raise LostError(f"it does not compile: {done.stderr.decode()[-300:]}")
    return done.stdout


def _pytest_in(tree: Path, args: Sequence[str]) -> None:
    """Runs pytest in a fork of this process, on the package of a tree."""
    os.setsid()  # so that what it starts can be ended with it
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
    sys.meta_path[:] = [x for x in sys.meta_path if "Scikit" not in repr(x)]
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *QUICK, *args]))


def run_tests(
    tree: Path, tests: Sequence[str], limit_s: float, *options: str
) -> tuple[str, dict[str, str]]:
    """Runs tests; returns `green`, `caught` or what else came, and the reasons of red tests."""
    report = tree / "report.xml"
    args = [*options, f"--timeout={limit_s:g}", f"--junitxml={report}", *tests]
    process = multiprocessing.get_context("fork").Process(target=_pytest_in, args=(tree, args))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return f"over {limit_s:g} s", {}
    if process.exitcode not in (0, 1):
        return f"exit code {process.exitcode} of pytest", {}
    red, num_passed = {}, 0
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is not None:
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            red[test] = failure.get("message", "")
        num_passed += not len(case)
    if process.exitcode == 0:
        return GREEN if num_passed else "skipped", red
    if any(not reason.startswith(NOT_OWN) for reason in red.values()):
        return CAUGHT, red
    return f"failed otherwise: {' '.join(red.values())[:90] or 'in a fixture'}", red


class Runner:
    """Runs tests in copies of the working tree, at one time one break in each."""

    def __init__(self, trees: Sequence[Path], limit_s: float) -> None:
        self._trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._limit_s = limit_s
        for tree in trees:
            self._trees.put(tree)

    def run(self, one: Break) -> tuple[Break, str, float]:
        """Returns a break, its verdict, and the seconds that it took."""
        tree, start = self._trees.get(), time.monotonic()
        path, library = tree / one.file, tree / "tpengine" / "lib" / LIBRARY
        text, times = path.read_text(), (path.stat().st_atime, path.stat().st_mtime)
        built = library.readlink() if one.needs_build else None
        try:
            path.write_text(one.apply(text))
            # Python compiles a module anew if its time or size has changed.
            os.utime(path, (start, times[1] - 1000.0 - start))
            if one.needs_build:
                build_cpu(tree)
            verdict, _ = run_tests(tree, one.tests, self._limit_s, "-x")
        except LostError as error:
            verdict = str(error)
        finally:
            path.write_text(text)
            os.utime(path, times)
            if built is not None:
                library.unlink(missing_ok=True)
                library.symlink_to(built)
            self._trees.put(tree)
        return one, "NOT CAUGHT" if verdict == GREEN else verdict, time.monotonic() - start

    def red_without(self, breaks: Sequence[Break]) -> dict[str, str]:
        """Runs the tests of breaks without these; returns the red ones with their reasons. If
        these breaks build the library, it stays in a tree that no other test uses any more."""
        tests, tree = sorted({test for one in breaks for test in one.tests}), self._trees.get()
        if breaks[0].needs_build:
            build_cpu(tree)
        verdict, red = run_tests(tree, tests, self._limit_s * len(tests))
        self._trees.put(tree)
        return red if verdict in (GREEN, CAUGHT) else dict.fromkeys(tests, verdict)


def show(one: Break, verdict: str, spent_s: float = 0.0) -> None:
    print(f"{one.room:13} {one.id:22} {spent_s:5.1f} s  {verdict}{one.moved}", flush=True)


def run_all(breaks: Sequence[Break], limit_s: float, num_trees: int) -> Counter[str]:
    """Runs breaks, then the tests of those that are caught without them; the caught, by room."""
    files, caught, counts = tracked_files(), list[Break](), Counter[str]()
    for module in _PRELOADED:
        importlib.import_module(module)
    with (
        tempfile.TemporaryDirectory(prefix="breaks-") as folder,
        ThreadPoolExecutor(num_trees) as pool,
    ):
        trees = [make_tree(Path(folder) / str(i), files) for i in range(num_trees)]
        runner = Runner(trees, limit_s)
        for one, verdict, spent_s in pool.map(runner.run, breaks):
            show(one, verdict, spent_s)
            caught += [one] if verdict == CAUGHT else []
        others = [one for one in caught if not one.needs_build]
        shares = filter(None, (others[i::num_trees] for i in range(num_trees)))
        reds = [*pool.map(runner.red_without, shares)]
        if built := [one for one in caught if one.needs_build]:
            reds.append(runner.red_without(built))
    red = {test: reason for found in reds for test, reason in found.items()}
    for one in caught:
        reasons = [why for test, why in red.items() if test.startswith(tuple(one.tests))]
        counts[one.room] += not reasons
        if reasons:
            show(one, f"red without the break: {reasons[0][:90]}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="of breaks; default: all")
    parser.add_argument("--room", action="append", help="only breaks of this room")
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a break; default 60")
    parser.add_argument("-j", type=int, default=1, help="breaks that run side by side")
    args = parser.parse_args()
    start, files, located = time.monotonic(), tracked_files(), list[Break]()
    breaks = [Break(**entry) for entry in tomllib.loads(DATA.read_text())["break"]]
    ids, rooms = args.ids or [x.id for x in breaks], args.room or [x.room for x in breaks]
    chosen = [one for one in breaks if one.id in ids and one.room in rooms]
    places = {test.partition("::")[0] for one in chosen for test in one.tests}
    known = collect([place for place in places if (ROOT / place).exists()])
    if any(test.partition("[")[0] not in known for one in chosen for test in one.tests):
        known = collect(["tests"])
    for one in chosen:
        try:
            located.append(locate(one, files, known))
            if args.check and located[-1].moved:
                show(located[-1], "moved")
        except LostError as error:
            show(one, str(error))
    if args.check:
        counts = Counter(one.room for one in located)
    else:
        counts = run_all(located, args.limit, args.j)
    word = "there" if args.check else CAUGHT
    for room, number in Counter(one.room for one in chosen).items():
        print(f"{room:13} {counts[room]:3} of {number:3} {word}")
    print(f"{counts.total()} of {len(chosen)} {word} in {time.monotonic() - start:.0f} s")
    return 0 if counts.total() == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
