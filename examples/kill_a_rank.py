"""Starts two ranks, kills one in the middle of a stream, and shows that the stream goes on.

python examples/kill_a_rank.py [MODEL]
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from tpengine import LLM, SamplingParams

PROMPT = "Once upon a time"
RANK_NAME = "tpengine-rank"
KILL_AFTER = 24  # pieces of text
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "cpu_kv_cache_space": 0.05,  # GiB, of each rank
    "disable_log_stats": True,
}
if len(sys.argv) > 1:
    SETTINGS["model"] = sys.argv[1]
sampling_params = SamplingParams(temperature=0.0, max_tokens=96)


def is_mine(pid: int) -> bool:
    """Whether this process has started a process, directly or through others."""
    while pid > 1 and pid != os.getpid():
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])  # the parent
    return pid == os.getpid()


def rank_processes() -> list[int]:
    """Process ids of this program's ranks: children with the name of one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended since
            is_rank = (folder / "comm").read_text().startswith(RANK_NAME)
            pid = int(folder.name)
            if is_rank and pid != os.getpid() and is_mine(pid):
                found.append(pid)
    return sorted(found)


def main() -> None:
    """Streams one answer, kills a rank in the middle, and compares with an answer of one rank."""
    with LLM(**SETTINGS) as llm:
        undisturbed = "".join(llm.stream(PROMPT, sampling_params))
    text, longest_s = "", 0.0
    with LLM(tensor_parallel_size=2, executor="processes", **SETTINGS) as llm:
        ranks = rank_processes()
        print(f"--- two ranks: processes {ranks}\n{PROMPT}", end="", flush=True)
        last = time.monotonic()
        for number, piece in enumerate(llm.stream(PROMPT, sampling_params), 1):
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
            text += piece
            print(piece, end="", flush=True)
            if number == KILL_AFTER:
                os.kill(ranks[-1], signal.SIGKILL)
                print(f"\n--- killed {ranks[-1]}; the stream goes on:")
    print(f"\n--- the longest pause took {longest_s:.1f} s")
    print(f"--- the text is that of an undisturbed run: {text == undisturbed}")
    sys.exit(text != undisturbed)


if __name__ == "__main__":
    main()
