"""Answers a file of requests, or a few prompts, without a server.

    python -m jaxserve.offline -i requests.jsonl -o results.jsonl [--resume]
    make_requests | python -m jaxserve.offline -i - -o - | use_results
    python -m jaxserve.offline --prompt "What is the capital of France?"

The files have the batch format of the OpenAI API (see `batch_file`). An interrupted run keeps its
finished results; --resume continues from there.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from jaxserve import cli
from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig
from jaxserve.engine.startup import ProgressLines
from jaxserve.errors import JaxserveError
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.launch import FACTORY
from jaxserve.offline.batch_run import run_batch
from jaxserve.offline.open_files import check_different, open_requests, open_results
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import ChatRequest
from jaxserve.sampling_params import SamplingParams

INTERRUPTED = 130
"""Exit code of a run that a signal interrupted."""

PROMPT_MAX_TOKENS = 256
"""The most tokens of a completion of --prompt without --max-tokens."""


def main(argv: Sequence[str] | None = None, *, factory: str = FACTORY) -> int:
    """Runs the program and returns its exit code.

    Args:
      argv: the arguments; None: those of the process.
      factory: ``module:function`` that builds an engine.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.input is None) == (not args.prompt):
        parser.error("give either --input or --prompt")
    if (args.input is None) != (args.output is None):
        parser.error("--input needs --output, and --output needs --input")
    try:
        return asyncio.run(_until_interrupted(args, factory))
    except (JaxserveError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser for the flags of this program and of the engine."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    batch = parser.add_argument_group("a file of requests")
    batch.add_argument(
        "-i",
        "--input",
        type=Path,
        metavar="FILE",
        help="requests, one per line; a file, a pipe, or - for the standard input",
    )
    batch.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="results, one per line; a file, a pipe, or - for the standard output",
    )
    existing = batch.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="keep the answers in the output and run the other requests",
    )
    existing.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing file of results, once the model is loaded",
    )
    batch.add_argument(
        "--max-in-flight",
        type=_positive,
        metavar="N",
        help="maximum number of requests in flight (default: twice --max-num-seqs for each engine)",
    )
    prompts = parser.add_argument_group("a few prompts")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="print the completion of this prompt; may be repeated",
    )
    prompts.add_argument(
        "--raw", action="store_true", help="complete the prompt without the chat template"
    )
    prompts.add_argument(
        "--max-tokens",
        type=int,
        help=f"maximum tokens of a completion (default: {PROMPT_MAX_TOKENS}, or what fits)",
    )
    prompts.add_argument(
        "--temperature", type=float, help="sampling temperature (default: the model's)"
    )
    prompts.add_argument("--seed", type=int, help="seed of sampling (default: random)")
    cli.add_engine_flags(parser)
    return parser


async def _until_interrupted(args: argparse.Namespace, factory: str) -> int:
    """Answers the file or the prompts until SIGINT or SIGTERM. Returns the exit code."""
    work = asyncio.current_task()
    assert work is not None
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(interrupt, work.cancel)
    try:
        config = cli.read_engine_config(args)
        if args.input is not None:
            await _answer_file(args, config, factory)
        else:
            async with _open(config, factory) as text_engine:
                for prompt in args.prompt:
                    await _print_answer(text_engine, prompt, args)
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        if args.output is not None and args.output.is_file():
            print(f"finished results are in {args.output}; --resume continues", file=sys.stderr)
        return INTERRUPTED
    return 0


@asynccontextmanager
async def _open(config: EngineConfig, factory: str) -> AsyncGenerator[TextEngine, None]:
    """Loads the model and yields a text engine on it."""
    files = ModelFiles.open(config.model)
    client = await EngineClient.start(
        config, factory=factory, on_progress=ProgressLines(), waits_for_engines=True
    )
    try:
        for what, value, why in client.ready.decisions:
            print(f"{what}: {value} ({why})", file=sys.stderr)
        model = ServedModel.create(
            client.ready,
            files.tokenizer,
            names=[files.name, config.model.model],
            defaults=files.defaults,
        )
        yield TextEngine(client, model, max_in_flight=sys.maxsize)
    finally:
        await client.close()


async def _answer_file(args: argparse.Namespace, config: EngineConfig, factory: str) -> None:
    requests = open_requests(args.input)
    check_different(args.input, args.output)
    results = open_results(args.output, resume=args.resume, overwrite=args.overwrite)

    def limit(text_engine: TextEngine) -> int:
        num_rows = text_engine.model.ready.max_num_seqs * config.parallel.data_parallel_size
        return args.max_in_flight or 2 * num_rows

    try:
        await run_batch(lambda: _open(config, factory), requests, results, limit=limit)
    finally:
        results.close()


async def _print_answer(text_engine: TextEngine, prompt: str, args: argparse.Namespace) -> None:
    """Prints a completion piece by piece as it arrives."""
    if len(args.prompt) > 1:
        print(f"> {prompt}")
    if args.raw or text_engine.model.chat_template is None:
        ids = await text_engine.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}]
        text = await render_prompt(text_engine, ChatRequest(messages=messages))
        # The template writes the special tokens itself.
        ids = await text_engine.encode(text, add_special_tokens=False)
    given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed")}
    sampling = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(**{**text_engine.model.defaults.sampling, **sampling})
    request = GenerateRequest(prompts=[ids], params=params, default_max_tokens=PROMPT_MAX_TOKENS)
    async with aclosing(text_engine.generate(request)) as deltas:
        async for delta in deltas:
            print(delta.text, end="", flush=True)
    print()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
