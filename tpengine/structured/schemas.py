"""JSON schemas without what asks for nothing, as the library llguidance takes them.

By the standard, unknown keywords and formats are annotations, and so are `title` and its like. The
library refuses some of them, and others beside a reference. What is left it holds or refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_KEYWORDS = {
    # what stands under them: keywords that ask for something
    "schemas": "additionalItems additionalProperties allOf anyOf contains else if items not oneOf "
    "prefixItems propertyNames then unevaluatedItems unevaluatedProperties",
    "named schemas": "$defs definitions dependencies dependentSchemas patternProperties properties",
    "values": "$anchor $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema "
    "const dependentRequired enum exclusiveMaximum exclusiveMinimum format id maximum minimum "
    "multipleOf pattern required type uniqueItems x-guidance",  # the last one is the library's
    "counts": "maxContains maxItems maxLength maxProperties minContains minItems minLength "
    "minProperties",
}
_UNDER = {name: kind for kind, names in _KEYWORDS.items() for name in names.split()}
_FORMATS = "date date-time duration email hostname ipv4 ipv6 time uri uuid"
"""That the library holds."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    # keywords: values that ask for nothing
    "dependencies dependentRequired dependentSchemas": ({},),
    "not uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems unevaluatedProperties": (True, {}),
}
_NOTHING = {name: values for names, values in _NEUTRAL.items() for name in names.split()}
_MAX_PASSES = 64
"""Over the references of a schema. Each finds those that are finite because others are."""
ENDLESS = "has no finite value: each contains another one; make one of its parts optional"
_LOCAL_REF = re.compile(r'"\$ref": "(#(?:/[^"]*)?)"')
_POINTER = re.compile(r'"\$ref": "[^"#]*#/([^"]*)"')


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without the keywords that ask for nothing. What a `$ref` points into stays,
    wherever it is."""
    paths = _POINTER.findall(json.dumps(schema, ensure_ascii=False))
    return dict(_kept(schema, {name for path in paths for name in path.split("/")}))


def _kept(schema: Any, targets: set[str]) -> Any:
    """A schema, or a list of schemas, without annotations.

    Args:
        targets: names on the paths of references.
    """
    if isinstance(schema, list):
        return [_kept(item, targets) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        under = _UNDER.get(name)
        if under == "named schemas" and isinstance(value, dict):
            kept[name] = {key: _kept(inner, targets) for key, inner in value.items()}
        elif under == "counts" and isinstance(value, float) and value.is_integer():
            kept[name] = int(value)  # the library takes no 8.0
        elif under == "schemas" or (under is None and name in targets):
            kept[name] = _kept(value, targets)
        elif under is not None:
            kept[name] = value
    if isinstance(kept.get("format"), str) and kept["format"] not in _FORMATS.split():
        del kept["format"]
    return {name: value for name, value in kept.items() if value not in _NOTHING.get(name, ())}


def has_finite_value(schema: Mapping[str, Any]) -> bool:
    """Whether a value may fulfil a schema, as far as its references decide it: not if each value
    must contain another one without end, as a list whose items are such lists, at least one each.
    """
    refs = set(_LOCAL_REF.findall(json.dumps(schema, ensure_ascii=False)))
    try:
        endless = {ref: _target(schema, ref) for ref in sorted(refs)}
        for _ in range(_MAX_PASSES):
            before = len(endless)
            for ref in list(endless):
                if _is_finite(endless[ref], endless):
                    del endless[ref]
            if len(endless) == before:
                return _is_finite(schema, endless)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass  # what is wrong with it the library tells
    return True


def _target(schema: Any, ref: str) -> Any:
    """What a reference within a schema points to."""
    for part in unquote(ref[2:]).split("/") if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name) if isinstance(schema, list) else name]
    return schema


def _is_finite(schema: Any, endless: Mapping[str, Any]) -> bool:
    """The same, if these references have no finite value."""
    if not isinstance(schema, dict):
        return schema is not False
    needed = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        needed += [properties.get(name, rest) for name in schema.get("required", ())]
    elif schema.get("type") == "array":
        items = [*schema.get("prefixItems", ()), schema.get("items")]
        needed += items[: schema.get("minItems", 0)]
    choices = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return (
        schema.get("$ref") not in endless
        and all(_is_finite(part, endless) for part in needed)
        and all(any(_is_finite(part, endless) for part in parts) for parts in choices)
    )
