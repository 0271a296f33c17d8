"""Calls of the completions and chat endpoints of a text engine, without HTTP."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import chat, completions
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatCompletion, ChatRequest, Completion, CompletionRequest

MESSAGES = [{"role": "user", "content": "hello"}]


async def complete(text_engine: TextEngine, body: dict[str, Any]) -> Completion:
    """Returns the reply of /v1/completions; the prompt is "hello" if the body has none.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request is not served.
    """
    request = decode(json.dumps({"prompt": "hello"} | body).encode(), CompletionRequest)
    return await completions.complete(await completions.prepare(text_engine, request))


async def ask(text_engine: TextEngine, body: dict[str, Any]) -> ChatCompletion:
    """Returns the reply of /v1/chat/completions; the messages are `MESSAGES` if the body has none.

    Raises:
      InvalidRequestError, UnknownModelError, QueueFullError: the request is not served.
    """
    request = decode(json.dumps({"messages": MESSAGES} | body).encode(), ChatRequest)
    return await chat.complete(await chat.prepare(text_engine, request))
