"""Counts how a step, a gRPC or HTTP request and a rank loss walk through the package's files.

Runs on commits as of d159646: `PYTHONPATH=CHECKOUT python walks.py step` (or `grpc`, `http`,
`loss`), since it uses public names only. Control enters a file when a function of that file is
called from another file of the package. Fewer files and fewer entries mean that a reader follows
the work more easily.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import psutil

import tpengine
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.tpengine_pb2_grpc import GenerationServiceStub

PACKAGE = f"{Path(tpengine.__file__).parent}{os.sep}"
TIMEOUT_S = 120.0
PORTS = {"gRPC": 50151, "HTTP": 50152}
PROMPT = "The capital of France is"
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
            engine.add_request(str(index), PROMPT, params)
        for _ in range(20):
            engine.step()
        engine.add_request("4", PROMPT, params)
        with Walk() as walk:
            engine.step()
        engine.abort_request([str(index) for index in range(5)])
    report("a step", walk.entries)
    report("  of it in the worker", [e for e in walk.entries if e[1].startswith("worker")])


def walk_request(door: str) -> None:
    """A streamed request of one token through gRPC or HTTP: down to the scheduler, and up again.
    The server runs in this process, the client in a thread."""
    times: list[tuple[float, float]] = []
    client = threading.Thread(target=_ask_server, args=(door, times), daemon=True)
    client.start()
    sys.argv = ["tpengine", "serve", "--device", "cpu", "--cpu-kv-cache-space", "0.02"]
    sys.argv += ["--port", str(PORTS["gRPC"]), "--http-port", str(PORTS["HTTP"])]
    with Walk() as walk, contextlib.suppress(SystemExit):
        runpy.run_module("tpengine", run_name="__main__")
    client.join(TIMEOUT_S)
    start, end = times[-1]
    of_request = [entry for entry in walk.entries if start <= entry[0] <= end]
    added = next(
        index
        for index, (_, place, name) in enumerate(of_request)
        if (place, name) == (os.path.join("scheduling", "scheduler.py"), "add_request")
    )
    computed = max(i for i, (_, place, _) in enumerate(of_request) if place.startswith("worker"))
    report(f"a request through {door} on its way down", of_request[: added + 1])
    report(f"a request through {door} on its way up", of_request[computed + 1 :])


def _ask_server(door: str, times: list[tuple[float, float]]) -> None:
    """Waits for the server, notes when three requests began and ended, and ends the server."""
    ask = {"gRPC": _over_grpc, "HTTP": _over_http}[door]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(times) < 3 and time.monotonic() < deadline:
            time.sleep(0.5)  # what the request before left to do is over
            start = time.monotonic()
            with contextlib.suppress(OSError, grpc.RpcError):  # the server is not ready
                ask()
                times.append((start, time.monotonic()))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _over_grpc() -> None:
    sampling = pb.SamplingParams(max_tokens=1, temperature=0.0)
    request = pb.GenerateRequest(prompt=PROMPT, sampling=sampling)
    with grpc.insecure_channel(f"127.0.0.1:{PORTS['gRPC']}") as channel:
        list(GenerationServiceStub(channel).GenerateStream(request, timeout=TIMEOUT_S))


def _over_http() -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS['HTTP']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        answer.read()


def walk_loss() -> None:
    """The driver's way from a killed rank of two to the next token, over Ray."""
    from tpengine import LLMEngine, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    args = _engine_args(tensor_parallel_size=2, executor="ray")
    walk = Walk()
    with walk:  # threads of the start are watched too
        engine = LLMEngine.from_engine_args(args)
    with engine:
        engine.add_request("0", PROMPT, params)
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
    lost = [entry for entry in walk.entries if entry[0] >= start]
    report("a rank loss, in the driver", lost)
    report("  of it in the executor", [entry for entry in lost if entry[1].startswith("executor")])


def _engine_args(**options: Any) -> Any:
    from tpengine import EngineArgs

    options = {"cpu_kv_cache_space": 0.02, "swap_space": 0.0, **options}
    return EngineArgs(device="cpu", dtype="float32", disable_log_stats=True, **options)


def _rank_pids() -> list[int]:
    """This program's actors of Ray that have loaded the package's kernels."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            has_kernels = any("libtpengine_cpu.so" in part.path for part in process.memory_maps())
            if has_kernels and process.cmdline()[0].startswith("ray::"):
                pids.append(process.pid)
    return sorted(pids)


def main(words: list[str]) -> None:
    """Counts the walk that is named."""
    walks = {
        "step": walk_step,
        "grpc": partial(walk_request, "gRPC"),
        "http": partial(walk_request, "HTTP"),
        "loss": walk_loss,
    }
    if len(words) != 1 or words[0] not in walks:
        raise SystemExit(f"usage: python walks.py {'|'.join(walks)}")
    walks[words[0]]()


if __name__ == "__main__":
    main(sys.argv[1:])
