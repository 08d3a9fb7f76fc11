"""A progress bar over an engine's requests that moves with its tokens, too."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm

from tpengine.engine.figures import EngineFigures

_REFRESH_S = 0.25


class ProgressBar:
    """Prompts that are done, and tokens per second since it was opened; a context manager.

    Args:
        figures: of the engine, whatever else it serves meanwhile.
        total: prompts.
        num_done: those that are done already.
        is_shown: else nothing is.
    """

    def __init__(self, figures: EngineFigures, total: int, num_done: int, is_shown: bool) -> None:
        self._figures = figures
        self._first = figures.prompt_tokens, figures.output_tokens
        self._start = self._shown = time.monotonic()
        self._bar = tqdm(
            total=total,
            initial=num_done,
            desc="Processed prompts",
            unit="prompt",
            disable=not is_shown,
        )

    def update(self, num_done: int) -> None:
        """After a step: so many prompts are done."""
        if self._bar.disable:
            return
        now = time.monotonic()
        # A prompt's end is drawn as often as tqdm likes; a long one's tokens do not wait for it.
        if num_done > self._bar.n:
            self._tell_rates(now)
            self._bar.update(num_done - self._bar.n)
        elif now - self._shown >= _REFRESH_S:
            self._tell_rates(now)
            self._bar.refresh()
            self._shown = now

    def _tell_rates(self, now: float) -> None:
        elapsed_s = max(now - self._start, 1e-9)
        num_input = self._figures.prompt_tokens - self._first[0]
        num_output = self._figures.output_tokens - self._first[1]
        self._bar.set_postfix_str(
            f"input {num_input / elapsed_s:.1f} tokens/s, "
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
