"""A model in this process, for scripts and notebooks: no server, no sockets.

from jaxserve import SamplingParams
from jaxserve.llm import LLM

with LLM("path/to/model", max_model_len=2048) as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

from jaxserve.client.in_process import InProcessEngine
from jaxserve.client.launcher import memory_settings
from jaxserve.config import EngineConfig
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.process import load_factory
from jaxserve.engine.startup import ProgressLines
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.front.concurrency import bounded_as_completed
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.launch import FACTORY
from jaxserve.ipc.messages import Progress
from jaxserve.offline.outputs import CompletionOutput, LLMOutput, Prompt, as_prompts, collect
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import ChatRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

T = TypeVar("T")
Messages: TypeAlias = list[dict[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Encoded: TypeAlias = tuple[str | None, list[int]]
"""A prompt's text, if it was one, and its tokens."""

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Is there where a GPU may be."""


class LLM:
    """A model, its tokenizer and an engine.

    Its methods may be called from any thread; calls at the same time share the engine. An interrupt
    (Ctrl-C) ends a call and leaves the engine as good as new.

    Unless ``XLA_CLIENT_MEM_FRACTION`` is set it sets it, so that jax takes as much of a GPU as
    ``memory_fraction`` needs. jax looks at it once, so make the `LLM` before jax is used.

    Args:
      model: as ``--model``; None: the default model.
      factory: ``module:function`` that builds the engine.
      show_progress: print what is done while the model is loaded.
      **settings: any other field of the groups of `EngineConfig`, named as the flags are:
        dtype="float32", max_model_len=2048, num_blocks=512...

    Raises:
      ConfigError: there is no such setting, or it is impossible.
      CheckpointError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        factory: str = FACTORY,
        show_progress: bool = True,
        **settings: Any,
    ) -> None:
        if model is not None:
            settings["model"] = model
        config = engine_config(settings)
        if config.parallel.data_parallel_size != 1:
            raise ConfigError(
                "data_parallel_size must be 1 for LLM, which runs one engine in this process; got "
                f"{config.parallel.data_parallel_size}"
            )
        ask_for_memory(config, os.environ)
        served = ServedModel.open(config.model)
        build = load_factory(factory)
        on_progress = ProgressLines() if show_progress else _ignore
        background = _Background()
        # At the end of the program too: a thread inside jax must not outlive the interpreter.
        self._close = weakref.finalize(self, background.close)
        self._call = background.call
        try:
            engine = background.start(lambda: build(config, 0, on_progress))
            self._text_engine = TextEngine(
                engine,
                served.tokenizer,
                model_names=[served.name],
                defaults=served.defaults,
                max_in_flight=sys.maxsize,
            )
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[LLMOutput]:
        """Completes prompts; the outputs are in the order of the prompts.

        Args:
          prompts: a text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a
            list of these.
          sampling_params: for all prompts, or one for each; None: the model's defaults.
          use_tqdm: show a progress bar.

        Raises:
          InvalidRequestError: a prompt or its parameters cannot be served; none has run then.
          EngineDeadError: the engine has failed.
        """
        return self._call(self._generate(as_prompts(prompts), sampling_params, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[LLMOutput]:
        """Answers a conversation, or several; otherwise like `generate`.

        Args:
          messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
          sampling_params: as in `generate`.
          add_generation_prompt: end the prompt with the start of the assistant's turn.
          continue_final_message: go on with the last message, which is the assistant's.
          chat_template_kwargs: more variables for the template.
          use_tqdm: show a progress bar.
        """
        several = len(messages) > 0 and isinstance(messages[0], list)
        conversations = typing.cast("list[Messages]", messages if several else [messages])
        requests = [
            ChatRequest(
                messages=conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._call(self._chat(requests, sampling_params, use_tqdm))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._text_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What counts when no parameters are given."""
        return SamplingParams(**self._text_engine.defaults.sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the engine and frees its memory. May be called again."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _chat(
        self, requests: list[ChatRequest], params: Params, use_tqdm: bool
    ) -> list[LLMOutput]:
        texts = [await render_prompt(self._text_engine, request) for request in requests]
        # The template writes the special tokens itself.
        ids = await self._text_engine.encode_batch(texts, add_special_tokens=False)
        return await self._run(list(zip(texts, ids, strict=True)), params, use_tqdm)

    async def _generate(
        self, prompts: list[str | list[int]], params: Params, use_tqdm: bool
    ) -> list[LLMOutput]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = iter(await self._text_engine.encode_batch(texts))
        encoded: list[Encoded] = [
            (prompt, next(ids)) if isinstance(prompt, str) else (None, prompt) for prompt in prompts
        ]
        return await self._run(encoded, params, use_tqdm)

    async def _run(self, prompts: list[Encoded], params: Params, use_tqdm: bool) -> list[LLMOutput]:
        params = self.get_default_sampling_params() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params must be one, or one for each of the {len(prompts)} prompts; got "
                f"{len(each)}",
                param="sampling_params",
            )
        outputs = [
            LLMOutput(text, ids, [CompletionOutput(j) for j in range(p.n)])
            for (text, ids), p in zip(prompts, each, strict=True)
        ]
        # Checks every request; none runs yet.
        deltas = [
            self._text_engine.generate(output.prompt_token_ids, p)
            for output, p in zip(outputs, each, strict=True)
        ]

        async def answer(i: int) -> LLMOutput:
            return await collect(deltas[i], outputs[i], self._text_engine.tokenizer)

        limit = 2 * self._text_engine.engine.ready.max_num_seqs
        num_tokens = 0
        with tqdm(total=len(outputs), desc="Processed prompts", disable=not use_tqdm) as bar:
            async for output in bounded_as_completed(range(len(outputs)), answer, limit=limit):
                num_tokens += sum(len(o.token_ids) for o in output.outputs)
                rate = num_tokens / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
                bar.update()
        return outputs


class _Background:
    """An event loop in a thread, and the engine that serves it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine: InProcessEngine | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def start(self, build: Callable[[], BuiltEngine]) -> InProcessEngine:
        """Builds the engine and waits until it can serve."""
        self._engine = self.call(InProcessEngine.start(build))
        return self._engine

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it; an interrupt ends it."""
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("this LLM has been closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the engine, then the loop and its thread."""
        if self._engine is not None:
            self.call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The config with these fields, whichever group each belongs to.

    Raises:
      ConfigError: a name is not that of a setting; the message lists them all.
    """
    rest = dict(settings)
    groups = {}
    known: list[str] = []
    for name, group in typing.get_type_hints(EngineConfig).items():
        fields = [field.name for field in dataclasses.fields(group)]
        known += fields
        groups[name] = group(**{field: rest.pop(field) for field in fields if field in rest})
    if rest:
        raise ConfigError(f"there is no setting {', '.join(rest)}; there are {', '.join(known)}")
    return EngineConfig(**groups)


def ask_for_memory(config: EngineConfig, environment: MutableMapping[str, str]) -> None:
    """Sets how much of a GPU jax is to take, with a warning if it may have taken it already."""
    settings = memory_settings(config.cache, environment)
    environment.update(settings)
    if settings and "jax" in sys.modules and NVIDIA_DRIVER.exists():
        wanted = ", ".join(f"{name}={value}" for name, value in settings.items())
        logger.warning(
            "jax was imported before; if it has been used, it keeps its own part of a GPU, "
            "whatever memory_fraction says: make the LLM before that, or set %s in the environment",
            wanted,
        )


def _ignore(progress: Progress) -> None:
    pass
