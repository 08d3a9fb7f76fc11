"""What asks for nothing in a JSON schema is dropped; what asks for something stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tpengine.structured.schemas import without_annotations

PLAIN: dict[str, Any] = {
    "properties": {
        "title": {"type": "string", "format": "date", "maxLength": 10},
        "x-order": {"anyOf": [{"$ref": "#/$defs/x-part"}, {"const": {"title": "T", "not": 5}}]},
    },
    "patternProperties": {"^x": {"enum": [{"deprecated": True}]}},
    "required": ["title"],
    "$defs": {"x-part": {"type": "string", "pattern": "a"}},
}
NOTHING: list[dict[str, Any]] = [
    {"title": "T", "description": "d", "default": {"type": 5}, "examples": [{"not": {}}]},
    {"deprecated": True, "readOnly": True, "writeOnly": False, "$comment": "c"},
    {"x-order": {"minimum": 5}, "nullable": True, "markdownDescription": "d", "xml": {"a": 1}},
    {"contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {"not": {}}},
    {"propertyNames": {"type": "string", "title": "Key", "format": "key"}},
    {"propertyNames": True, "unevaluatedProperties": {"title": "T"}, "unevaluatedItems": True},
    {"uniqueItems": False, "not": False, "dependentRequired": {}, "dependencies": {}},
]


@pytest.mark.parametrize("nothing", NOTHING, ids=lambda nothing: next(iter(nothing)))
def test_what_asks_for_nothing_is_dropped(nothing: dict[str, Any]) -> None:
    schema = copy.deepcopy(PLAIN)
    options = schema["properties"]["x-order"]["anyOf"]
    for place in (schema, *schema["properties"].values(), *options, schema["$defs"]["x-part"]):
        place.update(nothing)
    assert without_annotations(schema) == PLAIN


def test_an_unknown_format_is_an_annotation() -> None:
    for name in ("jwt", "path", "int64", "uri-template", "DATE"):
        assert without_annotations({"items": {"format": name}}) == {"items": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True, "not": {}, "unevaluatedProperties": False},
        {"propertyNames": {"type": "string", "minLength": 2}},
        {"if": {"type": "string"}, "else": {"minLength": 2}},
        {"dependentRequired": {"a": ["b"]}, "dependencies": {"c": {"required": ["d"]}}},
        {"properties": [], "format": 5, "maxLength": 8.5},
        {"$dynamicRef": "#a", "$anchor": "b", "$id": "https://a.example/b"},
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "string"}}}},
        {"items": {"$ref": "#/x-b/a"}, "x-b": {"a": {"$ref": "#/title/b"}}, "title": {"b": {}}},
    ],
    ids=str,
)
def test_what_asks_for_something_stays(schema: dict[str, Any]) -> None:
    assert without_annotations(schema) == schema


def test_counts_have_no_fraction() -> None:
    cleaned = without_annotations({"minItems": 1.0, "maxLength": 8.0, "items": {"maximum": 8.5}})
    assert repr(cleaned) == repr({"minItems": 1, "maxLength": 8, "items": {"maximum": 8.5}})
