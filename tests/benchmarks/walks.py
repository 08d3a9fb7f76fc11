"""Counts how a step, a gRPC request and a rank loss walk through the package's files.

Runs on any commit: `PYTHONPATH=CHECKOUT python walks.py step` (or `request`, `loss`), since it uses
public names only. Control enters a file when a function of that file is called from another file
of the package. Fewer files and fewer entries mean that a reader follows the work more easily.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tpengine

PACKAGE = f"{Path(tpengine.__file__).parent}{os.sep}"
TIMEOUT_S = 120.0
Entry = tuple[float, str, str]
"""When, which file of the package, which function."""


class Walk:
    """Notes each entry into a file of the package, in all threads that start while it records."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != name:
            place = name.removeprefix(PACKAGE)
            self.entries.append((time.monotonic(), place, frame.f_code.co_name))


def report(title: str, entries: list[Entry]) -> None:
    """Prints files and entries, in all and by room."""
    files = {place for _, place, _ in entries}
    print(f"{title}: {len(files)} files, entered {len(entries)} times")
    rooms = Counter(place.partition(os.sep)[0] for _, place, _ in entries)
    for room, count in sorted(rooms.items()):
        inside = sorted(place for place in files if place.partition(os.sep)[0] == room)
        print(f"  {room:<16} {len(inside):3d} files, {count:4d} entries: {' '.join(inside)}")


def walk_step() -> None:
    """One step in one process: four requests decode, a fifth one's prompt comes in."""
    from tpengine import LLMEngine, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLMEngine.from_engine_args(_engine_args()) as engine:
        for index in range(4):
            engine.add_request(str(index), "The capital of France is", params)
        for _ in range(20):
            engine.step()
        engine.add_request("4", "The capital of France is", params)
        with Walk() as walk:
            engine.step()
        engine.abort_request([str(index) for index in range(5)])
    report("a step", walk.entries)
    report("  of it in the worker", [one for one in walk.entries if one[1].startswith("worker")])


def walk_request() -> None:
    """A streamed request of one token through gRPC: down to the scheduler, and up again."""
    import grpc

    pb, stubs = _protocol()
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as target:
        with grpc.insecure_channel(target) as channel:
            stub = stubs.GenerationServiceStub(channel)
            request = pb.GenerateRequest(
                prompt="The capital of France is",
                sampling=pb.SamplingParams(max_tokens=1, temperature=0.0),
            )
            times = []
            for _ in range(3):
                time.sleep(0.5)  # what the request before left to do is over
                start = time.monotonic()
                list(stub.GenerateStream(request, timeout=TIMEOUT_S))
                times.append((start, time.monotonic()))
        (Path(folder) / "end").touch()
        entries = _read_entries(Path(folder) / "entries.json")
    start, end = times[-1]
    of_request = [one for one in entries if start <= one[0] <= end]
    added = next(
        index
        for index, (_, place, name) in enumerate(of_request)
        if (place, name) == (os.path.join("scheduling", "scheduler.py"), "add_request")
    )
    computed = max(
        index for index, (_, place, _) in enumerate(of_request) if place.startswith("worker")
    )
    report("a gRPC request on its way down", of_request[: added + 1])
    report("a gRPC request on its way up", of_request[computed + 1 :])


def walk_loss() -> None:
    """The driver's way from a killed rank of two to the next token, over Ray."""
    from tpengine import LLMEngine, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    args = _engine_args(tensor_parallel_size=2, executor="ray")
    walk = Walk()
    with walk:  # threads of the start are watched too
        engine = LLMEngine.from_engine_args(args)
    with engine:
        engine.add_request("0", "The capital of France is", params)
        for _ in range(10):
            engine.step()
        with walk:
            start = time.monotonic()
            os.kill(_rank_pids()[-1], signal.SIGKILL)
            while not engine.recoveries:
                engine.step()
                if time.monotonic() - start > TIMEOUT_S:
                    raise SystemExit(f"no recovery within {TIMEOUT_S:g} s")
            engine.step()
        engine.abort_request("0")
    lost = [one for one in walk.entries if one[0] >= start]
    report("a rank loss, in the driver", lost)
    report("  of it in the executor", [one for one in lost if one[1].startswith("executor")])


def _engine_args(**options: Any) -> Any:
    from tpengine import EngineArgs

    return EngineArgs(
        device="cpu",
        dtype="float32",
        cpu_kv_cache_space=0.02,
        swap_space=0.0,
        disable_log_stats=True,
        **options,
    )


def _protocol() -> tuple[Any, Any]:
    """Messages and stubs, wherever the commit keeps them."""
    for home in ("tpengine.proto", "tpengine.server.proto"):
        with contextlib.suppress(ModuleNotFoundError):
            return (
                importlib.import_module(f"{home}.tpengine_pb2"),
                importlib.import_module(f"{home}.tpengine_pb2_grpc"),
            )
    raise SystemExit("this commit has no stubs where this script looks for them")


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """A server that notes its entries; its address. Ends when the file `end` appears, and has
    written them when this context is left."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, "serve-and-note", str(folder)], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while " is ready on " not in (said := log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{said}")
            time.sleep(0.1)
        yield said.partition(" is ready on ")[2].split()[0].rstrip(":;,")
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def _serve_and_note(folder: Path) -> None:
    """In the server's process. The entries are written by a thread when `end` appears."""
    walk = Walk()

    def write_at_end() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (folder / "end").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        new = folder / "entries.new"
        new.write_text(json.dumps(walk.entries))
        new.replace(folder / "entries.json")

    threading.Thread(target=write_at_end, daemon=True).start()
    options = ["--port", "0", "--device", "cpu", "--cpu-kv-cache-space", "0.02"]
    sys.argv = ["tpengine", "serve", *options]
    with walk:
        runpy.run_module("tpengine", run_name="__main__")


def _read_entries(path: Path) -> list[Entry]:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the server did not write its entries")
        time.sleep(0.05)
    return [(when, place, name) for when, place, name in json.loads(path.read_text())]


def _is_mine(pid: int) -> bool:
    """Whether this process has started a process, directly or through others."""
    while pid > 1 and pid != os.getpid():
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])  # the parent
    return pid == os.getpid()


def _rank_pids() -> list[int]:
    """This program's actors of Ray that have loaded the package's kernels."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_actor = (folder / "cmdline").read_bytes().startswith(b"ray::")
            has_kernels = "libtpengine_cpu.so" in (folder / "maps").read_text()
            if is_actor and has_kernels and _is_mine(int(folder.name)):
                found.append(int(folder.name))
    return sorted(found)


def main(words: list[str]) -> None:
    """Counts the walk that is named."""
    walks = {"step": walk_step, "request": walk_request, "loss": walk_loss}
    if words[:1] == ["serve-and-note"]:
        _serve_and_note(Path(words[1]))
    elif len(words) == 1 and words[0] in walks:
        walks[words[0]]()
    else:
        raise SystemExit(f"usage: python walks.py {'|'.join(walks)}")


if __name__ == "__main__":
    main(sys.argv[1:])
