"""Which processes live, as Linux tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tpengine.host import living_fields, start_ticks

LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60.0,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone
"""


def test_process_that_is_not_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert start_ticks(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert living_fields(process.pid) is None
        assert start_ticks(process.pid) is None
    finally:
        process.communicate(timeout=30.0)
    assert start_ticks(process.pid) is None


def test_one_whose_threads_have_not_all_ended() -> None:
    """Its first thread looks like a dead process; the others hold its memory and files."""
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while (fields := living_fields(process.pid)) is not None and fields[0] != "Z":
            assert process.poll() is None
        assert fields is not None
        assert start_ticks(process.pid) == int(fields[19])
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30.0)
    assert start_ticks(process.pid) is None
