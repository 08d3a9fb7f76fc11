"""A grammar whose choices are all skewed, so that a model trained on its text is sure of itself.

A grammar with equally likely alternatives teaches a model ties, and which side of a tie greedy
decoding takes is decided by rounding. Here alternative k of every choice has the weight 3**-k.
A third rather than a half, because alternatives often share their first tokens: with a third,
everything that comes after an alternative weighs, taken together, half of it, so however the
tokenizer merges beginnings, the likelier branch stays at least twice as likely as any other.

Variety comes from context instead: ``{rule@x}`` turns the order of the alternatives by what was
chosen for ``x`` earlier in the document. Every choice stays skewed given the text before it,
and the text that follows depends on tokens far back.

Inside a template:

- ``{rule}`` draws one alternative of the rule and expands it
- ``{rule@x}`` the same, in the order turned by the choice bound to ``x``; a number in place of
  ``x`` gives a sentence an order of its own
- ``{x=rule}`` draws, binds the choice to ``x`` and writes it (``@y`` may follow)
- ``{x:rule}`` draws and binds without writing
- ``{x}`` and ``{x.attribute}`` write what was bound; a capital letter gives a capital letter
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

Entity = Mapping[str, str]
"""A person, a town, a thing: attributes by name; ``name`` is how it is written."""

Alternative = str | Entity

RATIO = 1 / 3
"""Weight of each alternative relative to the one before."""

STRIDE = 7
"""How far one step of the context turns a rule's order; prime to every rule's length."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_DRAW = re.compile(r"(?:(?P<var>\w+)(?P<how>[=:]))?(?P<rule>\w+)(?:@(?P<context>\w+))?$")


def _name(alternative: Alternative) -> str:
    return alternative if isinstance(alternative, str) else alternative["name"]


def choice_weights(num_alternatives: int) -> list[float]:
    """Probabilities of a rule's alternatives, in their order; they sum to one."""
    weights = [RATIO**k for k in range(num_alternatives)]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True)
class Binding:
    """What was drawn for a variable: its place in the rule, and how it is written."""

    index: int
    entity: Entity


class Grammar:
    """Rules by name, and the expansion of templates over them.

    Raises `ValueError` when a rule has fewer than one or two equal alternatives, or a template
    names something that is neither a rule nor bound by some template.
    """

    def __init__(self, rules: Mapping[str, Sequence[Alternative]]) -> None:
        self.rules = {name: tuple(alternatives) for name, alternatives in rules.items()}
        for name, alternatives in self.rules.items():
            names = {_name(alternative) for alternative in alternatives}
            if not names or len(names) != len(alternatives):
                raise ValueError(f"rule {name!r} is empty or has two equal alternatives")
            if len(names) > 1 and gcd(len(names), STRIDE) != 1:
                raise ValueError(f"rule {name!r} has {len(names)} alternatives: {STRIDE} divides")
        self._check_references()

    def templates(self) -> Iterator[str]:
        """All texts of all rules, attributes of entities included."""
        for alternatives in self.rules.values():
            for alternative in alternatives:
                if isinstance(alternative, str):
                    yield alternative
                else:
                    yield from alternative.values()

    def _check_references(self) -> None:
        fields = [field for template in self.templates() for field in _FIELD.findall(template)]
        bound = {m["var"] for m in map(_DRAW.match, fields) if m is not None and m["var"]}
        for field in fields:
            match = _DRAW.match(field)
            name = match["rule"] if match is not None else field.split(".")[0].lower()
            if name not in self.rules and name.lower() not in bound:
                raise ValueError(f"{{{field}}} names neither a rule nor a variable")

    def order(self, rule: str, turn: int, taken: frozenset[str] = frozenset()) -> list[int]:
        """Indices of a rule's alternatives from the likeliest to the least likely.

        What is `taken` (by name) is left out: nobody meets themselves or travels to their town.
        """
        names = [_name(alternative) for alternative in self.rules[rule]]
        turned = [(turn * STRIDE + k) % len(names) for k in range(len(names))]
        return [index for index in turned if names[index] not in taken]

    def write(self, rule: str, rng: random.Random) -> str:
        """One text from a rule, with variables of its own."""
        return _Writer(self, rng).expand("{" + rule + "}")


class _Writer:
    """Expands one document: the variables live as long as it does."""

    def __init__(self, grammar: Grammar, rng: random.Random) -> None:
        self._grammar = grammar
        self._rng = rng
        self._bindings: dict[str, Binding] = {}

    def expand(self, template: str) -> str:
        parts: list[str] = []
        end = 0
        for match in _FIELD.finditer(template):
            parts.append(template[end : match.start()])
            parts.append(self._field(match[1]))
            end = match.end()
        parts.append(template[end:])
        return "".join(parts)

    def _field(self, field: str) -> str:
        variable, _, attribute = field.partition(".")
        binding = self._bindings.get(variable.lower())
        if binding is not None:
            text = binding.entity[attribute.lower() or "name"]
            capital = variable[0].isupper() or attribute[:1].isupper()
            return self.expand(text[0].upper() + text[1:] if capital else text)
        draw = _DRAW.match(field)
        if draw is None or draw["rule"] not in self._grammar.rules:
            raise ValueError(f"{{{field}}} is used before it is bound")
        return self._draw(draw["rule"], draw["var"], draw["how"], draw["context"])

    def _draw(self, rule: str, variable: str | None, how: str | None, context: str | None) -> str:
        turn = self._turn(context)
        taken = frozenset(text for b in self._bindings.values() for text in b.entity.values())
        order = self._grammar.order(rule, turn, taken)
        [index] = self._rng.choices(order, choice_weights(len(order)))
        alternative = self._grammar.rules[rule][index]
        text = self.expand(alternative) if isinstance(alternative, str) else alternative["name"]
        if variable is not None:
            entity = {"name": text} if isinstance(alternative, str) else alternative
            self._bindings[variable] = Binding(index, entity)
        return "" if how == ":" else text

    def _turn(self, context: str | None) -> int:
        if context is None:
            return 0
        return int(context) if context.isdigit() else self._bindings[context].index
