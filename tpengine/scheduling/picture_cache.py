"""Which pictures' features the ranks hold, and which a step computes.

A prompt's tokens that stand for a picture need its features in the step that computes them. They
are computed in the first such step, and kept until another picture needs their place: a later
request with the same picture finds them. What tokens that are still to be computed need of a
picture that was begun is never given away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tpengine.config import PicturesConfig
from tpengine.messages import PictureLoad, StepInput
from tpengine.scheduling.sequence import Request

_MAX_STEP_BYTES = 64 << 20
"""Most pixels in a step's message, but for one picture, which may have more."""


class PictureCache:
    """The features, counted in rows; one row belongs to a token."""

    def __init__(self, config: PicturesConfig) -> None:
        self._config = config
        self._held: OrderedDict[bytes, int] = OrderedDict()  # rows; least recently used first
        self._dropped: list[bytes] = []
        self._message: StepInput | None = None
        self._used: set[bytes] = set()  # by the rows of the step with this message

    def reach(
        self,
        request: Request,
        num_tokens: int,
        tokens_left: int,
        message: StepInput,
        running: Iterable[Request],
    ) -> int:
        """Returns how many of the next `num_tokens` tokens of a request a step can compute: those
        before the first picture that it has no features of. Adds loads to the step's message.

        Args:
            tokens_left: of the step; a picture that must be whole may take more than `num_tokens`.
        """
        pictures = request.pictures
        if pictures is None:
            return num_tokens
        start = request.unfinished_sequences[0].num_computed_tokens
        spans = [s for s in pictures.spans if start < s.end and s.start < start + num_tokens]
        if message is not self._message:
            self._message, self._used = message, set()
        if self._config.are_whole and spans and spans[-1].end > start + num_tokens:
            if spans[-1].end - start > tokens_left:
                num_tokens = max(0, spans.pop().start - start)
            else:
                num_tokens = spans[-1].end - start
        for span in spans:
            if span.digest in self._held:
                self._held.move_to_end(span.digest)
            elif not self._load(pictures.loads[span.digest], message, running):
                return max(0, span.start - start)
            self._used.add(span.digest)  # not before: what comes later may give way
        return num_tokens

    def _load(
        self,
        load: PictureLoad,
        message: StepInput,
        running: Iterable[Request],
    ) -> bool:
        """Makes room for a picture, and lets the step compute its features; False: there is no room
        in the step or in the cache."""
        in_step = message.picture_loads
        most = self._config.max_encoder_tokens
        if in_step and sum(other.num_rows for other in in_step) + load.num_rows > most:
            return False
        num_bytes = sum(len(other.pixels) for other in in_step) + len(load.pixels)
        if in_step and num_bytes > _MAX_STEP_BYTES:
            return False
        needed = self._used.union(*map(_begun, running))
        num_free = self._config.num_cached_rows - sum(self._held.values())
        victims = list[bytes]()
        for digest, num_rows in self._held.items():
            if num_free >= load.num_rows:
                break
            if digest not in needed:
                victims.append(digest)
                num_free += num_rows
        if num_free < load.num_rows:
            return False
        for digest in victims:
            del self._held[digest]
        self._dropped += victims
        message.picture_loads.append(load)
        self._held[load.digest] = load.num_rows
        return True

    def note_failed(self, digests: Iterable[bytes]) -> None:
        """Forgets features that the ranks could not compute."""
        self._dropped += [digest for digest in digests if self._held.pop(digest, None)]

    def take_dropped(self) -> list[bytes]:
        """Digests of features that the ranks forget before the next step; they are returned only
        once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def restart(self) -> None:
        """Forgets all features, since the workers were lost."""
        self._held.clear()
        self._dropped.clear()
        self._message = None


def _begun(request: Request) -> set[bytes]:
    """The pictures between whose first and last token a running request's next token lies."""
    if request.pictures is None:
        return set()
    next_places = [sequence.num_computed_tokens for sequence in request.running_sequences]
    begun, start = set[bytes](), 0
    for span in request.pictures.spans:
        if span.first_row == 0:  # a picture begins; it may be the same as an earlier one
            start = span.start
        if any(start < place < span.end for place in next_places):
            begun.add(span.digest)
    return begun
