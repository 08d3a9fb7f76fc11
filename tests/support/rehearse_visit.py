"""The command of a visit to a GPU (docs/gpu.md), run to its end where there is none.

    python tests/support/rehearse_visit.py --python /path/to/python3.12 --out /tmp/rehearsal

Each part's command line is executed: Python on a fake card (`fake_card`) and with small sizes, two
cases of each test; the program of kernels on the CPU stand-in. In place of nvcc, ncu,
compute-sanitizer and nvidia-smi there are stubs, which note how they were called and run the
program they were given. Times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = 'PYTHONPATH=. python3 tests/benchmarks visit --out "$OUT"'
MOST_FILES, MOST_BYTES = 8, 16 << 20
"""What comes back from a lent machine."""
_HOOK = ROOT / "tests" / "support" / "fake_card" / "hook"
_STANDIN = ROOT / "tests" / "ops" / "cuda_host"
_NOTE = 'echo "$(basename "$0") $*" >> "$(dirname "$0")/calls"'
_RUNS_A_PROGRAM = f"""{_NOTE}
while [ "${{1#-}}" != "$1" ]; do shift 2; done
exec "$@"
"""
_COMPILES = f"""{_NOTE}
for source; do :; done
while [ "$1" != -o ]; do shift; done
options="-std=c++17 -O1 -U_FORTIFY_SOURCE -DTPENGINE_CUDA_HOST -I {_STANDIN}"
exec g++ $options -x c++ "$source" -o "$2"
"""


def make_stubs(folder: Path, python: str) -> None:
    """Writes the programs of a machine with a GPU; what they are called with is in `calls`."""
    stubs = {
        "python3": f'PYTHONPATH="$PYTHONPATH:{_HOOK}" exec {python} "$@"',
        "nvidia-smi": f"{_NOTE}\necho no driver, no clocks",
        "nvcc": _COMPILES,
        "ncu": f"echo Registers Per Thread, of a stub\n{_RUNS_A_PROGRAM}",
        "compute-sanitizer": _RUNS_A_PROGRAM,
    }
    for name, text in stubs.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


def environment(folder: Path, out: Path) -> dict[str, str]:
    """Of a command that shall find the stubs."""
    threads = {"OMP_NUM_THREADS": "1", "TPENGINE_NUM_THREADS": "1"}
    return {
        **os.environ,
        **threads,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "OUT": str(out),
        "PYTEST_PLUGINS": "support.fake_card.few",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="default: this one")
    parser.add_argument("--out", default="build/rehearsal", type=Path)
    parser.add_argument("--budget-s", default=3600.0, type=float, help="default: %(default)s")
    args = parser.parse_args()
    out = args.out.resolve()
    with tempfile.TemporaryDirectory() as name:
        make_stubs(Path(name), args.python)
        command = f"{COMMAND} --budget-s {args.budget_s}"
        print(command, flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment(Path(name), out),
            timeout=args.budget_s + 60.0,
            check=False,
        )
        print((Path(name) / "calls").read_text())
    files = [path for path in out.rglob("*") if path.is_file()]
    print(f"rc {done.returncode}; {', '.join(f'{p.name} {p.stat().st_size:,}' for p in files)}")
    fits = len(files) <= MOST_FILES and all(p.stat().st_size <= MOST_BYTES for p in files)
    return 0 if done.returncode == 0 and fits else 1


if __name__ == "__main__":
    sys.exit(main())
