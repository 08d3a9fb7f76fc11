"""The tensors of a text half among those of a whole checkpoint.

They have the names of the decoder behind a prefix that differs from class to class. It is found by
the names that the decoder declares.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from tpengine.layers.weights import TypedSource


def text_tensors(
    tensors: Iterable[tuple[str, str, TypedSource]], declared: Collection[str], base_prefix: str
) -> Iterator[tuple[str, str, TypedSource]]:
    """Yields the tensors of the text half under the names that its decoder has. Those of the other
    half are left out; they are not read.

    Args:
        tensors: of all files.
        declared: names of the decoder's tensors.
        base_prefix: see `registry.CausalLM`.
    """
    unread, prefixes = deque(tensors), Counter[str]()
    for _, name, _ in unread:
        for prefix, rest in _divided(name):
            prefixes[prefix] += rest in declared or base_prefix + rest in declared
    text_prefix = max(prefixes, key=prefixes.__getitem__, default="")
    # An output head may lie beside the decoder, not in it.
    outer = {prefix for prefix, _ in _divided(text_prefix)} | {text_prefix}
    parts = {_part(name) for name in declared}
    while unread:
        file, name, source = unread.popleft()
        for prefix, rest in _divided(name):
            is_text = prefix == text_prefix or (prefix in outer and rest in declared)
            if is_text and not parts.isdisjoint((_part(rest), _part(base_prefix + rest))):
                yield file, rest, source
                break


def _divided(name: str) -> Iterator[tuple[str, str]]:
    """Yields the ways to divide a dotted name into a prefix, which may be empty, and the rest."""
    place = 0
    while place < len(name):
        yield name[:place], name[place:]
        place = name.find(".", place) + 1 or len(name)


def _part(name: str) -> tuple[str, ...]:
    """Which part of a decoder a name belongs to, such as its layers or its embedding."""
    return tuple(name.split(".")[:2])
