"""From the form that a client wants to the constraint that the sampler follows. Compiles off the event loop.

Every API that offers structured output or tools comes through here. Knows no API's shapes, no scheduler and no torch.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from tinyloop import constraint
from tinyloop.constraint import Constraint
from tinyloop.errors import RequestError
from tinyloop.tokenizer import Tokenizer
from tinyloop.tools import Tools


async def compiled(
    tokenizer: Tokenizer,
    schema: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
    *,
    field: str = "response_format.json_schema.schema",
) -> Constraint | None:
    """What an answer must keep to: JSON for `schema`, text or calls of `tools`, or either. None for free text.

    Raises RequestError, naming `field` for a schema that cannot be kept to, and `tools` for theirs.
    """
    if schema is None and tools is None:
        return None
    return await asyncio.to_thread(_compile, tokenizer, schema, tools, field)


def _compile(tokenizer: Tokenizer, schema: Mapping[str, Any] | None, tools: Tools | None, field: str) -> Constraint:
    if tools is None:
        assert schema is not None
        return constraint.json_schema(tokenizer, schema, field)
    content = None
    if schema is not None and tools.need == "auto":
        constraint.json_schema(tokenizer, schema, field)  # by itself first, so that a refusal names the right field
        content = constraint.inline_json(schema)
    _check_each(tokenizer, tools)
    return constraint.grammar(tokenizer, tools.grammar(content), "tools")


def _check_each(tokenizer: Tokenizer, tools: Tools) -> None:
    """The bound on one schema holds for those of all tools together."""
    if sum(len(constraint.inline_json(tool.parameters)) for tool in tools.offered) > constraint.MAX_SCHEMA:
        raise RequestError("tools", f"tools may have at most {constraint.MAX_SCHEMA} characters of parameters")
    for tool in tools.offered:  # by itself first, so that a refusal says which
        constraint.json_schema(tokenizer, tool.parameters, tool.field)
