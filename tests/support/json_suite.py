"""Schemas of JSON Schema's own test suite, closed so that a small model comes to an end."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.third_party import source_archive

_JSONSCHEMA = "jsonschema==4.26.0"
_TYPES = {
    "object": ("properties", "required", "additionalProperties", "maxProperties", "minProperties"),
    "array": ("items", "prefixItems", "maxItems", "minItems", "contains", "uniqueItems"),
    "string": ("pattern", "maxLength", "minLength", "format"),
    "integer": ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"),
}
_ELSEWHERE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const")
"""Keywords that give the type by other schemas or by values."""


def suite_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas of the suite for draft 2020-12 that are objects, each with its name."""
    with tarfile.open(source_archive("json-suite", _JSONSCHEMA)) as source:
        parts = {one.name.partition("/json/tests/draft2020-12/")[2]: one for one in source}
        for name in sorted(one for one in parts if one.endswith(".json") and "/" not in one):
            opened = source.extractfile(parts[name])
            assert opened is not None
            for group in json.load(opened):
                if isinstance(group["schema"], dict):
                    yield f"{Path(name).stem}: {group['description']}", group["schema"]


def closed(schema: Any) -> Any:
    """The schema with a type, and with bounds, where it has none."""
    if schema is True:
        return {"type": "boolean"}
    if not isinstance(schema, dict):
        return schema
    found = {name: value for name, value in schema.items() if name != "$schema"}
    if "type" not in found and not any(name in found for name in _ELSEWHERE):
        kinds = (kind for kind, words in _TYPES.items() if any(one in found for one in words))
        found["type"] = next(kinds, "string")
    if found.get("type") == "string":
        found.setdefault("maxLength", max(8, found.get("minLength", 0)))
    elif found.get("type") == "array":
        found.setdefault("maxItems", max(2, found.get("minItems", 0)))
        found.setdefault("items", "prefixItems" not in found)
    elif found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if name in found:
            found[name] = closed(found[name])
    for name in ("properties", "$defs"):
        if isinstance(found.get(name), dict):
            found[name] = {key: closed(one) for key, one in found[name].items()}
    for name in ("prefixItems", "anyOf", "oneOf"):
        if isinstance(found.get(name), list):
            found[name] = [closed(one) for one in found[name]]
    return found
