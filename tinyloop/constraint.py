"""Answers that must have a form: which tokens may come next, by a grammar that `llguidance` follows.

    form = json_schema(tokenizer, {"type": "object"})
    SamplingParams(constraint=form)

A `Constraint` is compiled once and shared; each answer follows it with its own `Progress`, so what shares a batch never
notices. Knows tokenizers and grammars; knows no logits, no chat and no HTTP.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tinyloop.arguments import nodes
from tinyloop.errors import RequestError
from tinyloop.tokenizer import Tokenizer

MAX_SCHEMA = 64 << 10  # characters
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_NODES = 2048
SHOWN = 160  # characters of what the compiler says
# Free whitespace is something to stay in for ever, so there is none beyond a blank after a comma and a colon.
# `oneOf` and unknown keywords are refused rather than approximated: what is answered must validate.
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
# Fuel is work: about 20 ms for compiling, 15 ms for a step. States are memory: 1 to 2 kB each.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Constraint:
    """A compiled grammar over the tokens of one tokenizer. Made by `json_schema` and `grammar`."""

    def __init__(self, matcher: LLMatcher, tokens: int) -> None:
        self._matcher, self._tokens = matcher, tokens

    def start(self) -> "Progress":
        return Progress(self._matcher.deep_copy(), self._tokens)


class Progress:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher, tokens: int) -> None:
        self._matcher, self._tokens = matcher, tokens

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Which tokens may come next, [size]. Those that end an answer are among them once it may end."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = np.zeros(size, np.bool_)
        known = min(size, self._tokens)  # models pad their vocabulary
        mask[:known] = bits[:known]
        return mask

    def advance(self, token: int) -> None:
        """`token` has been chosen."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The answer has its form and nothing can follow."""
        return not self.lost and bool(self._matcher.is_stopped())

    @property
    def lost(self) -> bool:
        """The grammar took more work than a step may have, or cannot be satisfied; nothing is known any more."""
        return bool(self._matcher.is_error())


def json_schema(
    tokenizer: Tokenizer, schema: Mapping[str, Any], field: str = "response_format.json_schema.schema"
) -> Constraint:
    """Answers that are JSON and validate. Raises RequestError(`field`) for a schema that is not understood whole, too
    large, too deep or too much work."""
    check_schema(schema, field)
    return _compiled(tokenizer, LLMatcher.grammar_from_json_schema(_in_our_form(schema)), field)


def grammar(tokenizer: Tokenizer, lark: str, field: str) -> Constraint:
    """Answers that a Lark grammar (in llguidance's dialect) derives. Raises RequestError(`field`)."""
    return _compiled(tokenizer, LLMatcher.grammar_from_lark(lark), field)


def inline_json(schema: Mapping[str, Any]) -> str:
    """A checked schema as a term of a Lark grammar."""
    return "%json " + _in_our_form(schema)


def _in_our_form(schema: Mapping[str, Any]) -> str:
    """With the compiler's options, in the place of what a client may have put there."""
    return json.dumps({**schema, "x-guidance": JSON_FORM})


def prepare(tokenizer: Tokenizer) -> None:
    """What the first constraint would otherwise wait for: 0.3 s for 49k tokens, half of it with no other thread."""
    if tokenizer.eos_ids:
        _vocabulary(tokenizer)


def check_schema(schema: Any, field: str) -> None:
    """Bounds before anything is compiled. Raises RequestError(`field`)."""
    if not isinstance(schema, Mapping):
        raise RequestError(field, f"{field} must be a JSON object")
    if nodes(schema, MAX_SCHEMA_DEPTH, MAX_SCHEMA_NODES) is None:
        raise RequestError(
            field, f"{field} may hold at most {MAX_SCHEMA_NODES} values, nested at most {MAX_SCHEMA_DEPTH} levels deep"
        )
    if len(json.dumps(schema)) > MAX_SCHEMA:
        raise RequestError(field, f"{field} may have at most {MAX_SCHEMA} characters")


@lru_cache(maxsize=32)  # clients repeat their schemas; up to 5 MB each
def _compiled(tokenizer: Tokenizer, source: str, field: str) -> Constraint:
    if not tokenizer.eos_ids:
        raise RequestError(field, f"{field}: this model has no token that ends an answer, so none can be given a form")
    matcher = LLMatcher(_vocabulary(tokenizer), source, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # what is hopeless from the start is known now, and the prototype is warm
    if matcher.is_error():
        reason = matcher.get_error().split("\n")[0][:SHOWN] or "it cannot be compiled"
        raise RequestError(field, f"{field} is not supported: {reason}")
    return Constraint(matcher, tokenizer.vocab_size)


class _Vocabulary:
    """A tokenizer as llguidance wants it. Byte by byte is good enough where it asks for an encoding."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), special=False)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    wrapped: Any = _Vocabulary(tokenizer)
    return LLTokenizer(wrapped, n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids))
