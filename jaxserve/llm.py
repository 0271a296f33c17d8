"""`LLM`: a model in this process, for scripts and notebooks, without a server.

from jaxserve import SamplingParams
from jaxserve.llm import LLM

with LLM("path/to/model", max_model_len=2048) as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tqdm import tqdm

from jaxserve.client.in_process import InProcessEngine
from jaxserve.client.launcher import memory_settings, xla_flags
from jaxserve.config import EngineConfig
from jaxserve.device import NVIDIA_DRIVER
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.process import load_factory
from jaxserve.engine.startup import ProgressLines
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.front.concurrency import bounded_as_completed
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.launch import FACTORY
from jaxserve.ipc.messages import Progress
from jaxserve.offline.outputs import CompletionOutput, LLMOutput, Prompt, as_prompts, collect
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import ChatRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.sampling.declaration import Stage  # imports jax

T = TypeVar("T")
Messages: TypeAlias = list[dict[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Encoded: TypeAlias = tuple[str | None, list[int]]
"""A prompt: its string, or None if the caller gave token IDs, and its token IDs."""

logger = logging.getLogger(__name__)


class LLM:
    """A model, its tokenizer and an engine.

    Methods may be called from any thread; concurrent calls share the engine. An interrupt (Ctrl-C)
    aborts a call, and the engine can be used again.

    Create the `LLM` before jax is used, because jax reads some settings once, when it is first
    used: ``memory_fraction``, for which the constructor sets ``XLA_CLIENT_MEM_FRACTION`` unless the
    variable is set; ``capture_collectives``, which becomes a flag in ``XLA_FLAGS``; and on a CPU
    ``tensor_parallel_size``.

    Args:
      model: a value of the flag ``--model``; None for the default model.
      logits_processors: stages to add to the sampler: `sampling.declaration.Stage` objects, or
        values of the flag ``--logits-processor``. They run in this order.
      factory: ``module:function`` that builds the engine.
      show_progress: print the progress of loading.
      **settings: any other field of the groups of `EngineConfig`, for example dtype="float32",
        max_model_len=2048 or num_blocks=512.

    Raises:
      ConfigError: a setting is unknown or invalid.
      CheckpointError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        logits_processors: Sequence[str | Stage] = (),
        factory: str = FACTORY,
        show_progress: bool = True,
        **settings: Any,
    ) -> None:
        if model is not None:
            settings["model"] = model
        if isinstance(logits_processors, str):
            raise ConfigError(
                f"logits_processors must be a list of stages, got {logits_processors!r}"
            )
        names = tuple(each for each in logits_processors if isinstance(each, str))
        config = engine_config({**settings, "logits_processors": names})
        if config.parallel.data_parallel_size != 1:
            raise ConfigError(
                "data_parallel_size must be 1 for LLM, which runs one engine in this process; got "
                f"{config.parallel.data_parallel_size}"
            )
        os.environ.update(xla_flags(config.compile, os.environ))
        ask_for_memory(config, os.environ)
        files = ModelFiles.open(config.model)
        build = load_factory(factory)
        if len(names) < len(logits_processors):
            # A config cannot hold objects, so the factory gets all stages, in order.
            build = functools.partial(build, logits_processors=tuple(logits_processors))
        on_progress = ProgressLines() if show_progress else _ignore
        background = _Background()
        # The finalizer also runs at interpreter exit, which no thread inside jax may outlive.
        self._close = weakref.finalize(self, background.close)
        self._call = background.call
        try:
            engine = background.start(lambda: build(config, 0, on_progress))
            served = ServedModel.create(
                engine.ready, files.tokenizer, names=[files.name], defaults=files.defaults
            )
            self._text_engine = TextEngine(engine, served, max_in_flight=sys.maxsize)
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
        """Completes prompts and returns an output for each, in order.

        Args:
          prompts: a string, token IDs, ``{"prompt": string}`` or ``{"prompt_token_ids": ids}``, or
            a list of these.
          sampling_params: one object for all prompts, or a list with one for each prompt; None for
            the model's defaults.
          use_tqdm: show a progress bar.

        Raises:
          InvalidRequestError: a prompt or its parameters are invalid. No prompt has run then.
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
        """Answers one or several conversations. Returns and raises the same as `generate`.

        Args:
          messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
          sampling_params: as in `generate`.
          add_generation_prompt: end the prompt with the start of the assistant's turn.
          continue_final_message: continue the last message, which must be the assistant's.
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
        """Returns the tokenizer of the model."""
        return self._text_engine.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `generate` and `chat` use when they are given none."""
        return SamplingParams(**self._text_engine.model.defaults.sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stops the engine and frees its memory. Calling it again does nothing."""
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
                f"sampling_params must be one object or a list of {len(prompts)}, one for each "
                f"prompt; got {len(each)}",
                param="sampling_params",
            )
        outputs = [
            LLMOutput(text, ids, [CompletionOutput(j) for j in range(p.n)])
            for (text, ids), p in zip(prompts, each, strict=True)
        ]
        # Checks every request before any runs.
        deltas = [
            self._text_engine.generate(GenerateRequest(prompts=[output.prompt_token_ids], params=p))
            for output, p in zip(outputs, each, strict=True)
        ]

        async def answer(i: int) -> LLMOutput:
            return await collect(deltas[i], outputs[i], self._text_engine.model.tokenizer)

        # Enough prompts in flight that no row waits for the next prompt.
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
        """Builds the engine and waits until it is ready."""
        self._engine = self.call(InProcessEngine.start(build))
        return self._engine

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result. An interrupt cancels the coroutine.

        Raises:
          EngineDeadError: the LLM has been closed.
        """
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
        """Stops the engine, then the loop and its thread."""
        if self._engine is not None:
            self.call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Returns the config with these settings, each in its group.

    Raises:
      ConfigError: a setting is unknown; the message lists them all.
    """
    rest = dict(settings)
    groups = {}
    known: list[str] = []
    for name, group in typing.get_type_hints(EngineConfig).items():
        fields = [field.name for field in dataclasses.fields(group)]
        known += fields
        groups[name] = group(**{field: rest.pop(field) for field in fields if field in rest})
    if rest:
        raise ConfigError(f"unknown setting {', '.join(rest)}; expected one of {', '.join(known)}")
    return EngineConfig(**groups)


def ask_for_memory(config: EngineConfig, environment: MutableMapping[str, str]) -> None:
    """Sets the share of a GPU's memory that jax reserves; warns if that may come too late."""
    settings = memory_settings(config.cache, environment)
    environment.update(settings)
    if settings and "jax" in sys.modules and NVIDIA_DRIVER.exists():
        wanted = ", ".join(f"{name}={value}" for name, value in settings.items())
        logger.warning(
            "jax was imported before this LLM was created. If jax has been used, it has reserved "
            "its default share of the GPU's memory, and memory_fraction has no effect. Create the "
            "LLM before using jax, or set %s in the environment",
            wanted,
        )


def _ignore(progress: Progress) -> None:
    pass
