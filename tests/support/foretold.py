"""Drafts of tokens that a test knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sized

from tpengine import LLMEngine
from tpengine.config import LookaheadConfig
from tpengine.scheduling.drafter import Drafter, Guess
from tpengine.scheduling.sequence import Request, Sequence

Foretell = Callable[[Request, Sequence, int], Sized[int]]
"""Returns the next tokens of a sequence, at most so many."""
RIGHT, WRONG = "right", "wrong"


class Foretold(Drafter):
    """Gives the tokens that come, and a wrong one at every fifth place; now and then none, so that
    steps are planned ahead, too."""

    def __init__(self, config: LookaheadConfig, foretell: Foretell) -> None:
        super().__init__(config)
        self._foretell = foretell
        self._num_steps = 0

    def begin_step(self, num_sequences: int) -> bool:
        self._num_steps += 1
        return self._num_steps % 9 > 1

    def draft(self, request: Request, sequence: Sequence, most: int) -> list[Guess]:
        most = min(most, self._config.num_speculative_tokens)
        guesses = []
        for number, token_id in enumerate(self._foretell(request, sequence, most)):
            is_wrong = (sequence.num_tokens + number + sequence.seq_id) % 5 == 0
            guesses.append(Guess(abs(token_id - is_wrong), WRONG if is_wrong else RIGHT, 1))
        return guesses

    def count(self, sequence: Sequence, guesses: list[Guess], num_accepted: int, *_: bool) -> None:
        super().count(sequence, guesses, num_accepted)
        assert all(guess.source is RIGHT for guess in guesses[:num_accepted])


def foretell(engine: LLMEngine, answers: Mapping[tuple[int, ...], Sized[Sized[int]]]) -> Drafter:
    """Lets an engine that looks ahead draft from known outputs.

    Args:
        answers: by prompt, the output ids of each sequence.
    """

    def next_tokens(request: Request, sequence: Sequence, most: int) -> Sized[int]:
        outputs = answers.get(tuple(request.prompt_token_ids), ())
        output = outputs[sequence.index] if sequence.index < len(outputs) else ()
        return output[sequence.num_output_tokens :][:most]

    lookahead = engine.get_scheduler_config().lookahead
    drafter = Foretold(lookahead, next_tokens)
    engine._scheduler._queues.drafter = drafter
    return drafter


def totals(drafter: Drafter | None) -> tuple[int, int]:
    """Drafts that were computed, and those that came true."""
    counts = drafter.stats().values()
    return sum(c.num_drafted for c in counts), sum(c.num_accepted for c in counts)
