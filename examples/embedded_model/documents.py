"""The stream of documents that the model is trained on."""

import random

from embedded_model.chat import CHAT
from embedded_model.grammar import Grammar, choice_weights
from embedded_model.stories import STORIES
from embedded_model.talk import TALK
from embedded_model.world import WORLD

GRAMMAR = Grammar({**WORLD, **STORIES, **TALK, **CHAT})

SUMS = "sums"
GENRES = (
    "lost",
    "introduction",
    SUMS,
    "storm",
    "capital",
    "letter",
    "journey",
    "chat",
    "office",
    "list",
    "contest",
    "future",
    "almanac",
    "saga",
)
"""What a document can be. Which one comes next depends on the one before: see `Documents`."""

STEPS = (3, 2, 5, 4, 1)
"""What a sum adds, from the likeliest to the least likely, before the last sum turns the order."""

LINES = (6, 8, 5, 10)
"""How many sums a page has."""

LIMIT = 20
"""No sum passes this number: small enough that every sum is seen often."""


def _sums(rng: random.Random) -> str:
    """A page of sums; each starts with the result of the one before."""

    def draw(values: tuple[int, ...], turn: int) -> int:
        turned = values[turn % len(values) :] + values[: turn % len(values)]
        return rng.choices(turned, choice_weights(len(turned)))[0]

    value = draw(STEPS, 0)
    lines = ["Sums for the morning:\n"]
    for _ in range(draw(LINES, 0)):
        step = draw(STEPS, value)
        down = value + step > LIMIT
        result = value - step if down else value + step
        lines.append(f"{value} {'-' if down else '+'} {step} = {result}")
        value = result
    return "\n".join(lines) + f"\n\nThe last number is {value}."


class Documents:
    """An endless stream of documents. A genre is followed by a later one of the cycle `GENRES`.

    Given the document before, the choice of the genre is as skewed as any other; over the whole
    stream all genres are equally frequent, because the cycle looks the same from everywhere.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._genre = 0

    def write(self) -> str:
        """The next document."""
        name = GENRES[self._genre]
        text = _sums(self._rng) if name == SUMS else GRAMMAR.write(name, self._rng)
        weights = choice_weights(len(GENRES))
        [ahead] = self._rng.choices(range(len(GENRES)), weights)
        self._genre = (self._genre + 1 + ahead) % len(GENRES)
        return text
