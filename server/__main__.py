"""``python -m server [MODEL] [flags]``: serves a model over the OpenAI API."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import resource
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # Until `StopSignals` handles them, Ctrl-C ends the process at once and without a traceback, and
    # these two do nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

import uvloop

from jaxserve import __version__
from jaxserve.cli import add_engine_flags, add_flags, read_engine_config, read_flags
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import JaxserveError
from jaxserve.ipc.launch import FACTORY
from jaxserve.program.address_space import check_address_space
from jaxserve.program.stderr import StderrRelay, standard_streams
from server.console import Console
from server.listen import listen
from server.log import set_up_logging
from server.run import Stopped, serve
from server.settings import ApiSettings, ServerSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal stops it. Returns the exit code."""
    args = make_parser().parse_args(argv)
    stderr = standard_streams()
    with StderrRelay() as relay:
        return run(args, Console(stderr, is_terminal=relay.is_terminal))


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs the server that the parsed flags describe. Returns the exit code."""
    try:
        settings = read_flags(args, ServerSettings)
        api = read_flags(args, ApiSettings)
        config = read_config(args)
        set_up_logging(settings.log_level.upper())
        if settings.engine_factory == FACTORY:
            check_address_space()
        listeners = listen(settings.host, settings.port)
        console.say(f"jaxserve {__version__}: starting {config.model.model}")
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(listeners, config, api, settings, console))
    except Stopped as stopped:
        console.say(f"stopped by {stopped} before the server was ready")
        return 128 + stopped.signal_number
    except JaxserveError as error:
        console.say(f"error: {error}")
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags."""
    parser = argparse.ArgumentParser(
        prog="jaxserve", description="Serve a language model over the OpenAI HTTP API."
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    help_text = next(f for f in dataclasses.fields(ModelConfig) if f.name == "model").metadata[
        "help"
    ]
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help=help_text)
    add_flags(parser, ServerSettings)
    add_flags(parser, ApiSettings)
    add_engine_flags(parser)
    return parser


def read_config(args: argparse.Namespace) -> EngineConfig:
    """Returns the settings of the engines. Raises ConfigError."""
    if args.positional_model is not None:
        args.model = args.positional_model
    return read_engine_config(args)


def _raise_file_limit() -> None:
    """Raises the soft limit on open files: every connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
