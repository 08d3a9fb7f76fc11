"""Which pictures' features the ranks hold, and which they compute.

A prompt's tokens that stand for a picture need its features. The first request that comes to such a
token asks for them; the ranks compute them between steps, and the request waits, without rows,
until an answer says that they are there. They stay until other pictures need their place: a later
request with the same picture finds them. Three kinds are never given away: those that are being
computed, those that the step uses which is being chosen, and those that running requests need next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tpengine.config import PicturesConfig
from tpengine.messages import PictureLoad, PictureSpan, StepInput
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.step import StepBuilder

_MAX_STEP_BYTES = 64 << 20
"""Most pixels in a step's message, but for one picture, which may have more."""


class PictureCache:
    """The features, counted in rows; one row belongs to a token.

    Args:
        config: None: no request has a picture.
    """

    def __init__(self, config: PicturesConfig | None) -> None:
        self._max_awaited_rows = 0 if config is None else config.max_encoder_tokens
        self._num_cached_rows = 0 if config is None else config.num_cached_rows
        self._are_whole = config is not None and config.are_whole
        self._held: OrderedDict[bytes, int] = OrderedDict()  # rows; least recently used first
        # Of `_held`, those that are not computed, with the step that has asked for them.
        self._awaited: dict[bytes, int] = {}
        self._computed: list[bytes] = []  # since the message before
        self._dropped: list[bytes] = []
        self._message: StepInput | None = None
        self._used: set[bytes] = set()  # by the rows of the step with this message
        self._is_closed = False  # to further pictures in this message

    @property
    def num_awaited_rows(self) -> int:
        """Rows of features that were asked for and are not computed."""
        return sum(self._held[digest] for digest in self._awaited)

    def reach(
        self, request: Request, num_tokens: int, message: StepInput, running: Iterable[Request]
    ) -> int:
        """Returns `num_ready`; the step with this message may use these features. Asks for those of
        the first picture that lacks them, if there is room."""
        if request.pictures is None:
            return num_tokens
        if message is not self._message:
            self._message, self._used, self._is_closed = message, set(), False
        loads = request.pictures.loads
        for span in _next_spans(request, num_tokens):
            if span.digest not in self._held and not self._is_closed:
                # If the limits refuse one, later ones must not take its place for ever.
                self._is_closed = not self._ask(loads[span.digest], message, running)
            if not self._is_ready(span):
                break
            self._held.move_to_end(span.digest)
            self._used.add(span.digest)
        return self.num_ready(request, num_tokens)

    def num_ready(self, request: Request, num_tokens: int) -> int:
        """How many of a request's next tokens come before the first picture whose features are not
        there; at most `num_tokens`."""
        for span in _next_spans(request, num_tokens):
            if not self._is_ready(span):
                return max(0, span.start - _next_place(request))
        return num_tokens

    def undivided(self, request: Request, num_tokens: int, tokens_left: int) -> int:
        """Changes the size of a chunk so that it does not divide a picture that must be whole.

        Args:
            tokens_left: of the step; it may take more than `num_tokens`.
        """
        spans, start = _next_spans(request, num_tokens), _next_place(request)
        if not self._are_whole or not spans or spans[-1].end <= start + num_tokens:
            return num_tokens
        if spans[-1].end - start <= tokens_left:
            return spans[-1].end - start
        return max(0, spans[-1].start - start)

    def _is_ready(self, span: PictureSpan) -> bool:
        return span.digest in self._held and span.digest not in self._awaited

    def _ask(self, load: PictureLoad, message: StepInput, running: Iterable[Request]) -> bool:
        """Makes room for a picture's features and asks for them, if the limits permit."""
        if self._awaited:
            if self.num_awaited_rows + load.num_rows > self._max_awaited_rows:
                return False
            if sum(len(other.pixels) for other in (*message.picture_loads, load)) > _MAX_STEP_BYTES:
                return False
        needed = self._used.union(self._awaited, *map(_needed_next, running))
        num_free = self._num_cached_rows - sum(self._held.values())
        victims = list[bytes]()
        for digest, num_rows in self._held.items():
            if num_free >= load.num_rows:
                break
            if digest not in needed:
                victims.append(digest)
                num_free += num_rows
        if num_free < load.num_rows:
            return False
        self._drop(victims)
        message.picture_loads.append(load)
        self._held[load.digest] = load.num_rows
        self._awaited[load.digest] = message.step
        return True

    def _drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if self._held.pop(digest, None) is not None:
                self._awaited.pop(digest, None)
                self._dropped.append(digest)

    def note_answer(self, step: int, computed: Iterable[bytes], failed: Iterable[bytes]) -> None:
        """Takes what the answer of a step says about features. It may be late: they were dropped
        since, and asked for again by a later step.

        Args:
            failed: digests of pictures, and keys of what is no picture.
        """
        asked = {digest for digest, number in self._awaited.items() if number <= step}
        for digest in asked.intersection(computed):
            del self._awaited[digest]
            self._computed.append(digest)
        self._drop(asked.intersection(failed))

    def note_end(self, request: Request, others: Iterable[Request]) -> None:
        """Gives up the features that only this request, which has ended, has waited for."""
        if request.pictures is None:
            return
        if wanted := self._awaited.keys() & request.pictures.loads.keys():
            kept = (other.pictures.loads for other in others if other.pictures is not None)
            self._drop(wanted.difference(*kept))

    def go_on(self, step: StepBuilder, running: Iterable[Request], is_busy: bool) -> None:
        """Lets the ranks go on with features that requests wait for; also in a step without rows,
        but not in several such steps at once.

        Args:
            is_busy: whether other steps are unanswered.
        """
        is_due = step.has_rows or not is_busy or step.step_input.picture_loads
        if self._awaited and is_due:
            step.step_input.num_awaited_rows = self.num_awaited_rows
            step.awaiting = self.waiting(running)

    def waiting(self, running: Iterable[Request]) -> list[Request]:
        """The running requests that wait for features."""
        return [request for request in running if self._awaited.keys() & request.awaited_keys]

    def tell_changes(self, message: StepInput) -> None:
        """Tells the ranks which features have become complete, and which they may forget."""
        message.computed_pictures, self._computed = self._computed, []
        message.dropped_pictures, self._dropped = self._dropped, []

    def restart(self) -> None:
        """Forgets all features, since the workers were lost."""
        for known in (self._held, self._awaited, self._computed, self._dropped):
            known.clear()
        self._message = None


def _next_place(request: Request) -> int:
    return request.unfinished_sequences[0].num_computed_tokens


def _next_spans(request: Request, num_tokens: int) -> list[PictureSpan]:
    """Those with one of the next tokens."""
    if request.pictures is None or not num_tokens:
        return []
    start = _next_place(request)
    end, spans = start + num_tokens, request.pictures.spans
    return [span for span in spans if start < span.end and span.start < end]


def _needed_next(request: Request) -> set[bytes]:
    """The pictures of a running request that it waits for, or is in the middle of. What stands
    between the parts of a picture counts as the middle of it."""
    if request.pictures is None:
        return set()
    next_places = [sequence.num_computed_tokens for sequence in request.running_sequences]
    needed, start = set[bytes](), 0
    for span in request.pictures.spans:
        if span.first_row == 0:  # a picture begins; it may be the same as an earlier one
            start = span.start
        if any(start <= place < span.end for place in next_places):
            needed.add(span.digest)
    return needed
