"""How generations look in the OpenAI endpoints, whole and as a stream of chunks. Knows no scheduler and awaits nothing.

A view belongs to one HTTP request. Its choices are numbered prompt by prompt: choice `i` answers prompt `i // n`.
"""

import codecs
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from server.routers.asked import NO_LIMIT, Slo
from server.schemas import openai_answers as shapes
from server.sse import event, json_event
from server.types import GenerationChunk, GenerationResult
from tinyloop.tools import Piece, ToolReader

if TYPE_CHECKING:
    from tinyloop.sampling import Logprobs
    from tinyloop.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0  # JSON has no -inf
DONE = event("[DONE]")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_FLOOR


def spelling(tokenizer: "Tokenizer", token_id: int) -> tuple[bytes, str]:
    """A token's bytes and how they are shown: as text, or spelled out where they are only part of a character."""
    if token_id >= tokenizer.vocab_size:  # rows that pad the head's matrix have no token
        return b"", ""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw, raw.decode()
    except UnicodeDecodeError:
        return raw, "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextOffsets:
    """Where each token of a choice begins in its text, in characters, also when a character spans several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, raw: bytes) -> int:
        start = self._length
        self._length += len(self._decoder.decode(raw))
        return start


@dataclass(kw_only=True)
class View(ABC):
    """What both endpoints share. `prompts`: token ids, one tuple per prompt; `n` choices for each, the likeliest of
    `candidates` if those are more. `beside`: what an API that speaks like this one adds to a whole answer, and to the
    last chunk of a choice; it is given the results and their finish reasons."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    model: str
    tokenizer: "Tokenizer"
    prompts: Sequence[tuple[int, ...]]
    n: int = 1
    candidates: int = 1
    logprobs: bool = False
    include_usage: bool = False
    running_usage: bool = False
    service_tier: str = "default"
    slo: Slo = NO_LIMIT
    beside: Callable[[Sequence[GenerationResult], Sequence[str | None]], dict[str, Any]] = lambda results, reasons: {}
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _streamed: int = 0  # tokens so far, for the running usage

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.id_prefix}{uuid.uuid4().hex}"

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        chosen = self._likeliest(results)
        choices = [self.choice(index, result) for index, result in enumerate(chosen)]
        return self._frame(self.kind) | {
            "choices": [choice.model_dump() for choice in choices],
            "usage": self.usage(results).model_dump(),
            "tinyloop": loop_report(results, self.slo).model_dump(),
            **self.beside(chosen, [choice.finish_reason for choice in choices]),
        }

    def _likeliest(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Of each prompt's candidates those whose tokens are the most probable in the mean, best first."""
        if self.candidates == self.n:
            return list(results)
        groups = [results[at : at + self.candidates] for at in range(0, len(results), self.candidates)]
        return [result for group in groups for result in sorted(group, key=_mean_logprob, reverse=True)[: self.n]]

    @abstractmethod
    def choice(self, index: int, result: GenerationResult) -> shapes.ChatChoice | shapes.CompletionChoice:
        """One whole choice."""

    @abstractmethod
    def opening(self, index: int, prompt_logprobs: Sequence["Logprobs"]) -> dict[str, Any] | None:
        """What a choice's first chunk holds before any token. Called before its `deltas`."""

    @abstractmethod
    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """What one token adds to its choice, often nothing that shows."""

    @abstractmethod
    def closing(self, index: int, result: GenerationResult) -> list[dict[str, Any]]:
        """The end of a choice: what was held back, and a last chunk, the only one with a finish reason."""

    def chunk(self, choice: dict[str, Any], result: GenerationResult | None = None) -> str:
        """One choice's chunk as an event; `result` once there is one."""
        more: dict[str, Any] = {}
        if self.include_usage:
            more["usage"] = self._usage(self._streamed, 0) if self.running_usage else None
        if result is not None and (reason := choice["finish_reason"]) is not None:
            more |= self.beside([result], [reason])
        return self._event([choice], more)

    def usage_chunk(self, results: Sequence[GenerationResult]) -> str:
        return self._event([], {"usage": self.usage(results), "tinyloop": loop_report(results, self.slo)})

    def usage(self, results: Sequence[GenerationResult]) -> shapes.Usage:
        """A prompt counts once, however many choices it has."""
        cached = sum(result.cached_tokens for result in results[:: self.candidates])
        return self._usage(sum(len(result.token_ids) for result in results), cached)

    def _usage(self, completion: int, cached: int) -> shapes.Usage:
        prompt = sum(len(tokens) for tokens in self.prompts)
        return shapes.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=shapes.PromptDetails(cached_tokens=cached),
        )

    def _frame(self, kind: str) -> dict[str, Any]:
        tier = {"service_tier": self.service_tier}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model} | tier

    @cached_property
    def _chunk_frame(self) -> dict[str, Any]:
        return self._frame(self.chunk_kind)

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> str:
        return json_event({**self._chunk_frame, "choices": choices, **more})


@dataclass(kw_only=True)
class ChatView(View):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    tool_names: Sequence[str] = ()
    named_tool: bool = False  # the caller chose the tool itself
    _readers: dict[int, ToolReader] = field(default_factory=dict)

    def choice(self, index: int, result: GenerationResult) -> shapes.ChatChoice:
        logprobs = None
        if self.logprobs:
            logprobs = shapes.ChatLogprobs(content=self.logprobs_of(result))
        reader = ToolReader(self.tool_names)
        message = _message([*reader.push(result.text), *reader.finish()]) if self.tool_names else None
        return shapes.ChatChoice(
            index=index,
            message=message or shapes.Answer(content=result.text),
            logprobs=logprobs,
            finish_reason=self._finish_reason(reader, result),
            stop_reason=result.stop_reason,
        )

    def opening(self, index: int, prompt_logprobs: Sequence["Logprobs"]) -> dict[str, Any]:
        return self._delta(index, {"role": "assistant", "content": ""})

    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        self._streamed += 1
        shown = [self._delta(index, _shown(piece)) for piece in self.pieces(index, chunk.text)]
        if self.logprobs and chunk.logprobs is not None:
            logprobs = shapes.ChatLogprobs(content=[self.logprob(chunk.token_id, chunk.logprobs)])
            shown = shown or [self._delta(index, {"content": ""})]
            shown[0]["logprobs"] = logprobs
        return shown

    def closing(self, index: int, result: GenerationResult) -> list[dict[str, Any]]:
        reader = self._reader(index)
        rest = [self._delta(index, _shown(piece)) for piece in reader.finish()]
        reason = self._finish_reason(reader, result)
        return [*rest, self._delta(index, {}, finish_reason=reason, stop_reason=result.stop_reason)]

    def pieces(self, index: int, text: str) -> list[Piece]:
        """The text and the calls that some more of an answer settles."""
        if not self.tool_names:
            return [Piece(text)] if text else []
        return self._reader(index).push(text)

    def rest(self, index: int) -> list[Piece]:
        """What was held back until the end."""
        return self._reader(index).finish()

    def _reader(self, index: int) -> ToolReader:
        return self._readers.setdefault(index, ToolReader(self.tool_names))

    def _finish_reason(self, reader: ToolReader, result: GenerationResult) -> Any:
        called = reader.calls > 0 and result.finish_reason == "stop" and not self.named_tool
        return "tool_calls" if called else result.finish_reason

    def _delta(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def logprobs_of(self, result: GenerationResult) -> list[shapes.ChosenLogprob]:
        return [self.logprob(*pair) for pair in zip(result.token_ids, result.logprobs, strict=False)]

    def logprob(self, token_id: int, logprobs: "Logprobs") -> shapes.ChosenLogprob:
        top = [shapes.TokenLogprob(**self._token(i, logprob)) for i, logprob in logprobs.top]
        return shapes.ChosenLogprob(**self._token(token_id, logprobs.chosen), top_logprobs=top)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw, token = spelling(self.tokenizer, token_id)
        return {"token": token, "logprob": finite(logprob), "bytes": list(raw)}


def _shown(piece: Piece) -> dict[str, Any]:
    """One piece as a delta. A call opens with its id and name, and is told the rest of its arguments only."""
    if piece.call is None:
        return {"content": piece.text}
    if piece.name:
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.call, "id": call_id(), "type": "function", "function": function}
    else:
        call = {"index": piece.call, "function": {"arguments": piece.arguments}}
    return {"tool_calls": [call]}


def _message(pieces: Iterable[Piece]) -> shapes.Answer:
    """A whole answer from its pieces."""
    text, calls = "", list[shapes.ToolCall]()
    for piece in pieces:
        text += piece.text
        if piece.name:
            calls.append(shapes.ToolCall(id=call_id(), function=shapes.FunctionCall(name=piece.name, arguments="")))
        elif piece.call is not None:
            calls[piece.call].function.arguments += piece.arguments
    return shapes.CallingAnswer(content=text or None, tool_calls=calls) if calls else shapes.Answer(content=text)


def call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(kw_only=True)
class CompletionView(View):
    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    echoes: Sequence[str] = ()  # the prompts' texts, if they are to be repeated
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def choice(self, index: int, result: GenerationResult) -> shapes.CompletionChoice:
        return shapes.CompletionChoice(
            index=index,
            text=self._echo(index) + result.text,
            logprobs=self._logprobs(index, self._scored(index, result)) if self.logprobs else None,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
        )

    def opening(self, index: int, prompt_logprobs: Sequence["Logprobs"]) -> dict[str, Any] | None:
        if not self.echoes:
            return None
        scored = self._logprobs(index, self._prompt(index, prompt_logprobs)) if self.logprobs else None
        return self._delta(index, self._echo(index), logprobs=scored)

    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        self._streamed += 1
        if not self.logprobs or chunk.logprobs is None:
            return [self._delta(index, chunk.text)] if chunk.text else []
        logprobs = self._logprobs(index, [(chunk.token_id, chunk.logprobs)])
        return [self._delta(index, chunk.text, logprobs=logprobs)]

    def closing(self, index: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [self._delta(index, "", finish_reason=result.finish_reason, stop_reason=result.stop_reason)]

    def _delta(self, index: int, text: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _scored(self, index: int, result: GenerationResult) -> Iterator[tuple[int, "Logprobs | None"]]:
        """Tokens with their log-probabilities: the prompt's, if it is echoed, then the answer's."""
        if self.echoes:
            yield from self._prompt(index, result.prompt_logprobs)
        yield from zip(result.token_ids, result.logprobs, strict=False)

    def _prompt(self, index: int, scores: Sequence["Logprobs"]) -> Iterator[tuple[int, "Logprobs | None"]]:
        """The first token has no probability."""
        first, *rest = self.prompts[index // self.n]
        yield first, None
        yield from zip(rest, scores, strict=True)

    def _logprobs(self, index: int, scored: Iterable[tuple[int, "Logprobs | None"]]) -> shapes.CompletionLogprobs:
        offsets = self._offsets.setdefault(index, TextOffsets())
        out = shapes.CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, logprobs in scored:
            out.tokens.append(spelling(self.tokenizer, token_id)[1])
            out.token_logprobs.append(None if logprobs is None else finite(logprobs.chosen))
            out.top_logprobs.append(None if logprobs is None else self._top(token_id, logprobs))
            raw = spelling(self.tokenizer, token_id)[0]
            out.text_offset.append(offsets.next(b"" if self.tokenizer.is_special(token_id) else raw))
        return out

    def _top(self, token_id: int, logprobs: "Logprobs") -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of tokens that read the same, the likelier counts."""
        top: dict[str, float] = {}
        for i, logprob in (*logprobs.top, (token_id, logprobs.chosen)):
            top.setdefault(spelling(self.tokenizer, i)[1], finite(logprob))
        return top


def _mean_logprob(result: GenerationResult) -> float:
    scores = [finite(entry.chosen) for entry in result.logprobs]
    return sum(scores) / len(scores) if scores else LOGPROB_FLOOR


def loop_report(results: Sequence[GenerationResult], slo: Slo = NO_LIMIT) -> shapes.LoopReport:
    """Of several choices, the shallowest and the slowest."""
    first = min(results, key=lambda result: result.loops_granted or 0)
    waits = [result.timings.first_token_s for result in results if result.timings.first_token_s is not None]
    paces = [result.token_s for result in results if result.token_s is not None]
    used = Counter(loops for result in results for loops in result.token_loops)
    return shapes.LoopReport(
        loops_requested=first.loops_requested,
        loops_granted=first.loops_granted,
        loops_used_mean=round(sum(used.elements()) / used.total(), 3) if used else None,
        loops_histogram={str(loops): used[loops] for loops in sorted(used)},
        degraded=any(result.degraded for result in results if result.loops_granted is not None),
        cache_hit=first.cache_hit,
        queue_ms=_ms(max(result.timings.queued_s for result in results)),
        ttft_ms=_ms(max(waits)) if waits else None,
        tpot_ms=_ms(max(paces)) if paces else None,
        total_ms=_ms(max(result.timings.total_s for result in results)),
        slo_met=slo.met(results),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
