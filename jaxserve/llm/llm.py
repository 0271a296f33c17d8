"""The class `LLM`."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.client.launcher import xla_flags
from jaxserve.engine.process import load_factory
from jaxserve.engine.startup import ProgressLines
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.launch import FACTORY
from jaxserve.ipc.messages import Progress
from jaxserve.llm.background import Background, OnProgress
from jaxserve.llm.inputs import (
    Messages,
    Params,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    as_tools,
    as_variables,
)
from jaxserve.llm.outputs import CallFailedError, EmbeddingRequestOutput, LLMOutput
from jaxserve.llm.run import Encoded, answer_prompts
from jaxserve.llm.settings import ask_for_memory, engine_config
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import ChatRequest
from jaxserve.program.address_space import check_address_space
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.sampling.declaration import Stage  # imports jax


class LLM:
    """A model, its tokenizer and an engine.

    Methods may be called from any thread, also while an event loop runs in it; concurrent calls
    share the engine. The engine ends with `close`, at the end of a ``with`` block, when the object
    is garbage-collected, or when the interpreter exits. A process that was forked cannot use it.

    A request that fails ends alone: its output has the reason in ``error``. If the engine fails or
    is closed, or an interrupt (Ctrl-C) ends a call, the exception has the outputs so far. After an
    interrupt the engine can be used again.

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
        if factory == FACTORY:
            check_address_space()
        build = load_factory(factory)
        if len(names) < len(logits_processors):
            # A config cannot hold objects, so the factory gets all stages, in order.
            build = functools.partial(build, logits_processors=tuple(logits_processors))
        on_progress: OnProgress = ProgressLines() if show_progress else _ignore
        self._background = Background()
        finalizer = weakref.finalize(self, self._background.collect)
        finalizer.atexit = False  # at exit the background ends itself
        try:
            engine = self._background.start(functools.partial(build, config, 0), on_progress)
            served = ServedModel.create(
                engine.ready, files.tokenizer, names=[files.name], defaults=files.defaults
            )
            self._text_engine = TextEngine(engine, served, max_in_flight=sys.maxsize)
        except BaseException:
            self._background.close()
            raise

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[LLMOutput]:
        """Completes prompts and returns an output for each, in order.

        Args:
          prompts: a string, token IDs, ``{"prompt": string}`` or ``{"prompt_token_ids": ids}``, or
            an iterable of these.
          sampling_params: one object for all prompts, or one for each prompt; None for the model's
            defaults.
          use_tqdm: show a progress bar.

        Raises:
          InvalidRequestError: a prompt or its parameters are invalid. No prompt has run then.
          CallFailedError: the engine failed or was closed; it has all outputs.
          KeyboardInterrupt: an interrupt ended the call; its attribute ``outputs`` has all outputs.
        """
        return self._run(
            functools.partial(self._encode, as_prompts(prompts)), sampling_params, use_tqdm
        )

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Iterable[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[LLMOutput]:
        """Answers one or several conversations. Returns and raises the same as `generate`.

        Args:
          messages: a list of ``{"role": ..., "content": ...}``, or an iterable of such lists.
          sampling_params: as in `generate`.
          add_generation_prompt: end the prompt with the start of the assistant's turn.
          continue_final_message: continue the last message, which must be the assistant's.
          tools: the tools that the template shows to the model, in the form of the OpenAI API. The
            text of an output has the calls as the model writes them.
          chat_template_kwargs: more variables for the template.
          use_tqdm: show a progress bar.
        """
        variables = as_variables(chat_template_kwargs)
        requests = [
            ChatRequest(
                messages=conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
            )
            for conversation in as_conversations(messages)
        ]
        render = functools.partial(self._render, requests, as_tools(tools))
        return self._run(render, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt, in order. Raises the same as `generate`.

        Args:
          prompts: as in `generate`.
          pooling: as in `SamplingParams`.
          normalize: scale each vector to length 1.
          use_tqdm: show a progress bar.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm)
        return [EmbeddingRequestOutput.of(output, normalize=normalize) for output in outputs]

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the model."""
        return self._text_engine.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `generate` and `chat` use when they are given none."""
        return SamplingParams(**self._text_engine.model.defaults.sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stops the engine and frees its memory. Calling it again does nothing."""
        self._background.close()
        self._text_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(
        self, prepare: Callable[[], Awaitable[list[Encoded]]], params: Params, use_tqdm: bool
    ) -> list[LLMOutput]:
        """Runs the prompts that ``prepare`` returns."""
        outputs: list[LLMOutput] = []
        try:
            self._background.call(self._answer(prepare, params, outputs, use_tqdm))
        except EngineDeadError as error:
            raise CallFailedError(str(error), outputs) from error
        except KeyboardInterrupt as interrupt:
            # Not a subclass: the exit code of the interpreter depends on the very type.
            interrupt.outputs = outputs  # type: ignore[attr-defined]
            raise
        return outputs

    async def _render(
        self, requests: list[ChatRequest], tools: list[Mapping[str, Any]]
    ) -> list[Encoded]:
        engine = self._text_engine
        texts = [await render_prompt(engine, request, tools=tools) for request in requests]
        # The template writes the special tokens itself.
        ids = await self._text_engine.encode_batch(texts, add_special_tokens=False)
        return list(zip(texts, ids, strict=True))

    async def _encode(self, prompts: list[str | list[int]]) -> list[Encoded]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = iter(await self._text_engine.encode_batch(texts))
        return [
            (prompt, next(ids)) if isinstance(prompt, str) else (None, prompt) for prompt in prompts
        ]

    async def _answer(
        self,
        prepare: Callable[[], Awaitable[list[Encoded]]],
        params: Params,
        outputs: list[LLMOutput],
        use_tqdm: bool,
    ) -> None:
        prompts = await prepare()
        each = as_params(params, len(prompts), self.get_default_sampling_params())
        await answer_prompts(self._text_engine, prompts, each, outputs, use_tqdm=use_tqdm)


def _ignore(progress: Progress) -> None:
    pass
