"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import DetokenizeRequest, TokenizeRequest
from jaxserve.sampling_params import check_ids
from server.body import read_json


async def tokenize(request: Request) -> Response:
    """Returns the token IDs of a prompt or of a chat.

    Raises:
      InvalidRequestError, UnknownModelError: the request cannot be served.
    """
    text_engine: TextEngine = request.app.state.server.serving()
    body = await read_json(request, TokenizeRequest)
    text_engine.model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, adds_special = body.prompt, body.add_special_tokens is not False
    else:
        text = await render_prompt(text_engine.model, body, tools=body.tools or ())
        adds_special = bool(body.add_special_tokens)
    tokenizer = text_engine.model.tokenizer

    def work() -> bytes:
        ids = tokenizer.encode(text, add_special_tokens=adds_special)
        reply = {"count": len(ids), "max_model_len": text_engine.model.max_model_len, "tokens": ids}
        with_texts = bool(body.return_token_strs)
        reply["token_strs"] = [tokenizer.token_text(i) for i in ids] if with_texts else None
        return msgspec.json.encode(reply)

    return Response(await asyncio.to_thread(work), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Returns the text of token IDs.

    Raises:
      InvalidRequestError, UnknownModelError: the request cannot be served.
    """
    text_engine: TextEngine = request.app.state.server.serving()
    body = await read_json(request, DetokenizeRequest)
    text_engine.model.check_name(body.model)
    # The logits can be wider than the tokenizer, so completions can have IDs that it lacks; it can
    # also be wider than the logits, and /tokenize returns such IDs.
    size = max(text_engine.model.vocab_size, text_engine.model.tokenizer.vocab_size)
    check_ids(body.tokens, size, param="tokens")

    def work() -> bytes:
        text = text_engine.model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return msgspec.json.encode({"prompt": text})

    return Response(await asyncio.to_thread(work), media_type="application/json")


routes = [
    Route(prefix + path, endpoint, methods=["POST"])
    for prefix in ("", "/v1")
    for path, endpoint in (("/tokenize", tokenize), ("/detokenize", detokenize))
]
