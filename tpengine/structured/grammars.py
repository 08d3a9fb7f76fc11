"""Grammars of outputs, compiled by the library llguidance.

The driver compiles a request's grammar to check it; rank 0 follows it while it samples.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tpengine.errors import InvalidSamplingParamsError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {"max_lexer_states": 25_000, "step_lexer_fuel": 50_000}
"""Limits of `LLParserLimits` for each sequence that are not the library's own, but a tenth and a
quarter of these. A state of the lexer takes 1 to 2 kB. With the library's own fuel the expression
`(a{1000}){1000}` takes a second and 260 MB for each sequence until it is stopped."""
_MAX_COMPILED = 64
_MAX_BYTES, _STACK_BYTES = 1 << 19, 512 << 20
"""Of a grammar, and of the stack on which it is compiled. The library compiles rules that refer to
each other in a chain by recursion, and a stack that is too small ends the process. Chains of 300 kB
need 64 to 128 MiB; what is not used takes no memory."""
_COMPILE_S = 10.0
"""Longest time to compile a grammar; most take some milliseconds. A rank compiles it once more, in
a step, so that all streams wait for it."""
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
        self._loading = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self._tokenizer, self.size, self.end_token_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of a grammar, for one sequence. The latest 64 grammars
        stay compiled.

        Args:
            grammar: see `constraints.to_grammar`.

        Raises:
            InvalidSamplingParamsError: the library refuses the grammar or the tokenizer, with its
                own reason; or the grammar is too large, or compiles for too long.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:  # compiled without the lock: a step may wait for another grammar
            compiled = self._compile_apart(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _compile_apart(self, grammar: str) -> LLMatcher:
        """Compiles a grammar on a thread with a large stack."""
        if len(grammar) > _MAX_BYTES:
            raise _refusal(f"its grammar has {len(grammar)} bytes, more than {_MAX_BYTES}")
        compiled: Future[LLMatcher] = Future()

        def compile_one() -> None:
            try:
                compiled.set_result(self._compile(grammar))
            except Exception as error:
                compiled.set_exception(error)
            except BaseException as error:  # the library's panics are no `Exception`
                compiled.set_exception(_refusal(f"llguidance failed: {error!s:.{_MAX_REASON}}"))

        with _STARTING:  # the size is one for the whole process
            usual = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=compile_one, name="compile-grammar", daemon=True).start()
            except RuntimeError as error:
                raise _refusal(f"{error}; try again later") from error
            finally:
                threading.stack_size(usual)
        try:
            return compiled.result(_COMPILE_S)
        except TimeoutError:
            raise _refusal(f"it compiles for over {_COMPILE_S:g} s; give a simpler one") from None

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = LLMatcher(self._load_tokens(), grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # a grammar that allows nothing would fail later, in a step
        if first.is_error():
            raise _refusal(reason(first))
        return matcher

    def _load_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokens is None:
                try:
                    self._tokens = LLTokenizer(
                        self._tokenizer, n_vocab=self.size, eos_token=self.end_token_ids
                    )
                except Exception as error:  # the library raises errors of several types
                    raise InvalidSamplingParamsError.of_field(
                        "structured_outputs",
                        f"cannot be used with this model's tokenizer: {error!s:.{_MAX_REASON}}",
                    ) from error
            return self._tokens


def _refusal(why: str) -> InvalidSamplingParamsError:
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
