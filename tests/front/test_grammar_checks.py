"""Grammars are checked once, quick ones before long ones, and long ones delay no others."""

import asyncio
import json
import threading

import pytest

from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.front import grammar_checks
from jaxserve.front.grammar_checks import LONG_QUEUE_SHARE, NUM_KEPT, GrammarChecks
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import worker as grammar_worker
from jaxserve.structured_output.worker import TooMuchWorkError
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer
from jaxserve.testing.waiting import until

TOKENIZER = tiny_tokenizer()
VOCAB = 512


class FakeWorker:
    """Notes the grammars that it checks.

    A spec with "long" is too much work for the first worker, one with "bad" is refused, one with
    "held" waits until `go` is set.
    """

    def __init__(self, *args, time_s=None) -> None:
        self.is_quick = time_s is not None
        self.checked: list[str] = []
        self.go = threading.Event()

    def check(self, grammar) -> None:
        self.checked.append(grammar.spec)
        if self.is_quick and "long" in grammar.spec:
            raise TooMuchWorkError("too much work")
        if "held" in grammar.spec:
            assert self.go.wait(60)
        if "bad" in grammar.spec:
            raise InvalidRequestError("it is bad")


@pytest.fixture
def workers(monkeypatch):
    """The quick and the long worker of ``checks``."""
    made = []

    def make(*args, **options):
        made.append(FakeWorker(*args, **options))
        return made[-1]

    monkeypatch.setattr(grammar_checks, "GrammarWorker", make)
    return made


@pytest.fixture
def checks(workers):
    return GrammarChecks(TOKENIZER, VOCAB, max_in_flight=8 * LONG_QUEUE_SHARE)


MAX_WAITING_LONG = 8


async def refusal(checks, spec: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await checks.check(Grammar("regex", spec))
    return caught.value.message


async def test_each_grammar_is_checked_once(checks, workers) -> None:
    quick, long = workers
    for _ in range(2):
        same = [Grammar("regex", "a")] * 3
        await asyncio.gather(*map(checks.check, same))
        await checks.check(Grammar("regex", "long"))
        assert await refusal(checks, "bad") == "it is bad"
        assert await refusal(checks, "bad long") == "it is bad"
    assert sorted(quick.checked) == ["a", "bad", "bad long", "long"]
    assert sorted(long.checked) == ["bad long", "long"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [("a", None), ("bad", "it is bad"), ("long", None), ("bad long", "it is bad")],
)
async def test_requests_with_one_grammar_wait_for_one_check(checks, workers, spec, message) -> None:
    """They take one place in a queue, however many they are."""
    quick, long = workers
    long.go.set()
    same = [Grammar("regex", spec)] * 20 * MAX_WAITING_LONG
    results = await asyncio.gather(*map(checks.check, same), return_exceptions=True)
    assert [getattr(result, "message", result) for result in results] == [message] * len(same)
    assert len({id(result) for result in results if result}) == (len(same) if message else 0)
    assert quick.checked == [spec]
    assert long.checked == [spec] * ("long" in spec)


async def test_a_check_goes_on_until_its_last_request_leaves(checks, workers) -> None:
    quick = workers[0]
    held = [asyncio.create_task(checks.check(Grammar("regex", "held"))) for _ in range(3)]
    await until(lambda: quick.checked)
    same = [asyncio.create_task(checks.check(Grammar("regex", "a"))) for _ in range(3)]
    other = [asyncio.create_task(checks.check(Grammar("regex", "b"))) for _ in range(2)]
    await until(lambda: checks._quick.num_waiting == 2)
    for task in (held[0], same[0], *other):
        task.cancel()
    await until(lambda: checks._quick.num_waiting == 1)
    again = asyncio.create_task(checks.check(Grammar("regex", "b")))
    await until(lambda: checks._quick.num_waiting == 2)
    quick.go.set()
    await asyncio.gather(*held[1:], *same[1:], again)
    assert all(task.cancelled() for task in (held[0], same[0], *other))
    assert quick.checked == ["held", "a", "b"]
    assert not checks._in_flight


async def test_the_error_of_a_full_queue_reaches_every_request(checks, workers) -> None:
    quick, long = workers
    tasks = []
    for i in range(MAX_WAITING_LONG + 1):
        tasks.append(asyncio.create_task(checks.check(Grammar("regex", f"long held {i}"))))
    await until(lambda: checks._long.num_waiting == MAX_WAITING_LONG)
    same = [Grammar("regex", "long " + "x" * 1000)] * 3
    results = await asyncio.gather(*map(checks.check, same), return_exceptions=True)
    assert [type(result) for result in results] == [QueueFullError] * 3
    long.go.set()
    await asyncio.gather(*tasks)
    await checks.check(same[0])  # nothing is remembered
    assert quick.checked.count(same[0].spec) == 1, "except that it is not quick"


async def test_the_grammars_used_last_are_remembered(checks, workers) -> None:
    first = Grammar("regex", "a")
    await checks.check(first)
    for i in range(NUM_KEPT - 1):
        await checks.check(Grammar("regex", f"b{i}"))
        await refusal(checks, f"bad{i}")
    await checks.check(first)
    await checks.check(Grammar("regex", "c"))  # drops b0
    await checks.check(first)
    await checks.check(Grammar("regex", "b0"))
    assert workers[0].checked.count("a") == 1
    assert workers[0].checked.count("b0") == 2
    assert workers[0].checked.count("bad0") == 1


async def test_long_checks_delay_no_quick_one_and_few_wait(checks, workers) -> None:
    long = workers[1]
    tasks = [
        asyncio.create_task(checks.check(Grammar("regex", f"long held {i}")))
        for i in range(MAX_WAITING_LONG + 3)
    ]
    await until(lambda: sum(task.done() for task in tasks) == 2)
    for task in tasks:
        if task.done():
            assert isinstance(task.exception(), QueueFullError)
    await checks.check(Grammar("regex", "a"))
    assert len(long.checked) == 1
    tasks[0].cancel()
    waiting = [task for task in tasks if not task.done()][-1]
    waiting.cancel()
    await asyncio.gather(tasks[0], waiting, return_exceptions=True)
    long.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    # A check that had begun ends; one that was waiting never begins.
    assert len(long.checked) == MAX_WAITING_LONG
    assert await refusal(checks, "bad long") == "it is bad"


async def test_a_short_grammar_goes_before_longer_ones(checks, workers) -> None:
    quick = workers[0]
    tasks = [asyncio.create_task(checks.check(Grammar("regex", "held")))]
    await until(lambda: quick.checked)
    specs = ["x" * 2000 + str(i) for i in range(5)] + ["a"]
    tasks += [asyncio.create_task(checks.check(Grammar("regex", spec))) for spec in specs]
    await until(lambda: checks._quick.num_waiting == len(specs))
    quick.go.set()
    await asyncio.gather(*tasks)
    assert quick.checked == ["held", "a", *specs[:-1]]


async def test_expensive_grammars_are_refused_and_remembered() -> None:
    """Without fakes: the check takes its time once, in two steps."""
    checks = GrammarChecks(TOKENIZER, VOCAB)
    bomb = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 8_000_009}))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="takes too much time or memory"):
            await checks.check(bomb)
    await checks.check(Grammar("regex", "[0-9]+y"))


async def test_json_without_a_schema_needs_no_process(monkeypatch) -> None:
    def start():
        raise OSError("no process")

    monkeypatch.setattr(grammar_worker, "_start", start)
    checks = GrammarChecks(TOKENIZER, VOCAB)
    await checks.check(Grammar("json_object"))
    with pytest.raises(OSError, match="no process"):
        await checks.check(Grammar("choice", '["a"]'))
