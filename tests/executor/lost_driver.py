"""A driver of its own process, to be stopped and killed: `python lost_driver.py FOLDER ADDRESS`.

Says on standard output, one JSON list per line: the processes of its ranks; once they are lost, why
and which spares it has; then rebuilds again and again, killing what it has built, and says the
processes of each group as soon as it knows them, until it is killed.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any

import ray

from executor.bare_ranks import BareRanks


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def processes(ranks: BareRanks) -> list[tuple[int, int]]:
    return [place.process for place in ranks.executor.places]


def tell_of_new_groups(ranks: BareRanks) -> None:
    """While the main thread builds them."""
    told = processes(ranks)
    while True:
        time.sleep(0.01)
        if (now := processes(ranks)) and now != told:
            told = now
            say(told)


def main() -> None:
    folder, address = sys.argv[1:]
    ray.init(address=address, logging_level="error", log_to_driver=False)
    ranks = BareRanks(folder, 2, spare_workers=1, executor="ray")
    ranks.open()
    say(processes(ranks))
    while ranks.executor.loss is None:
        time.sleep(0.02)
    say([ranks.executor.loss.cause, ranks.spare_processes()])
    threading.Thread(target=tell_of_new_groups, args=(ranks,), daemon=True).start()
    while True:
        ranks.rebuild()
        ranks.signal(1, signal.SIGKILL)
        while ranks.executor.loss is None:
            time.sleep(0.02)


if __name__ == "__main__":
    main()
