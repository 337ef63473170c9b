"""POST /v1/completions: prompts of every form, echo with log-probabilities, batches in order."""

from typing import Any

import pytest

from server.routers.openai_views import TextOffsets
from tests.http_support import ScriptedEngine, completion, events, served
from tinyloop.sampling import Logprobs

URL = "/v1/completions"


async def post(engine: ScriptedEngine | None = None, **fields: Any) -> Any:
    async with served(engine) as (client, _):
        return await client.post(URL, json=completion(**fields))


class Repeats(ScriptedEngine):
    """Answers with its prompt, so that choices can be told apart."""

    async def _tokens(self, req: Any) -> Any:
        self.script = self.tokenizer.decode(req.prompt).upper()
        async for chunk in super()._tokens(req):
            yield chunk


async def test_an_answer_has_the_published_shape() -> None:
    body = (await post()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 2


async def test_the_default_limit_is_sixteen_tokens() -> None:
    assert (await post(ScriptedEngine("x" * 50))).json()["choices"][0]["text"] == "x" * 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        (["a", "b", "c"], ["A", "B", "C"]),
        ([64, 65], ["AB"]),
        ([[64], [65, 66]], ["A", "BC"]),
    ],
)
async def test_prompts_of_every_form_are_answered_in_order(prompt: Any, texts: list[str]) -> None:
    ids = Repeats().tokenizer.encode("ABC")
    translated = {64: ids[0], 65: ids[1], 66: ids[2]}
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        prompt = [translated[p] if isinstance(p, int) else [translated[i] for i in p] for p in prompt]
    choices = (await post(Repeats(), prompt=prompt)).json()["choices"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(len(texts)))


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_of_a_batch_are_numbered_prompt_by_prompt(stream: bool) -> None:
    response = await post(Repeats(), prompt=["a", "b"], n=2, stream=stream, echo=True)
    chunks = events(response.text)[:-1] if stream else [response.json()]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "aA", 1: "aA", 2: "bB", 3: "bB"}


async def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    assert (await post(prompt=["ab", "c"], n=3)).json()["usage"]["prompt_tokens"] == 3


async def test_an_empty_text_starts_at_the_beginning_of_a_document() -> None:
    async with served() as (client, engine):
        assert (await client.post(URL, json=completion(prompt=""))).status_code == 200
    assert engine.seen[0].prompt == (256,)


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
async def test_a_prompt_without_tokens_is_refused(prompt: Any) -> None:
    response = await post(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_log_probabilities_scores_the_prompt(max_tokens: int) -> None:
    choice = (await post(prompt="Hip", echo=True, logprobs=1, max_tokens=max_tokens)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hip" + "H" * max_tokens
    assert logprobs["tokens"] == ["H", "i", "p", "H"][: 3 + max_tokens]
    assert logprobs["token_logprobs"][:3] == [None, -9999.0, -9999.0]
    assert logprobs["top_logprobs"][:2] == [None, {"i": -0.5}]
    assert {len(values) for values in logprobs.values()} == {3 + max_tokens}


async def test_text_offsets_count_characters_and_skip_special_tokens() -> None:
    engine = ScriptedEngine()
    prompt = [256, *engine.tokenizer.encode("é🙂x")]
    logprobs = (await post(prompt=prompt, echo=True, logprobs=0, max_tokens=1)).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 1, 1, 1, 2, 3]
    assert logprobs["tokens"][0] == "<|endoftext|>"


async def test_streamed_text_offsets_go_on_from_chunk_to_chunk() -> None:
    chunks = events((await post(stream=True, logprobs=1)).text)[:-1]
    offsets = [at for chunk in chunks for at in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == list(range(len("Hello world")))


def test_broken_bytes_do_not_stop_the_count() -> None:
    offsets = TextOffsets()
    assert [offsets.next(raw) for raw in (b"\xff", b"a", b"\xf0\x9f", b"b")] == [0, 1, 2, 2]


async def test_a_streamed_echo_comes_before_the_answer() -> None:
    chunks = events((await post(stream=True, echo=True)).text)[:-1]
    assert chunks[0]["choices"][0]["text"] == "Hi"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "HiHello world"


@pytest.mark.parametrize("max_tokens", [1, 3])
async def test_a_streamed_echo_is_scored_like_a_whole_one(max_tokens: int) -> None:
    fields = {"prompt": ["Hip", "é"], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    whole = (await post(**fields)).json()["choices"]
    streamed: dict[int, dict[str, list[Any]]] = {}
    for chunk in events((await post(**fields, stream=True)).text)[:-1]:
        choice = chunk["choices"][0]
        for name, values in (choice["logprobs"] or {}).items():
            streamed.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    assert [streamed[index] for index in (0, 1)] == [choice["logprobs"] for choice in whole]


class Uneven(ScriptedEngine):
    """Each answer is likelier than the one before it."""

    def _logprobs(self, req: Any, token: int) -> Any:
        return Logprobs(-5.0 + len(self.seen)) if req.sampling.logprobs is not None else None

    async def _tokens(self, req: Any) -> Any:
        self.script = str(len(self.seen))
        async for chunk in super()._tokens(req):
            yield chunk


async def test_the_likeliest_of_several_come_first_and_all_are_counted() -> None:
    body = (await post(Uneven(), prompt=["a", "b"], n=2, best_of=3)).json()
    assert [choice["text"] for choice in body["choices"]] == ["3", "2", "6", "5"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}])
async def test_a_best_of_that_cannot_be_is_400(fields: dict[str, Any]) -> None:
    response = await post(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = (await post(**fields)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


async def test_values_that_ask_for_nothing_pass() -> None:
    assert (await post(best_of=1, suffix="", user="me", echo=False, logprobs=None)).status_code == 200


async def test_more_choices_than_allowed_are_refused() -> None:
    response = await post(prompt=["a"] * 100, n=2)
    assert response.status_code == 400
    assert "200" in response.json()["error"]["message"]
