"""Scripts with an LLM: their exits, forks and interrupts, with nothing lost or said."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 60

START = """
import asyncio, gc, os, signal, sys, threading
from jaxserve import SamplingParams
from jaxserve.llm import LLM
from jaxserve.testing import fake_engine
from jaxserve.testing.waiting import wait_until

def build(config, engine, on_progress):
    import dataclasses
    model = dataclasses.replace(config.model, model="fake:step_s=0.005")
    return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
QUIET = {"factory": "__main__:build", "show_progress": False}

def say(outputs):
    print(*[len(output.outputs[0].token_ids) for output in outputs], flush=True)

def running(llm):
    return llm._text_engine.engine.stats[0].num_running

llm = LLM(sys.argv[1], **QUIET)
"""


def run(script: str, checkpoint: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script that begins with an LLM of a fake engine."""
    return subprocess.run(
        [sys.executable, "-c", START + script, str(checkpoint)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


QUIET_SCRIPTS = {
    "a plain script": ("say(llm.generate('a', SHORT, use_tqdm=False))", "3"),
    "closed twice": ("with llm: say(llm.generate('a', SHORT, use_tqdm=False))\nllm.close()", "3"),
    "never used": ("print('x')", "x"),
    "in a cycle": ("llm.me = llm\ndel llm\nprint('x')", "x"),
    "two at a time": (
        "other = LLM(sys.argv[1], **QUIET)\n"
        "say(llm.generate('a', SHORT, use_tqdm=False))\n"
        "say(other.generate('a', SHORT, use_tqdm=False))",
        "3\n3",
    ),
    "a thread that has not ended": (
        "work = lambda: say(llm.generate(['a', 'b'], SHORT, use_tqdm=False))\n"
        "threading.Thread(target=work).start()",
        "3 3",
    ),
    "a daemon thread in a call": (
        "work = lambda: llm.generate('a', ENDLESS, use_tqdm=False)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "wait_until(lambda: running(llm))\nprint('x')",
        "x",
    ),
    "a running event loop": (
        "async def main():\n"
        "    say(llm.generate('a', SHORT, use_tqdm=False))\n"
        "    work = [asyncio.to_thread(llm.generate, 'a', SHORT, use_tqdm=False)] * 1\n"
        "    say(await work[0])\n"
        "asyncio.run(main())",
        "3\n3",
    ),
    "an interrupt that is caught": (
        "def interrupt():\n"
        "    wait_until(lambda: running(llm) == 1 and llm._text_engine.num_in_flight == 1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    llm.generate(['a', 'b'], [SHORT, ENDLESS], use_tqdm=False)\n"
        "except KeyboardInterrupt as interrupted:\n"
        "    print([output.finished for output in interrupted.outputs])\n"
        "say(llm.generate('a', SHORT, use_tqdm=False))",
        "[True, False]\n3",
    ),
    "sys.exit in a block": ("with llm: print('x'); sys.exit(0)", "x"),
}


@pytest.mark.parametrize("name", QUIET_SCRIPTS)
def test_a_script_ends_with_code_0_and_prints_nothing_else(name, front_checkpoint: Path) -> None:
    script, printed = QUIET_SCRIPTS[name]
    ended = run(script, front_checkpoint)
    assert (ended.returncode, ended.stderr, ended.stdout.strip()) == (0, "", printed)


def test_an_interrupt_of_a_script_shows_one_traceback(front_checkpoint: Path) -> None:
    script = """
def interrupt():
    wait_until(lambda: running(llm))
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
llm.generate(['a'] * 100, ENDLESS, use_tqdm=False)
"""
    ended = run(script, front_checkpoint)
    assert ended.returncode == -signal.SIGINT
    assert ended.stdout == ""
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.strip().endswith("KeyboardInterrupt")


def test_a_fork_gets_an_error_and_leaves_the_engine_alone(front_checkpoint: Path) -> None:
    script = """
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    try:
        with llm:
            llm.generate('a', SHORT, use_tqdm=False)
    except Exception as error:
        print(error, flush=True)
    llm.me = llm
    del llm
    gc.collect()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
say(llm.generate('a', SHORT, use_tqdm=False))
"""
    ended = run(script, front_checkpoint)
    assert (ended.returncode, ended.stderr) == (0, "")
    error, code, tokens = ended.stdout.strip().splitlines()
    assert error.startswith("this LLM belongs to the process that created it")
    assert (code, tokens) == ("7", "3")
