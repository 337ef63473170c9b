"""The tokenizer over HTTP, in the forms that lm-eval, vLLM's and llama.cpp's clients use."""

from typing import Any

import pytest

from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, served

ROOTS = ("", "/v1")


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("text", ["Hi", "é🙂日本", "", "<|im_end|>", "x" * 5000])
async def test_what_is_tokenized_is_detokenized(root: str, text: str) -> None:
    async with served() as (client, engine):
        for field in ("prompt", "content"):
            whole = (await client.post(f"{root}/tokenize", json={field: text, "add_special_tokens": False})).json()
            assert whole["tokens"] == engine.tokenizer.encode(text)
            assert (whole["count"], whole["max_model_len"]) == (len(whole["tokens"]), INFO.max_context)
            back = (await client.post(f"{root}/detokenize", json={"tokens": whole["tokens"]})).json()
            assert back == {"prompt": text, "content": text}


async def test_messages_are_counted_as_the_model_sees_them() -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    async with served(ScriptedEngine(max_context=2000)) as (client, engine):
        for more in ({}, {"tools": [tool]}):
            body = {**chat(), **more}
            whole = (await client.post("/tokenize", json={**body, "return_token_strs": True})).json()
            await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
            assert tuple(whole["tokens"]) == engine.seen[-1].prompt
            assert len(whole["token_strs"]) == whole["count"]


@pytest.mark.parametrize("root", ROOTS)
async def test_the_info_names_the_tokens_that_begin_and_end(root: str) -> None:
    async with served() as (client, engine):
        info = (await client.get(f"{root}/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert info["chat_template"] == engine.tokenizer.chat_template


WRONG: list[tuple[str, str, Any]] = [
    ("/tokenize", "prompt", {}),
    ("/tokenize", "prompt", {"prompt": "a", "content": "b"}),
    ("/tokenize", "prompt", {"prompt": 3}),
    ("/tokenize", "messages", {"messages": []}),
    ("/tokenize", "promt", {"prompt": "a", "promt": "a"}),
    ("/detokenize", "tokens", {}),
    ("/detokenize", "tokens", {"tokens": [259]}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
    ("/detokenize", "tokens", {"tokens": ["a"]}),
]


@pytest.mark.parametrize(("path", "param", "body"), WRONG)
async def test_what_cannot_be_read_is_400_and_named(path: str, param: str, body: Any) -> None:
    async with served() as (client, _):
        response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_another_model_is_404_and_a_large_body_413() -> None:
    async with served(settings=Settings(max_body_bytes=500)) as (client, _):
        assert (await client.post("/tokenize", json={"prompt": "a", "model": "other"})).status_code == 404
        assert (await client.post("/detokenize", json={"tokens": [1], "model": "other"})).status_code == 404
        assert (await client.post("/tokenize", json={"prompt": "x" * 600})).status_code == 413


async def test_embeddings_are_refused_honestly() -> None:
    async with served() as (client, _):
        response = await client.post("/v1/embeddings", json={"model": INFO.id, "input": "a"})
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
