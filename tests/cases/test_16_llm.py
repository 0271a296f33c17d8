"""`LLM` in scripts: how they end, what a fork gets, and which inputs it takes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
from jaxserve.llm import LLM
from jaxserve import SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=4, max_num_batched_tokens=32, num_blocks=40,
          show_progress=False)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
"""
FORK = """
import warnings
warnings.simplefilter("ignore")  # jax and Python warn of every fork
if os.fork() == 0:
    try:
        llm.generate([[5, 6]], params, use_tqdm=False)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def run(script: str, checkpoint: Path) -> list[str]:
    """Returns the lines that a script printed; it must end with code 0 and without a message."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, str(checkpoint)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.strip().splitlines()


def test_pub_06_a_plain_script_ends_silently_and_pub_40_a_fork_gets_an_error(
    random_checkpoint: Path,
) -> None:
    """PUB-06: no ``with``, no guard of the main module. PUB-40: the child does not hang."""
    tokens, error, again = run(SCRIPT + FORK, random_checkpoint)
    assert tokens == again
    assert len(tokens.split()) == 3
    assert error.startswith("this LLM belongs to the process that created it")
    assert "spawn" in error


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(b"hello", use_tqdm=False),
        lambda llm: llm.generate(5, use_tqdm=False),
        lambda llm: llm.generate("a", {"max_tokens": 3}, use_tqdm=False),
        lambda llm: llm.chat("hello", use_tqdm=False),
        lambda llm: llm.chat({"role": "user", "content": "hello"}, use_tqdm=False),
        lambda llm: llm.chat([{"role": "user"}], tools="clock", use_tqdm=False),
        lambda llm: llm.chat([{"role": "user"}], chat_template_kwargs=[1], use_tqdm=False),
    ],
)
def test_pub_41_inputs_of_another_type_are_refused_with_words(front_llm: LLM, call) -> None:
    """PUB-41: these were a TypeError, an AttributeError or a KeyError."""
    with pytest.raises(InvalidRequestError, match=" must be .* got "):
        call(front_llm)


def test_pub_41_iterables_and_arrays_are_prompts(front_llm: LLM) -> None:
    """PUB-41: a generator, an array, and a list of arrays."""
    params = SamplingParams(temperature=0, max_tokens=3)
    lists = front_llm.generate([[5, 6], [7, 8]], params, use_tqdm=False)
    for given in (
        np.array([[5, 6], [7, 8]]),
        [np.array([5, 6]), np.array([7, 8])],
        ([i, i + 1] for i in (5, 7)),
    ):
        assert front_llm.generate(given, params, use_tqdm=False) == lists


@pytest.fixture(scope="module")
def front_llm(front_checkpoint: Path):
    factory = "jaxserve.testing.fake_engine:build"
    with LLM(str(front_checkpoint), factory=factory, show_progress=False) as llm:
        yield llm
