"""What clients send to /v1/decisions, and what they read. Knows no scheduler."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from server.schemas.common import Closed, Dialled, Text
from server.schemas.openai_answers import LoopReport
from server.schemas.responses import Items, TextPart
from server.schemas.responses_answers import Usage
from tinyloop.errors import RequestError

MAX_QUESTIONS, MAX_CHOICES, MAX_LEVELS = 400, 255, 10
Name = Annotated[str, Field(max_length=128)]


class _Asked(Closed):
    name: Name | None = None
    instructions: Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=64)]

    @property
    def text(self) -> str:
        given = self.instructions
        return given if isinstance(given, str) else "".join(part.text for part in given)


class Predicate(_Asked):
    """Is it so?"""

    type: Literal["predicate"]


class Option(Closed):
    value: StrictStr | StrictBool
    description: Text | None = None


class Choice(_Asked):
    """Which of these?"""

    type: Literal["choice"]
    choices: Annotated[list[Option], Field(fail_fast=True, min_length=2, max_length=MAX_CHOICES)]


class Level(Closed):
    label: Text
    description: Text | None = None


class Score(_Asked):
    """How much, from the first level to the last?"""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(fail_fast=True, min_length=2, max_length=MAX_LEVELS)]


Question = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Dialled):
    """POST /v1/decisions."""

    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "prompt_cache_options", "safety_identifier"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: Text
    input: Text | Items
    questions: Annotated[list[Question], Field(fail_fast=True, min_length=1, max_length=MAX_QUESTIONS)]

    def check(self) -> None:
        for at, question in enumerate(self.questions):
            if isinstance(question, Choice) and len({option.value for option in question.choices}) < len(
                question.choices
            ):
                raise RequestError(f"questions[{at}].choices", f"questions[{at}].choices: every value must be another")

    @property
    def text(self) -> str:
        """The input as one text; a conversation as its turns, one after the other."""
        if isinstance(self.input, str):
            return self.input
        turns = [item.plain() for item in self.input]
        return "\n".join(_turn(turn) for turn in turns if turn is not None)


def _turn(turn: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    said = [turn["content"], *(f"{call['name']}({call['arguments']})" for call in calls)]
    return f"{turn['role']}: {' '.join(text for text in said if text)}"


class PredicateAnswer(BaseModel):
    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float


class OptionProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(BaseModel):
    """`confidence` is the probability of `choice`."""

    type: Literal["choice"] = "choice"
    name: str | None
    choice: str | bool
    probabilities: list[OptionProbability]
    confidence: float


class LevelProbability(BaseModel):
    value: int
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    """`score`: the expected level, from 0 for the first to 1 for the last. `confidence`: that of the likeliest."""

    type: Literal["score"] = "score"
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class Decision(BaseModel):
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: Usage
    tinyloop: LoopReport
