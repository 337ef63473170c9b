"""The tokenizer over HTTP, at the root and under /v1, where clients look for it. Nothing here waits for the engine."""

from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from server.openapi import ErrorBody, described
from server.routers import asked
from server.routers.shared import chat_prompt, off_loop, read_json, refusal, scheduler_of
from server.schemas import tokens as shapes
from server.schemas.openai_forms import tools_of

if TYPE_CHECKING:
    from tinyloop.tokenizer import Tokenizer

router = APIRouter()
TOKENIZE = described(shapes.TokenizeRequest, example={"prompt": "The capital of France"})
DETOKENIZE = described(shapes.DetokenizeRequest, example={"tokens": [504, 3575, 282, 4649]})


@router.post("/tokenize", **TOKENIZE)
@router.post("/v1/tokenize", **TOKENIZE)
async def tokenize(request: Request) -> shapes.TokenizeAnswer:
    """Token ids of a text, or of a chat as the model would see it."""
    scheduler = scheduler_of(request)
    tokenizer, info = scheduler.tokenizer, scheduler.info
    body: shapes.TokenizeRequest = shapes.parse_strictly(shapes.TokenizeRequest, await read_json(request))
    if body.model is not None:
        asked.alias_loops(body.model, info)
    tokens = await _tokens(tokenizer, body)
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return shapes.TokenizeAnswer(count=len(tokens), max_model_len=info.max_context, tokens=tokens, token_strs=texts)


async def _tokens(tokenizer: "Tokenizer", body: shapes.TokenizeRequest) -> list[int]:
    text = body.text
    if text is not None:
        begin = tokenizer.bos_id if body.add_special_tokens and tokenizer.add_bos else None
        return [*([] if begin is None else [begin]), *await off_loop(len(text), partial(tokenizer.encode, text))]
    prompt = await chat_prompt(
        tokenizer,
        [message.plain() for message in body.messages or ()],
        tools_of(body.tools, None, many=True),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    return list(prompt)


@router.post("/detokenize", **DETOKENIZE)
@router.post("/v1/detokenize", **DETOKENIZE)
async def detokenize(request: Request) -> shapes.DetokenizeAnswer:
    """The text of token ids, control tokens as they are spelled."""
    scheduler = scheduler_of(request)
    body: shapes.DetokenizeRequest = shapes.parse_strictly(shapes.DetokenizeRequest, await read_json(request))
    if body.model is not None:
        asked.alias_loops(body.model, scheduler.info)
    decode = partial(scheduler.tokenizer.decode, body.tokens, skip_special=False)
    text = await off_loop(len(body.tokens), decode)
    return shapes.DetokenizeAnswer(prompt=text, content=text)


@router.get("/tokenizer_info", **described())
@router.get("/v1/tokenizer_info", **described())
async def tokenizer_info(request: Request) -> shapes.TokenizerInfo:
    """What a client needs to count tokens and to render chats by itself."""
    scheduler = scheduler_of(request)
    tokenizer = scheduler.tokenizer
    return shapes.TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        model_max_length=scheduler.info.max_context,
        add_bos_token=tokenizer.add_bos,
        bos_token=tokenizer.special_tokens.get("bos_token"),
        eos_token=tokenizer.special_tokens.get("eos_token"),
        chat_template=tokenizer.chat_template,
    )


@router.post("/v1/embeddings", status_code=501, **described(answer=ErrorBody))
async def embeddings(request: Request) -> None:
    """This model makes text and no embeddings."""
    raise refusal(501, "not_supported", "this server has no embedding model")
