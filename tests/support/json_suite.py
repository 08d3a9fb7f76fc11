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
        parts = {file.name.partition("/json/tests/draft2020-12/")[2]: file for file in source}
        for name in sorted(part for part in parts if part.endswith(".json") and "/" not in part):
            opened = source.extractfile(parts[name])
            for group in json.load(opened):
                if isinstance(group["schema"], dict):
                    yield f"{Path(name).stem}: {group['description']}", group["schema"]


def closed(schema: Any) -> Any:
    """The schema with a type, and with bounds, where it has none."""
    if schema is True:
        return {"type": "boolean"}
    if not isinstance(schema, dict):
        return schema
    bounded = {name: value for name, value in schema.items() if name != "$schema"}
    if "type" not in bounded and not any(name in bounded for name in _ELSEWHERE):
        kinds = (kind for kind, words in _TYPES.items() if any(word in bounded for word in words))
        bounded["type"] = next(kinds, "string")
    if bounded.get("type") == "string":
        bounded.setdefault("maxLength", max(8, bounded.get("minLength", 0)))
    elif bounded.get("type") == "array":
        bounded.setdefault("maxItems", max(2, bounded.get("minItems", 0)))
        bounded.setdefault("items", "prefixItems" not in bounded)
    elif bounded.get("type") == "object":
        bounded.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if name in bounded:
            bounded[name] = closed(bounded[name])
    for name in ("properties", "$defs"):
        if isinstance(bounded.get(name), dict):
            bounded[name] = {key: closed(value) for key, value in bounded[name].items()}
    for name in ("prefixItems", "anyOf", "oneOf"):
        if isinstance(bounded.get(name), list):
            bounded[name] = [closed(value) for value in bounded[name]]
    return bounded
