"""Requests of random prompts: the flags that describe them, and their bodies."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

from jaxserve.checkpoint.locate import open_tokenizer

Body = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """The lengths, with these defaults, the seed, and what the server is started with."""
    for name, length in (("--input-len", input_len), ("--output-len", output_len)):
        parser.add_argument(name, type=int, default=length, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "server_flags", nargs="*", metavar="SERVER_FLAG", help="after --: flags of the server"
    )


def body_maker(args: argparse.Namespace) -> Callable[[], Body]:
    """Makes bodies of greedy completions of full length, each with a prompt of its own."""
    vocab_size = open_tokenizer(args.model).vocab_size
    numbers = random.Random(args.seed)

    def body() -> Body:
        prompt = [numbers.randrange(vocab_size) for _ in range(args.input_len)]
        length = args.output_len
        return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}

    return body
