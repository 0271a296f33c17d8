"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.front.long_text import encode_within
from jaxserve.front.text_engine import TextEngine
from jaxserve.front.work_pool import Caller
from jaxserve.openai.prompts import most_text_tokens, render_prompt
from jaxserve.openai.protocol import DetokenizeRequest, TokenizeRequest
from jaxserve.sampling_params import IDS_AT_ONCE, check_ids
from server.body import read_json
from server.sse import unless_disconnected

T = TypeVar("T")


async def tokenize(request: Request) -> Response:
    """Returns the token IDs of a prompt or of a chat.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request cannot be served.
    """
    text_engine: TextEngine = request.app.state.server.serving()
    body = await read_json(request, TokenizeRequest)
    return await _answer(request, text_engine, lambda: _tokens(text_engine, body))


async def detokenize(request: Request) -> Response:
    """Returns the text of token IDs.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request cannot be served.
    """
    text_engine: TextEngine = request.app.state.server.serving()
    body = await read_json(request, DetokenizeRequest)
    return await _answer(request, text_engine, lambda: _text(text_engine, body))


async def _answer(
    request: Request, text_engine: TextEngine, work: Callable[[], Awaitable[bytes]]
) -> Response:
    """Returns the JSON that ``work`` makes, if there is room for one more call.

    Raises ClientDisconnect if the client disconnects.
    """
    with text_engine.text_calls.admit(1):
        data = await unless_disconnected(request.receive, work())
    return Response(data, media_type="application/json")


async def _tokens(text_engine: TextEngine, body: TokenizeRequest) -> bytes:
    """Returns the reply to /tokenize."""
    model = text_engine.model
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, adds_special = body.prompt, body.add_special_tokens is not False
    else:
        text = await render_prompt(text_engine, body, tools=body.tools or ())
        adds_special = bool(body.add_special_tokens)
    field = "messages" if body.prompt is None else "prompt"
    limit = most_text_tokens(model)

    def work(caller: Caller) -> bytes:
        try:
            ids = encode_within(model, text, limit, caller, add_special_tokens=adds_special)
        except InvalidRequestError as error:
            raise type(error)(error.message, param=field) from error
        texts = None
        if body.return_token_strs:
            texts = _json_list(map(model.tokenizer.token_text, ids), caller)
        reply = {"count": len(ids), "max_model_len": model.max_model_len}
        return msgspec.json.encode(
            {**reply, "tokens": _json_list(ids, caller), "token_strs": texts}
        )

    return await _run(text_engine, work, len(text))


async def _text(text_engine: TextEngine, body: DetokenizeRequest) -> bytes:
    """Returns the reply to /detokenize."""
    model, ids = text_engine.model, body.tokens
    model.check_name(body.model)
    limit = most_text_tokens(model)
    if len(ids) > limit:
        raise InvalidRequestError(
            f"tokens: at most {limit} token IDs, got {len(ids)}", param="tokens"
        )

    def work(caller: Caller) -> bytes:
        # Completions can have IDs that the tokenizer lacks, if the logits are wider. /tokenize can
        # return IDs that the logits lack, if the tokenizer is larger.
        size = max(model.vocab_size, model.tokenizer.vocab_size)
        check_ids(ids, size, param="tokens")
        caller.check()
        return msgspec.json.encode(
            {"prompt": model.tokenizer.decode(ids, skip_special_tokens=False)}
        )

    return await _run(text_engine, work, len(ids))


async def _run(text_engine: TextEngine, work: Callable[[Caller], T], size: int) -> T:
    """Runs work in the threads for these calls."""
    try:
        return await text_engine.text_pool.run(work, size=size)
    finally:
        text_engine.memory.after(size)


def _json_list(values: Iterable[Any], caller: Caller) -> msgspec.Raw:
    """Returns a list as JSON. A long one is made in parts, between which other threads run."""
    parts: list[bytes] = []
    rest = iter(values)
    while part := list(islice(rest, IDS_AT_ONCE)):
        caller.check()
        parts.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


routes = [
    Route(prefix + path, endpoint, methods=["POST"])
    for prefix in ("", "/v1")
    for path, endpoint in (("/tokenize", tokenize), ("/detokenize", detokenize))
]
