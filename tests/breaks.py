"""Breaks one line of the package at a time, and asks whether the tests notice: a script.

`tests/data/breaks.toml` holds the breaks, each with the few tests that must turn red. When tests
are merged, or code is moved, the same breaks must still be caught:

    python tests/breaks.py                   all
    python tests/breaks.py worker min-p      rooms or ids
    python tests/breaks.py --check           runs no test: each line and each test is there

A break is applied in a copy of the working tree in a temporary folder, so an interrupted run leaves
nothing behind. The tests are imported once, and each break runs in a fork of that process: loaded
functions get the code of the changed file, which processes that a test starts read themselves. A
break is caught if a test fails by itself, not in a fixture or for a name that is not there, and if
the same tests pass without the break. A break of the CPU kernels builds them for the generic
instruction set and the emulated one, and its tests run in a new process; compiled objects stay in
build/breaks.

If a line moves or changes, write its file or its new form into breaks.toml, with a break that a
user would notice in the same way; if a test becomes part of another one, write that one's id. Tests
of `make check` and `make soak` do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "breaks.toml"
OBJECTS = ROOT / "build" / "breaks"
FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -fno-math-errno -w -I."
PYTEST = ("-q", "-s", "-n0", "-pno:cacheprovider", "--tb=short", "-m", "not check and not soak")
"""Not the words of `make test`: what `support/forked.py` forks is no child of a break's process."""
CAUGHT, GREEN, THERE = "caught", "NOT CAUGHT", "there"
NOT_OWN = re.compile("(Name|Import|ModuleNotFound|Syntax|UnboundLocal)Error|Failed: Timeout")
"""Beginnings of failures that are none of the test: a name is not there, or time is up."""


class LostError(Exception):
    """A break cannot be applied any more; the text says why."""


@dataclass(frozen=True)
class Break:
    """One wrong line.

    Attributes:
        old, new: the line without its indentation, and what replaces it.
        notice: what a user would notice.
        tests: ids of tests, of which at least one must fail.
    """

    id: str
    room: str
    file: str
    old: str
    new: str
    notice: str
    tests: Sequence[str]

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


def check_line(fault: Break) -> None:
    """Raises LostError if its file does not hold the line once."""
    text = path.read_text() if (path := ROOT / fault.file).exists() else ""
    if (number := len(fault.line.findall(text))) != 1:
        raise LostError(f"{fault.file} has the line {number} times")


def enter_tree(tree: Path) -> None:
    """Copies the working tree, its compiled libraries as links, and goes on there."""
    assert "tpengine" not in sys.modules, "the tests would run the code of the working tree"
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    # An editable install would import the working tree before any folder of PYTHONPATH.
    hook = "import sys\nsys.meta_path[:] = [x for x in sys.meta_path if 'Scikit' not in repr(x)]\n"
    (tree / "sitecustomize.py").write_text(hook)
    (tree / "tpengine" / "lib").mkdir()
    for library in (ROOT / "tpengine" / "lib").glob("*.so"):
        (tree / "tpengine" / "lib" / library.name).symlink_to(library)
    exec(hook)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)


def build_cpu(tree: Path) -> None:
    """Builds the CPU kernels of a tree for the two instruction sets that run anywhere.

    Raises:
        LostError: the code with the break does not compile.
    """
    from tpengine.ops.library import EMULATED_CPU_ISA  # of the tree, which is entered by now

    OBJECTS.mkdir(parents=True, exist_ok=True)
    objects, stub = [], tree / "libtorch_cpu.so"
    isas = {"generic": ["-DTPENGINE_ISA=generic"]}
    isas[EMULATED_CPU_ISA] = [f"-DTPENGINE_ISA={EMULATED_CPU_ISA}", "-DTPENGINE_HAS_TILES"]
    lines = [f"TPENGINE_ISA_1({isa}, true)\n" for isa in isas]  # as CMake writes them
    (tree / "isas.inc").write_text("".join(lines))
    folder = tree / "csrc" / "cpu"
    kernels = itertools.product((folder / "isa").glob("*.cpp"), isas.values())
    for source, options in [*((path, []) for path in folder.glob("*.cpp")), *kernels]:
        name = hashlib.sha256(_compile(*options, "-E", "-P", str(source))).hexdigest()
        objects.append(OBJECTS / f"{name}.o")
        if not objects[-1].exists():
            part = objects[-1].with_suffix(".part")
            _compile(*options, "-c", str(source), "-o", str(part))
            part.replace(objects[-1])
    library = tree / "tpengine" / "lib" / "libtpengine_cpu.so"
    library.unlink(missing_ok=True)
    _compile("-shared", "-x", "c", "/dev/null", "-o", str(stub), f"-Wl,-soname,{stub.name}")
    torch = ("-Wl,--no-as-needed", f"-L{tree}", "-ltorch_cpu")
    _compile("-shared", *map(str, objects), *torch, "-o", str(library))


def _compile(*args: str) -> bytes:
    command = ["g++", *FLAGS.split(), *args]
    done = subprocess.run(command, capture_output=True, check=False, timeout=300)
    if done.returncode:
        raise LostError(f"it does not compile: {done.stderr.decode()[-300:]}")
    return done.stdout


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """All code inside of a code: of functions, classes and comprehensions."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes_of(const)


def put_into_functions(path: Path) -> bool:
    """Gives loaded functions of a file the code that it has now; False: all have it."""
    by_place = defaultdict[tuple[str, int], list[CodeType]](list)
    for code in codes_of(compile(path.read_text(), path, "exec", 0, True)):
        by_place[code.co_qualname, code.co_firstlineno].append(code)
    functions = [x for x in gc.get_objects() if type(x) is FunctionType]
    own = [x for x in functions if x.__code__.co_filename == str(path)]
    is_changed = not own
    for function in own:
        old = function.__code__
        new = by_place[old.co_qualname, old.co_firstlineno]
        if len(new) == 1 and new[0] != old:
            function.__code__, is_changed = new[0], True
    return is_changed


class Breaker:
    """A plugin of pytest, which runs each break in place of the tests that were collected.

    Args:
        limit_s: for the tests of one break; None: no test runs.
    """

    def __init__(self, breaks: Sequence[Break], tree: Path, limit_s: float | None) -> None:
        self.counts = Counter[str]()
        self._breaks, self._tree, self._limit_s = breaks, tree, limit_s
        self._outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message)
            is_own = report.when == "call" and not NOT_OWN.match(reason)
            self._outcomes.append(CAUGHT if is_own else f"failed otherwise: {reason[:90]}")
        elif report.when == "call" and report.passed:
            self._outcomes.append(GREEN)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for fault in self._breaks:
            start = time.monotonic()
            ids = {*fault.tests}
            items = [x for x in session.items if {x.nodeid, x.nodeid.partition("[")[0]} & ids]
            try:
                verdict = self._verdict(fault, items)
            except LostError as error:
                verdict = str(error)
            self.counts[fault.room] += verdict in (CAUGHT, THERE)
            if verdict != THERE:
                show(fault, verdict, time.monotonic() - start)
        return True

    def _verdict(self, fault: Break, items: Sequence[pytest.Item]) -> str:
        if not items:
            return "no quick test has its ids"
        if self._limit_s is None:
            return THERE
        path = self._tree / fault.file
        text, times = path.read_text(), (path.stat().st_atime, path.stat().st_mtime)
        try:
            path.write_text(fault.apply(text))
            # Python compiles a module anew if its time or size has changed.
            os.utime(path, (times[0], times[1] - 1000.0 - time.monotonic()))
            verdict = self._run(fault, items)
        finally:
            path.write_text(text)
            os.utime(path, times)
        if verdict == CAUGHT and self._run(fault, items, is_whole=True) != GREEN:
            return "red without the break"
        return verdict

    def _run(self, fault: Break, items: Sequence[pytest.Item], is_whole: bool = False) -> str:
        """Runs the tests of a break, which is in its file unless the package is whole."""
        if fault.needs_build:
            build_cpu(self._tree)
        answer, fork = Path("verdict.txt"), multiprocessing.get_context("fork")
        answer.unlink(missing_ok=True)
        process = fork.Process(target=self._fork, args=(fault, items, is_whole))
        process.start()
        process.join(self._limit_s)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return f"over {self._limit_s:g} s"
        return answer.read_text() if answer.exists() else f"exit code {process.exitcode}"

    def _fork(self, fault: Break, items: Sequence[pytest.Item], is_whole: bool) -> None:
        path = self._tree / fault.file
        os.setsid()  # so that what it starts can be ended with it
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if fault.needs_build:  # this process has loaded the other library
            command = [sys.executable, "-m", "pytest", *PYTEST, *(item.nodeid for item in items)]
            code = subprocess.run(command, check=False).returncode
            self._outcomes = [{0: GREEN, 1: CAUGHT}.get(code, f"exit code {code} of pytest")]
        elif is_whole or path.suffix != ".py" or put_into_functions(path):
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        else:
            self._outcomes = ["the line is in no function"]
        verdict = max(self._outcomes, key=lambda x: (x == CAUGHT, x != GREEN), default="skipped")
        Path("verdict.txt").write_text(verdict)
        os._exit(0)


def show(fault: Break, verdict: str, spent_s: float = 0.0) -> None:
    line = f"{fault.room:13} {fault.id:22} {spent_s:5.1f} s  {verdict}"
    print(line, file=sys.__stdout__, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of breaks or rooms; default: all")
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a break; default 60")
    args = parser.parse_args()
    start, located = time.monotonic(), list[Break]()
    breaks = [Break(**entry) for entry in tomllib.loads(DATA.read_text())["break"]]
    chosen = [x for x in breaks if not args.names or {x.id, x.room} & {*args.names}]
    for fault in sorted(chosen, key=lambda b: b.needs_build):  # the library stays changed
        try:
            check_line(fault)
            located.append(fault)
        except LostError as error:
            show(fault, f"lost: {error}")
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        tree = Path(folder).resolve()
        enter_tree(tree)
        breaker = Breaker(located, tree, None if args.check else args.limit)
        places = {test.partition("::")[0] for fault in located for test in fault.tests}
        with open("collection.txt", "w") as report, contextlib.redirect_stdout(report):
            pytest.main([*PYTEST, *filter(os.path.exists, sorted(places))], plugins=[breaker])
    word = THERE if args.check else CAUGHT
    for room, number in Counter(fault.room for fault in chosen).items():
        print(f"{room:13} {breaker.counts[room]:3} of {number:3} {word}")
    total = breaker.counts.total()
    print(f"{total} of {len(chosen)} {word} in {time.monotonic() - start:.0f} s")
    return 0 if total == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
