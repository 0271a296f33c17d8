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
import functools
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

if __name__ == "__main__":
    # Until `StopSignals` handles them, Ctrl-C ends the process at once and without a traceback, and
    # these two do nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

from jaxserve import cli
from jaxserve.client.engine_client import SHUTDOWN_TIMEOUT_S, EngineClient
from jaxserve.config import EngineConfig
from jaxserve.engine.startup import ProgressLines
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.launch import FACTORY
from jaxserve.offline.batch_run import run_batch
from jaxserve.offline.open_files import check_different, open_requests, open_results
from jaxserve.offline.stopping import Stopping, until_stopped
from jaxserve.openai.prompts import render_prompt
from jaxserve.openai.protocol import ChatRequest
from jaxserve.program.address_space import check_address_space
from jaxserve.program.signals import restored_signals
from jaxserve.program.stderr import StderrRelay, keep_quiet_at_exit, standard_streams
from jaxserve.program.threads import in_daemon_thread
from jaxserve.sampling_params import SamplingParams

PROMPT_MAX_TOKENS = 256
"""The most tokens of a completion of --prompt without --max-tokens."""


def main(argv: Sequence[str] | None = None, *, factory: str = FACTORY) -> int:
    """Runs the program within a process that goes on. Returns the exit code.

    Args:
      argv: the arguments; None: those of the process.
      factory: ``module:function`` that builds an engine.
    """
    with restored_signals():
        return program(argv, factory=factory)


def program(argv: Sequence[str] | None = None, *, factory: str = FACTORY) -> int:
    """Runs the program and returns its exit code. Afterwards the process should end.

    See `main` for the arguments, and `jaxserve.program.signals` for what signals do.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.input is None) == (not args.prompt):
        parser.error("give either --input or --prompt")
    if (args.input is None) != (args.output is None):
        parser.error("--input needs --output, and --output needs --input")
    standard_streams()
    with StderrRelay() as relay:
        run = functools.partial(_run, args, factory, relay.num_columns)
        try:
            number = asyncio.run(until_stopped(run))
        except (JaxserveError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            keep_quiet_at_exit()
            return 1
        if number is None:
            return 0
        print(f"stopped by {number.name}", file=sys.stderr)
        if args.output is not None and args.output.is_file():
            print(f"finished results are in {args.output}; --resume continues", file=sys.stderr)
        return 128 + number


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


async def _run(
    args: argparse.Namespace, factory: str, bar_columns: int | None, stopping: Stopping
) -> None:
    """Answers the file or the prompts."""
    config = cli.read_engine_config(args)
    if factory == FACTORY:
        check_address_space()
    if args.input is not None:
        await _answer_file(args, config, factory, bar_columns, stopping)
        return
    if sys.stdout is None:
        raise ConfigError("the standard output, to which completions are printed, is closed")
    async with _open(config, factory, stopping) as text_engine:
        for prompt in args.prompt:
            if not stopping.is_finishing:
                await _print_answer(text_engine, prompt, args)


@asynccontextmanager
async def _open(
    config: EngineConfig, factory: str, stopping: Stopping
) -> AsyncGenerator[TextEngine, None]:
    """Loads the model and yields a text engine on it."""
    # In a thread: it may be a download, and a signal must end that, too.
    files = await in_daemon_thread(ModelFiles.open, config.model)
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
        with stopping.can_finish():
            yield TextEngine(client, model, max_in_flight=sys.maxsize)
    finally:
        # After an interrupt, no step in flight is of use any more.
        await client.close(timeout_s=0 if stopping.is_cancelled else SHUTDOWN_TIMEOUT_S)


async def _answer_file(
    args: argparse.Namespace,
    config: EngineConfig,
    factory: str,
    bar_columns: int | None,
    stopping: Stopping,
) -> None:
    requests = open_requests(args.input)
    check_different(args.input, args.output)
    results = open_results(args.output, resume=args.resume, overwrite=args.overwrite)
    stopping.on_finish = requests.stop

    def limit(text_engine: TextEngine) -> int:
        num_rows = text_engine.model.ready.max_num_seqs * config.parallel.data_parallel_size
        return args.max_in_flight or 2 * num_rows

    try:
        await run_batch(
            lambda: _open(config, factory, stopping),
            requests,
            results,
            limit=limit,
            bar_columns=bar_columns,
        )
    finally:
        results.close()


async def _print_answer(text_engine: TextEngine, prompt: str, args: argparse.Namespace) -> None:
    """Prints a completion piece by piece as it arrives."""
    if len(args.prompt) > 1:
        print(f"> {prompt}", flush=True)
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
    print(flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(program())
