"""The tensors of a text half among those of a whole checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from tpengine.checkpoint.text_names import divided, text_prefix
from tpengine.layers.weights import TypedSource


def text_tensors(
    tensors: Iterable[tuple[str, str, TypedSource]],
    declared: Collection[str],
    base_prefix: str,
    others: set[str],
) -> Iterator[tuple[str, str, TypedSource]]:
    """Yields the tensors of the text half under the names that its decoder has. Those of the other
    half are left out; they are not read.

    Args:
        tensors: of all files.
        declared: names of the decoder's tensors.
        base_prefix: see `registry.CausalLM`.
        others: gets the names of the other half's tensors.
    """
    unread = deque(tensors)
    inner = text_prefix((name for _, name, _ in unread), declared, base_prefix)
    # An output head may lie beside the decoder, not in it.
    outer = {prefix for prefix, _ in divided(inner)} | {inner}
    parts = {_part(name) for name in declared}
    while unread:
        file, name, source = unread.popleft()
        for prefix, rest in divided(name):
            is_text = prefix == inner or (prefix in outer and rest in declared)
            if is_text and not parts.isdisjoint((_part(rest), _part(base_prefix + rest))):
                yield file, rest, source
                break
        else:
            others.add(name)


def _part(name: str) -> tuple[str, ...]:
    """Which part of a decoder a name belongs to, such as its layers or its embedding."""
    return tuple(name.split(".")[:2])
