"""The progress bar of `LLM`."""

from __future__ import annotations

import time
from collections.abc import Collection

from tqdm import tqdm

from tpengine.engine.stats import EngineCounters
from tpengine.outputs import RequestOutput

_REFRESH_S = 0.25


class ProgressBar(tqdm):  # type: ignore[misc]
    """Shows how many prompts were completed and refused, and tokens per second since it was opened.

    Args:
        counters: of the engine; tokens of its other requests count too.
        total: number of prompts.
        is_shown: False: the bar prints nothing.
    """

    def __init__(self, counters: EngineCounters, total: int, is_shown: bool) -> None:
        self._counters = counters
        self._first = counters.prompt_tokens, counters.output_tokens
        self._num_refused = 0
        self._start = time.monotonic()
        # `miniters=0`: the rates of long prompts change between the ends of prompts.
        refresh = {"miniters": 0, "mininterval": _REFRESH_S, "disable": not is_shown}
        super().__init__(total=total, desc="Processed prompts", unit="prompt", **refresh)

    def add(self, ended: Collection[RequestOutput]) -> None:
        """Adds prompts that a step completed, refused or failed."""
        if self.disable:
            return
        num_refused = sum(output.error is not None for output in ended)
        self._num_refused += num_refused
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        num_input = self._counters.prompt_tokens - self._first[0]
        num_output = self._counters.output_tokens - self._first[1]
        refused = f"refused {self._num_refused}, " if self._num_refused else ""
        self.set_postfix_str(
            f"{refused}input {num_input / elapsed_s:.1f} tokens/s, "
            f"output {num_output / elapsed_s:.1f} tokens/s",
            refresh=False,
        )
        self.update(len(ended) - num_refused)
