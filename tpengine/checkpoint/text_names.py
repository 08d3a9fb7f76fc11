"""Names of a text half, as the class of the whole model has them.

They are the names of the decoder behind a prefix that differs from class to class, and from one
version of transformers to the next. It is found by comparing them with those of the decoder. No
torch here: the driver compares the names of adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

_MOST_DOTS = 32
"""Of an adapter's name; classes have some ten. Time and memory grow with the square of them."""


def text_prefix(names: Iterable[str], declared: Collection[str], base_prefix: str) -> str:
    """Returns the prefix of most names that the decoder has; empty: it has none of them.

    Args:
        declared: names that the decoder has.
        base_prefix: start of them that may be absent, see `registry.CausalLM`.
    """
    prefixes = Counter[str]()
    for name in names:
        for prefix, rest in divided(name):
            prefixes[prefix] += rest in declared or base_prefix + rest in declared
    return max(prefixes, key=prefixes.__getitem__, default="")


def divided(name: str) -> Iterator[tuple[str, str]]:
    """Yields the ways to divide a dotted name into a prefix, which may be empty, and the rest."""
    place = 0
    while place < len(name):
        yield name[:place], name[place:]
        place = name.find(".", place) + 1 or len(name)


def whole_names(
    names: Collection[str], declared: Collection[str], others: Collection[str]
) -> dict[str, str]:
    """Returns the decoder's names of layers by those that an adapter has for them.

    PEFT names layers as the class does that was trained: the decoder's, or that of a whole model.

    Args:
        names: of the adapter's layers.
        declared: names that the decoder has; the first component is the same.
        others: names that the checkpoint has for what is not the decoder. Its layers may end as the
            decoder's do (`vision_tower.encoder.layers.0.self_attn.q_proj`).
    """
    ends, other_ends = _ends(declared), _ends(others)
    base_prefix = f"{next(iter(declared), '').partition('.')[0]}."
    # Which half a layer belongs to is seen from the longest end that it shares with one.
    short = [name for name in names if name.count(".") <= _MOST_DOTS]
    own = [name for name in short if _shared(name, ends) >= _shared(name, other_ends)]
    prefix = text_prefix(own, declared, base_prefix)
    bare = {prefix + name.removeprefix(base_prefix): name for name in declared}
    return bare if not bare.keys().isdisjoint(own) else {prefix + name: name for name in declared}


def _ends(names: Iterable[str]) -> set[str]:
    return {rest for name in names for _, rest in divided(name)}


def _shared(name: str, ends: Collection[str]) -> int:
    return next((len(rest) for _, rest in divided(name) if rest in ends), 0)
