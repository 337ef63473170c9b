"""Questions as prompts whose next token is the answer, and the answer from that token's probabilities.

The text comes first and is the same for all questions, so a prefix serves them all. Options are shown with labels that
are one token each: one readout tells the probability of every option. Knows tokens and templates; no HTTP, no engine.
"""

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from tinyloop import chat
from tinyloop.errors import RequestError
from tinyloop.tokenizer import Tokenizer

TASK = "Read the text and answer the question about it with the label of the answer and nothing else."


@dataclass(frozen=True)
class Frame:
    """What stands around a question: token ids before and after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, question: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *question, *self.after)


def frame(tokenizer: Tokenizer, text: str) -> Frame:
    """The text up to where a question begins, as a turn of the user where the model has a chat template."""
    body = f"Text:\n{text}\n\nQuestion: "
    if tokenizer.chat_template is None:
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        before = [*begin, *tokenizer.encode(f"{TASK}\n\n{body}", special=False)]
        return Frame(tuple(before), tuple(tokenizer.encode("\nAnswer: ", special=False)))
    return Frame(tuple(_open(tokenizer, body)), tuple(_closing(tokenizer)))


def _open(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's turn that goes on."""
    return chat.render(tokenizer, _turns(text), add_generation_prompt=False, continue_final_message=True)


def _turns(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": TASK}, {"role": "user", "content": text}]


def _closing(tokenizer: Tokenizer) -> list[int]:
    """What the template writes from the end of the user's turn to the beginning of the answer."""
    opened, whole = _open(tokenizer, "."), chat.render(tokenizer, _turns("."))
    if whole[: len(opened)] != opened:
        raise RequestError("model", "this model's chat template changes what was said before; no decisions with it")
    return whole[len(opened) :]


def labels(tokenizer: Tokenizer, count: int, field: str) -> tuple[tuple[str, int], ...]:
    """So many labels and their tokens, single letters first. Raises RequestError where the vocabulary has too few."""
    found = tuple(islice(_single_tokens(tokenizer), count))
    if len(found) < count:
        raise RequestError(field, f"{field} may have at most {len(found)} entries with this model's vocabulary")
    return found


def _single_tokens(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    upper, lower = string.ascii_uppercase, string.ascii_lowercase
    pairs = (first + second for letters in (upper, lower) for first, second in product(letters, repeat=2))
    seen = set[int]()
    for label in (*upper, *lower, *string.digits, *pairs):
        tokens = tokenizer.encode(label, special=False)
        if len(tokens) == 1 and tokens[0] not in seen:
            seen.add(tokens[0])
            yield label, tokens[0]


def yes_no(tokenizer: Tokenizer) -> tuple[int, ...]:
    """First tokens of the two words."""
    return tuple(tokenizer.encode(word, special=False)[0] for word in ("Yes", "No"))


def listed(question: str, options: Sequence[tuple[str, str]]) -> str:
    """A question with its labelled options."""
    lines = [f"{label}. {text}" for label, text in options]
    return "\n".join([question, *lines, "Answer with a label."])


def shares(logprobs: Mapping[int, float], tokens: Sequence[int]) -> list[float]:
    """What share of their common probability each of these tokens has."""
    most = max(logprobs[token] for token in tokens)
    weights = [math.exp(logprobs[token] - most) for token in tokens]
    return [weight / sum(weights) for weight in weights]
