"""Text of token ids: incremental decoding, stop strings, and the text of log probabilities.

`tokenizers.decoders.DecodeStream` is not used: it repeats the prompt's tail when the prompt ends
inside a character, raises on byte tokens that are invalid UTF-8, and cannot say at the end what it
holds back.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

from tpengine.engine.tokenizer import ByteTable, Tokenizer
from tpengine.messages import TokenLogprobs
from tpengine.outputs import Logprob
from tpengine.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 16


class ByteStream:
    """Turns the ids of one sequence into text, id by id, with a table of bytes and an incremental
    UTF-8 decoder. Text that was returned never changes.

    Equals `decode(prompt + output)[len(decode(prompt)):]` of the tokenizer, except in two cases in
    which that would hide text. A character that the prompt leaves unfinished is shown whole when
    the output completes it. In a run of byte-fallback tokens that is invalid UTF-8, the valid
    characters stay; the tokenizer turns each byte of such a run, also bytes that were already
    shown, into U+FFFD.

    Args:
        hidden: ids without a text.
    """

    __slots__ = ("_drop", "_hidden", "_pending", "_pieces")

    def __init__(
        self, table: ByteTable, prompt_token_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._pieces, self._hidden = table.pieces, hidden
        self._pending = b""
        # A first character that does not belong to the output: U+FFFD for the prompt's unfinished
        # character, or the space that the tokenizer removes from the start of a whole text.
        self._drop = ""
        tail = self._visible_tail(prompt_token_ids)
        if tail:
            self._pending = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]
            self._drop = _REPLACEMENT if self._pending else ""
        elif table.strips_first_space:
            self._drop = " "

    def push(self, token_id: int) -> str:
        """Returns the text that `token_id` completes; empty while a character is unfinished."""
        data = self._pending + self._piece(token_id)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return self._first(text) if self._drop and text else text

    def flush(self) -> str:
        """Returns the text that was held back; no more ids come. U+FFFD stands for an unfinished
        character."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return self._first(text) if self._drop and text else text

    def _piece(self, token_id: int) -> bytes:
        # Logits may have more rows than the tokenizer has tokens.
        is_shown = token_id < len(self._pieces) and token_id not in self._hidden
        return self._pieces[token_id] if is_shown else b""

    def _first(self, text: str) -> str:
        text = text.removeprefix(self._drop)
        self._drop = ""
        return text

    def _visible_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to see whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._piece(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail


class WindowStream:
    """Does the work of `ByteStream` for tokenizers whose tokens depend on their neighbours, fast or
    slow.

    Decodes the last tokens with and without the new one; the difference is new text. Costs two
    decodes of a few tokens for each token, however long the text is.

    Args:
        hidden: ids without a text.
    """

    __slots__ = ("_context", "_context_length", "_held", "_hidden", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._held: list[int] = []
        visible = (i for i in reversed(prompt_token_ids) if i not in hidden)
        self._context = list(islice(visible, _CONTEXT_TOKENS))[::-1]
        self._context_length = len(self._decode(self._context))

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        # Bounded: otherwise a model that emits only bytes makes each step slower than the last.
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._context + self._held)) if self._held else ""

    def _advance(self, text: str) -> str:
        new = text[self._context_length :]
        # Tokens without text of their own (a lone metaspace) still change the text that follows.
        self._context = (self._held if new else self._context + self._held)[-_CONTEXT_TOKENS:]
        self._held = []
        self._context_length = len(self._decode(self._context))
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, False)


def open_stream(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> ByteStream | WindowStream:
    """Returns the cheapest stream that is correct for `tokenizer`."""
    hidden = tokenizer.special_token_ids.difference(params.visible_token_ids)
    if not params.skip_special_tokens:
        hidden = frozenset()
    if tokenizer.byte_table is not None:
        return ByteStream(tokenizer.byte_table, prompt_token_ids, hidden)
    return WindowStream(tokenizer, prompt_token_ids, hidden)


class Detokenizer:
    """The output text of one sequence.

    Each output token is appended once, in order, also if the sequence is preempted in between. An
    end token or stop token whose text is not wanted is not appended. If there is more than one stop
    string, the one that is complete first ends the text; of those complete at the same character,
    the longest. So the result depends neither on where tokens end nor on the order of the list.

    Args:
        prompt_token_ids: decide whether the first output token keeps its leading space.
        params: a stop string counts only if the output token `min_tokens` (counted from 1) or a
            later one completes it; it may begin in an earlier one.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._stream = open_stream(tokenizer, prompt_token_ids, params)
        self._stops = tuple(sorted(params.stop))
        self._cut_stop = not params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""
        self._num_held = 0
        self._num_taken = 0
        self.stopped_by: str | None = None
        """The stop string that ended the text; None before that."""

    @property
    def text(self) -> str:
        """The text that may be shown: without unfinished characters, and without an end that may
        still become a stop string which is cut off."""
        return self._text[: len(self._text) - self._num_held] if self._num_held else self._text

    def append(self, token_id: int) -> str | None:
        """Adds an output token; returns the stop string that it completes, None if there is none.

        After a stop string, no more tokens may be appended.
        """
        self._num_tokens += 1
        new = self._stream.push(token_id)
        if not new:
            return None
        # CPython extends a string in place only if nothing else refers to it, not even an
        # attribute; otherwise each token would copy the whole text.
        text, self._text = self._text, ""
        old_length = len(text)
        text += new
        self._text = text
        if not self._stops:
            return None
        if self._num_tokens >= self._min_tokens and self._ends_with_stop(old_length):
            self._num_held = 0
        elif self._cut_stop:
            self._num_held = self._longest_stop_beginning(self._num_held + len(new))
        return self.stopped_by

    def take_delta(self) -> str:
        """Returns what `text` gained since the last call."""
        delta = self._text[self._num_taken : len(self._text) - self._num_held]
        self._num_taken += len(delta)
        return delta

    def finish(self) -> None:
        """Releases the text that was held back; no more tokens come. May be called twice."""
        self._num_held = 0
        if self.stopped_by is None:
            self._text += self._stream.flush()

    def _ends_with_stop(self, old_length: int) -> bool:
        """Looks for stop strings that the text after `old_length` completes, and ends the text
        there."""
        text, stops = self._text, self._stops
        for end in range(old_length + 1, len(text) + 1):
            if text.endswith(stops, 0, end):  # compares last characters first, without a copy
                stop = max((stop for stop in stops if text.endswith(stop, 0, end)), key=len)
                self.stopped_by = stop
                self._text = text[: end - len(stop) if self._cut_stop else end]
                return True
        return False

    def _longest_stop_beginning(self, longest: int) -> int:
        """Length of the longest end of the text that is the beginning of a stop string, and not all
        of it.

        Args:
            longest: at most so long: one that begins in the old text began a stop string there too.
                So this looks at two ends per character on average, however long stop strings are.
        """
        text, stops = self._text, self._stops
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            # In a sorted list the strings that go on after `end` follow it at once.
            place = bisect_right(stops, end)
            if place < len(stops) and stops[place].startswith(end):
                return len(text) - start
        return 0


def as_logprobs(
    token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The token that stands at a position, and then the likeliest ones by rank, by id.

    Args:
        tokenizer: None: without `decoded_token`.
    """

    def text(candidate: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(candidate)

    entries = {token_id: Logprob(logprobs.logprob, logprobs.rank, text(token_id))}
    likeliest = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for rank, (candidate, logprob) in enumerate(likeliest, start=1):
        entries[candidate] = Logprob(logprob, rank, text(candidate))
    return entries
