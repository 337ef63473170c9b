"""Random JSON schemas of bounded size, for whatever must answer in their form."""

from typing import Any

from hypothesis import strategies as st

LEAVES: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.5},
    {"enum": ["red", "green", 3, None]},
    {"const": "fixed"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{1,4}$"},
    {"type": "string", "format": "date"},
    {"type": ["string", "null"], "maxLength": 3},
]


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(["a", "b", "name", "x y", "é"]), min_size=1, max_size=3, unique=True)
    return st.one_of(
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(_record, names, st.lists(inner, min_size=3, max_size=3), st.integers(0, 3)),
        st.builds(lambda *options: {"anyOf": list(options)}, inner, inner),
    )


def _record(names: list[str], values: list[dict[str, Any]], required: int) -> dict[str, Any]:
    properties = dict(zip(names, values, strict=False))
    return {
        "type": "object",
        "properties": properties,
        "required": names[:required],
        "additionalProperties": False,
    }


schemas = st.recursive(st.sampled_from(LEAVES), _nested, max_leaves=6)
