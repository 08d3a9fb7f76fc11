"""Grammars of requests: their check, and what ranks need to follow them.

`read_grammar` has a constraint checked in a process of its own (`structured/grammar_checks.py`), so
that what a client sends neither blocks nor ends the engine. Then `RankGrammars` has rank 0 compile
it beside the steps; until that is done the scheduler lets its request wait. After a loss the new
group does so again, and `structured/masks.py` takes the tokens so far.
"""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError
from tpengine.executor.executor import Executor
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.scheduler import Scheduler
from tpengine.structured.constraints import THINK_CLOSING, THINK_OPENING, Thinking
from tpengine.structured.grammar_checks import GrammarChecks
from tpengine.structured.grammars import Vocabulary

_MAX_COMPILED = 64
_WAIT_S = 0.02
"""For the next grammar while no request may run: the engine's caller has other work to do."""


def read_grammar(
    params: SamplingParams,
    prompt: str | None,
    is_chat: bool,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    grammar_checks: GrammarChecks,
) -> str | None:
    """Returns the grammar of a request's outputs, compiled once to check it; None: they have none.

    Args:
        prompt: its text, if it has one.

    Raises:
        InvalidSamplingParamsError: there is no tokenizer, or the grammar is refused.
    """
    if params.structured_outputs is None:
        return None
    if tokenizer is None:
        raise InvalidSamplingParamsError.of_field(
            "structured_outputs", "needs a tokenizer, and the model has none; name one"
        )
    thinking = _thinking(prompt or "", tokenizer) if is_chat else Thinking.NONE
    # For the library no text matches an added token, special or not, as the think tags of Qwen.
    added = tokenizer.hf.get_added_vocab()
    tags = [tag for tag in (THINK_OPENING, THINK_CLOSING) if tag in added]
    vocabulary = tokenizer.vocabulary(model)
    return grammar_checks.check(vocabulary, params.structured_outputs, thinking, tags)


def _thinking(prompt: str, tokenizer: Tokenizer) -> Thinking:
    """Whether an answer to this conversation may begin with reasoning, by the model's template."""
    end = prompt.rstrip()
    if end.endswith(THINK_OPENING):
        return Thinking.BEGUN
    if end.endswith(THINK_CLOSING) or THINK_OPENING not in str(tokenizer.hf.chat_template):
        return Thinking.NONE
    return Thinking.ALLOWED


class RankGrammars:
    """Has rank 0 of the present group compile grammars, in the order of the requests. Those of
    unfinished requests stay compiled, and of the others so many that there are 64."""

    def __init__(self, executor: Executor, model: ModelConfig) -> None:
        self._executor = executor
        self._model = model
        self._group: tuple[int, Vocabulary] | None = None
        self._begun: list[str] = []
        self._num_left = 0  # of these, the latest ones are not compiled yet

    def compile_new(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        """Begins to compile what requests lack, and tells the scheduler what is compiled by now.
        Steps go on, one at a time, as this call would wait for those in flight; only the requests
        with new grammars wait.

        Raises:
            GroupLostError: a rank was lost.
        """
        if not scheduler.lacks_grammars or scheduler.unanswered:
            return
        assert tokenizer is not None, "a grammar was checked without one"
        requests, wait_s = scheduler.unfinished_requests(), 0.0 if scheduler.may_step else _WAIT_S
        group = self._executor.first_epoch, tokenizer.vocabulary(self._model)
        if self._group != group:
            self._executor.load_vocabulary(group[1])
            self._group, self._begun, self._num_left = group, [], 0
        needed = dict.fromkeys(r.rules.grammar for r in requests if r.rules.grammar is not None)
        begun = dict.fromkeys([*self._begun, *needed])
        lacking = list(begun)[len(self._begun) :]
        compiled = self._begun[: len(self._begun) - self._num_left]
        unused = [grammar for grammar in compiled if grammar not in needed]
        dropped = unused[: max(0, len(begun) - _MAX_COMPILED)]
        self._num_left = self._executor.compile_grammars(lacking, dropped, wait_s)
        self._begun = [grammar for grammar in begun if grammar not in dropped]
        scheduler.use_grammars(frozenset(self._begun[: len(self._begun) - self._num_left]))
