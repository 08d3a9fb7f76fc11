"""Grammars of outputs, compiled by the library llguidance.

A request's grammar is compiled first in a process that can be ended, to check it
(`grammar_checks.py`). Then rank 0 compiles it beside its steps, and follows it while it samples.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from tpengine.errors import InvalidSamplingParamsError
from tpengine.host import start_thread

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {"max_lexer_states": 25_000, "step_lexer_fuel": 50_000}
"""Limits of `LLParserLimits` for each sequence that are not the library's own, but a tenth and a
quarter of these. A state of the lexer takes 1 to 2 kB. With the library's own fuel the expression
`(a{1000}){1000}` takes a second and 260 MB for each sequence until it is stopped."""
_MAX_BYTES, STACK_BYTES = 1 << 19, 512 << 20
"""Of a grammar, and of the stack on which it is compiled. The library compiles rules that refer to
each other in a chain by recursion, and a stack that is too small ends the process. Chains of 300 kB
need 64 to 128 MiB; what is not used takes no memory."""
_COMPILE_S = 300.0
"""Longest wait for a grammar. Its check bounds the work, so that only a hang takes longer."""
_PAUSES_S = 0.02, 0.1, 0.5
"""Between attempts to start a thread: the stack of one that has ended is freed a moment later."""
_MAX_REASON = 300
_LIMIT_OF = {
    # part of an error's text: the limit in LLParserLimits
    "initial lexer configuration": "initial_lexer_fuel",
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    "Too many items": "step_max_items",
    "Current row has": "max_items_in_row",
    "grammar size": "max_grammar_size",
}
_STARTING = threading.Lock()


class Vocabulary:
    """The tokens of a model, and the grammars that were compiled for them.

    Any thread may use it. A copy for another process compiles anew.

    Args:
        tokenizer: what `tokenizers.Tokenizer.to_str` returns.
        size: of the model's vocabulary.
        end_token_ids: tokens that end an output, when its grammar is complete.
    """

    def __init__(self, tokenizer: str, size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        self.end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled: dict[str, Future[LLMatcher]] = {}
        self._waiting: deque[tuple[str, Future[LLMatcher]]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self._tokenizer, self.size, self.end_token_ids)

    def compile(
        self, grammars: Sequence[str], dropped: Sequence[str] = (), wait_s: float = 0.0
    ) -> int:
        """Begins to compile grammars, one after another, on a thread. They are kept until a later
        call drops them.

        Args:
            grammars: see `constraints.to_grammar`.
            wait_s: longest wait for the first of those that are not compiled.

        Returns:
            How many of all grammars, the latest ones, are not compiled yet.
        """
        with self._lock:
            for grammar in dropped:
                self._compiled.pop(grammar, None)
            for grammar in grammars:
                self._begin(grammar)
            waiting = [compiled for _, compiled in self._waiting]
        wait(waiting[:1], wait_s)
        return sum(not compiled.done() for compiled in waiting)

    def matcher(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of a grammar, for one sequence.

        Raises:
            InvalidSamplingParamsError: the library refuses the grammar or the tokenizer, with its
                own reason; or the grammar is too large.
        """
        with self._lock:
            begun = self._begin(grammar)
        try:
            compiled = begun.result(_COMPILE_S)
        except InvalidSamplingParamsError:
            self._compiled.pop(grammar, None)
            raise
        except TimeoutError:
            raise refusal(f"it compiles for over {_COMPILE_S:g} s; give a simpler one") from None
        with self._lock:
            return compiled.deep_copy()

    def load(self) -> LLTokenizer:
        """Makes what the library needs of the tokens, at the first call. Only one thread at a time
        compiles, and only it calls this.

        Raises:
            InvalidSamplingParamsError: it cannot use this tokenizer.
        """
        from llguidance import LLTokenizer

        if self._tokens is None:
            try:
                self._tokens = LLTokenizer(
                    self._tokenizer, n_vocab=self.size, eos_token=self.end_token_ids
                )
            except Exception as error:  # the library raises errors of several types
                text = f"cannot be used with this model's tokenizer: {error!s:.{_MAX_REASON}}"
                raise InvalidSamplingParamsError.of_field("structured_outputs", text) from error
        return self._tokens

    def _begin(self, grammar: str) -> Future[LLMatcher]:
        """Adds a new grammar to those that wait; starts the thread, with a large stack, if none
        did."""
        if grammar in self._compiled:
            return self._compiled[grammar]
        compiled = self._compiled[grammar] = Future()
        self._waiting.append((grammar, compiled))
        if len(self._waiting) > 1:
            return compiled
        try:
            self._start_thread()
        except (RuntimeError, MemoryError) as error:
            self._waiting.clear()
            compiled.set_exception(refusal(f"{error}; try again later"))
        return compiled

    def _start_thread(self) -> None:
        for pause_s in _PAUSES_S:
            try:
                self._start_now()
                return
            except RuntimeError as error:
                if "can't start new thread" not in str(error):
                    raise
                time.sleep(pause_s)
        self._start_now()

    def _start_now(self) -> None:
        with _STARTING:  # the size is one for the whole process
            usual = threading.stack_size(STACK_BYTES)
            try:
                name, run = "compile-grammar", self._compile_waiting
                start_thread(threading.Thread(target=run, name=name, daemon=True))
            finally:
                threading.stack_size(usual)

    def _compile_waiting(self) -> None:
        """Runs on the thread until no grammar waits."""
        while True:
            grammar, compiled = self._waiting[0]
            try:
                compiled.set_result(self._compile(grammar))
            except InvalidSamplingParamsError as error:
                compiled.set_exception(error)
            except BaseException as error:  # the library's panics are no `Exception`
                compiled.set_exception(refusal(f"llguidance failed: {error!s:.{_MAX_REASON}}"))
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > _MAX_BYTES:
            raise refusal(f"its grammar has {len(grammar)} bytes, more than {_MAX_BYTES}")
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = LLMatcher(self.load(), grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # a grammar that allows nothing would fail later, in a step
        if first.is_error():
            raise refusal(reason(first))
        return matcher


def refusal(why: str) -> InvalidSamplingParamsError:
    """The error of a request whose constraint is not served."""
    name = "structured_outputs"
    return InvalidSamplingParamsError(f"{name} is refused: {why}", field=name)


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in its state of error: the library's text, and the limit that it names."""
    text: str = matcher.get_error().partition("\n<")[0].strip()
    if text.startswith("NoExtensionBias"):
        return "no text fulfils it"
    limit = next((limit for part, limit in _LIMIT_OF.items() if part in text), None)
    text = text[:_MAX_REASON]
    if limit is None:
        return text
    return f"{text} (limit {limit} of llguidance); give a smaller or simpler one"
