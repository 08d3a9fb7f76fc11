"""A program that a template forks in place of a rank: prints what it has of its own, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import numpy as np

if __name__ == "__main__":
    clock = time.pthread_getcpuclockid(threading.get_ident())
    facts = {
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "the C library knows its number": ~(clock >> 3) == os.getpid(),
        "Ctrl-C ends it": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "input": os.readlink("/proc/self/fd/0"),
        "open": len(os.listdir("/proc/self/fd")) - 1,
        "arguments": sys.argv[1:],
        "variable": os.environ.get("TPENGINE_TEST_FORK"),
        "threads of numpy": os.environ.get("OPENBLAS_NUM_THREADS"),
        "random": int(np.random.randint(1 << 30)),
        "torch is there": "torch" in sys.modules,
    }
    print(json.dumps(facts))
    sys.exit(5)
