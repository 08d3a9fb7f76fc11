"""A progress bar over prompts and tokens."""

from __future__ import annotations

import time
from collections.abc import Collection
from types import TracebackType

from tqdm import tqdm

from tpengine.engine.stats import EngineCounters
from tpengine.outputs import RequestOutput

_REFRESH_S = 0.25


class ProgressBar:
    """Shows how many prompts were completed and refused, and tokens per second since it was opened.
    A context manager.

    Args:
        counters: of the engine; tokens of its other requests count too.
        total: number of prompts.
        is_shown: False: the bar prints nothing.
    """

    def __init__(self, counters: EngineCounters, total: int, is_shown: bool) -> None:
        self._counters = counters
        self._first = counters.prompt_tokens, counters.output_tokens
        self._num_refused = 0
        self._start = self._shown = time.monotonic()
        self._bar = tqdm(total=total, desc="Processed prompts", unit="prompt", disable=not is_shown)

    def update(self, ended: Collection[RequestOutput]) -> None:
        """Adds prompts that a step completed, refused or failed."""
        if self._bar.disable:
            return
        num_refused = sum(output.error is not None for output in ended)
        num_completed = len(ended) - num_refused
        self._num_refused += num_refused
        now = time.monotonic()
        # tqdm decides how often the end of a prompt is drawn; tokens of long prompts are drawn
        # between them.
        if num_completed:
            self._write_rates(now)
            self._bar.update(num_completed)
        elif num_refused or now - self._shown >= _REFRESH_S:
            self._write_rates(now)
            self._bar.refresh()
            self._shown = now

    def _write_rates(self, now: float) -> None:
        elapsed_s = max(now - self._start, 1e-9)
        num_input = self._counters.prompt_tokens - self._first[0]
        num_output = self._counters.output_tokens - self._first[1]
        refused = f"refused {self._num_refused}, " if self._num_refused else ""
        self._bar.set_postfix_str(
            f"{refused}input {num_input / elapsed_s:.1f} tokens/s, "
            f"output {num_output / elapsed_s:.1f} tokens/s",
            refresh=False,
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
