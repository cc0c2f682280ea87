"""JSON schemas as programs send them: their limits, and objects that are closed.

A schema is compiled while others wait, in a time that grows with the square of an object's
properties. So one that is too large is refused before anything is queued or compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localspec.core.errors import RequestError

Schema = Mapping[str, Any]

# Properties of all schemas of a request together, as many as OpenAI takes, and of one object. Ten
# objects of 500 optional ones, the slowest kind, took 3 seconds to compile for a vocabulary of
# 49,152 tokens on a busy machine of two cores; one of 10,000 took 13 seconds.
MOST_PROPERTIES = 5000
MOST_OF_ONE_OBJECT = 500
MOST_CHARACTERS = 250_000  # of JSON, of all schemas together; 20,000 words to choose among fit in
MOST_LEVELS = 60  # of values in one another; the library refuses 100 without a reason

NAMED = ("properties", "$defs", "definitions")  # keywords whose values are schemas by name
LISTED = ("anyOf", "oneOf", "prefixItems")
NESTED = ("items", "additionalProperties", "contains")
# With one of these an object's properties are not all in one place.
COMPOSED = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "patternProperties"}


def refuse_too_large(schemas: Sequence[Any]) -> None:
    """Raise RequestError for schemas that would take too long to compile."""
    num_levels = max((_num_levels(schema) for schema in schemas), default=0)
    _require(num_levels, MOST_LEVELS, "levels")
    counts = [count for schema in schemas for count in _property_counts(schema)]
    _require(sum(counts), MOST_PROPERTIES, "properties")
    _require(max(counts, default=0), MOST_OF_ONE_OBJECT, "properties in one object")
    _require(sum(len(json.dumps(schema)) for schema in schemas), MOST_CHARACTERS, "characters")


def _require(count: int, most: int, unit: str) -> None:
    if count > most:
        raise RequestError(
            f"The schema has {count:,} {unit}, but localspec can hold a reply to at most "
            f"{most:,}. Make it smaller, or ask for any JSON."
        )


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _num_levels(schema: Any) -> int:
    """Return how deep the values of a schema lie in one another."""
    level, count = [schema], 0
    while level := [part for value in level for part in _parts(value)]:
        count += 1
    return count


def _property_counts(schema: Any) -> Iterator[int]:
    """Yield how many properties each object of a schema names."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping) and isinstance(value.get("properties"), Mapping):
            yield len(value["properties"])
        waiting += _parts(value)


def closed(schema: Schema) -> dict[str, Any]:
    """Return the schema with each object that names its properties closed to others, unless it
    says what others may be: models would write more. Objects that are put together of several
    schemas stay open, for each part would refuse the properties of the others."""
    result: dict[str, Any] = _closed(schema, _has_composed_references(schema))
    return result


def _closed(schema: Any, are_definitions_open: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    is_composed = _is_composed(schema)
    result = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            if key == "properties" or not are_definitions_open:
                result[key] = {
                    name: _closed(one, are_definitions_open) for name, one in value.items()
                }
        elif key in LISTED and isinstance(value, list) and not is_composed:
            result[key] = [_closed(one, are_definitions_open) for one in value]
        elif key in NESTED:
            result[key] = _closed(value, are_definitions_open)
    if isinstance(schema.get("properties"), Mapping) and COMPOSED.isdisjoint(schema):
        result.setdefault("additionalProperties", False)
    return result


def _is_composed(schema: Schema) -> bool:
    """Whether what the schema lists are parts of one object with properties."""
    return "properties" in schema or "allOf" in schema


def _has_composed_references(schema: Any) -> bool:
    """Whether a definition is a part of an object that has other parts, too."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping) and _is_composed(value):
            parts = {key: one for key, one in value.items() if key in COMPOSED}
            if '"$ref"' in json.dumps(parts):
                return True
        waiting += _parts(value)
    return False
