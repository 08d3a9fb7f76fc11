"""A progress bar over an engine's requests that moves with its tokens, too."""

from __future__ import annotations

import time
from collections.abc import Collection
from types import TracebackType

from tqdm import tqdm

from tpengine.engine.figures import EngineFigures
from tpengine.outputs import RequestOutput

_REFRESH_S = 0.25


class ProgressBar:
    """Prompts that were completed, those that were refused beside them, and tokens per second since
    it was opened; a context manager.

    Args:
        figures: of the engine, whatever else it serves meanwhile.
        total: prompts.
        is_shown: else nothing is.
    """

    def __init__(self, figures: EngineFigures, total: int, is_shown: bool) -> None:
        self._figures = figures
        self._first = figures.prompt_tokens, figures.output_tokens
        self._num_refused = 0
        self._start = self._shown = time.monotonic()
        self._bar = tqdm(total=total, desc="Processed prompts", unit="prompt", disable=not is_shown)

    def update(self, ended: Collection[RequestOutput]) -> None:
        """After a step: these prompts have ended, well or not."""
        if self._bar.disable:
            return
        num_refused = sum(output.error is not None for output in ended)
        num_completed = len(ended) - num_refused
        self._num_refused += num_refused
        now = time.monotonic()
        # A prompt's end is drawn as often as tqdm likes; a long one's tokens do not wait for it.
        if num_completed:
            self._tell(now)
            self._bar.update(num_completed)
        elif num_refused or now - self._shown >= _REFRESH_S:
            self._tell(now)
            self._bar.refresh()
            self._shown = now

    def _tell(self, now: float) -> None:
        elapsed_s = max(now - self._start, 1e-9)
        num_input = self._figures.prompt_tokens - self._first[0]
        num_output = self._figures.output_tokens - self._first[1]
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
