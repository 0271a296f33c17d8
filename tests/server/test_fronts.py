"""A server with two front processes (``--api-server-count 2``) and fake engines."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import httpx
import openai
import psutil
import pytest

from jaxserve.testing.api_client import COMPLETIONS
from jaxserve.testing.server_program import FAKE, TIMEOUT_S, ServerProgram, server_program
from jaxserve.testing.waiting import wait_until

MODEL = "fake:vocab=272,step_s=0.01"
BODY = {"prompt": "hello", "ignore_eos": True, "temperature": 0}
LONG = {**BODY, "max_tokens": 200}
ENDLESS = {**BODY, "max_tokens": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint):
    """A folder with a checkpoint that has the name of the fake model."""
    folder = tmp_path_factory.mktemp("fronts")
    make_front_checkpoint(folder / MODEL)
    return folder


@contextlib.contextmanager
def started(folder, *flags, factory=FAKE, **options) -> Iterator[ServerProgram]:
    """A server with two fronts. After the block it must end by itself and leave nothing."""
    flags = (MODEL, "--port", 0, *factory, "--api-server-count", 2, *flags)
    with server_program(*flags, cwd=folder, **options) as program:
        yield program
        if program.process.poll() is None:
            processes = program.processes()
            program.signal(signal.SIGTERM)
            assert program.wait() == 0, program.output
            _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
            assert not alive
        assert "Traceback" not in program.output


@pytest.fixture(scope="module")
def server(folder):
    with started(folder) as program:
        program.url  # noqa: B018 - waits until it is ready
        yield program


def processes(program, module) -> list[psutil.Process]:
    """Returns the children of a server that run a module, the oldest first."""
    children = psutil.Process(program.process.pid).children()
    return sorted((c for c in children if module in c.cmdline()), key=lambda c: c.create_time())


def fronts(program) -> list[psutil.Process]:
    return processes(program, "server.front")


def engines(program) -> list[psutil.Process]:
    return processes(program, "jaxserve.engine.process")


class Connection:
    """One connection to a server, and the front that serves it."""

    def __init__(self, program):
        self.client = httpx.Client(base_url=program.url, timeout=TIMEOUT_S)
        self.front = self._front(program)

    def _front(self, program) -> psutil.Process:
        with self.client.stream("GET", "/live") as reply:
            reply.read()
            port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
        (front,) = [
            front
            for front in fronts(program)
            if any(c.raddr and c.raddr.port == port for c in front.net_connections())
        ]
        return front

    def post(self, path, body):
        return self.client.post(path, json=body)

    def metric(self, name, **labels) -> float:
        return metric(self.client.get("/metrics").text, name, **labels)

    @contextlib.contextmanager
    def streaming(self, body):
        """Yields an iterator over the events of a stream, after the first one."""
        with self.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            first = next(events)
            yield text_of(first), events


def text_of(event) -> str:
    return json.loads(event)["choices"][0]["text"]


def rest_of(events) -> str:
    """Reads a stream to its end, and returns the text."""
    *chunks, done = events
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    return "".join(map(text_of, chunks))


def metric(page, name, **labels) -> float:
    found = [
        float(value)
        for text, value in re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
        if all(f'{label}="{expected}"' in text for label, expected in labels.items())
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


@contextlib.contextmanager
def one_connection_for_each_front(program) -> Iterator[list[Connection]]:
    """Yields connections to both fronts, that of the older front first."""
    with contextlib.ExitStack() as stack:
        found: dict[int, Connection] = {}
        while len(found) < 2:
            connection = Connection(program)
            stack.callback(connection.client.close)
            found.setdefault(connection.front.pid, connection)
        yield [found[front.pid] for front in fronts(program)]


def running(connection, number=None) -> float:
    """Returns how many requests the engines are running, together or one of them."""
    if number is not None:
        return connection.metric("num_requests_running", engine=number)
    return sum(
        metric(connection.client.get("/metrics").text, "num_requests_running", engine=engine)
        for engine in json.loads(connection.client.get("/server_info").text)["engines"]
    )


def test_streams_of_the_real_client_over_both_fronts(server) -> None:
    whole = httpx.post(server.url + COMPLETIONS, json=LONG, timeout=TIMEOUT_S)
    expected = whole.json()["choices"][0]["text"]

    def text(_: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="hello", max_tokens=200, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(text, range(16))) == {expected}
    with one_connection_for_each_front(server) as connections:
        for connection in connections:
            assert connection.post(COMPLETIONS, LONG).json()["choices"][0]["text"] == expected


def test_every_front_shows_the_counts_of_the_server(server) -> None:
    with one_connection_for_each_front(server) as (first, second):
        before = first.metric("generation_tokens_total")
        for connection in (first, second, first):
            connection.post(COMPLETIONS, {**BODY, "max_tokens": 5})
        for connection in (first, second):
            assert connection.metric("generation_tokens_total") == before + 15
        # The state of the engine may reach one front a little later than the other.
        wait_until(lambda: first.client.get("/metrics").text == second.client.get("/metrics").text)
        with first.streaming(ENDLESS):
            assert second.client.get("/load").json() == {"server_load": 1}
        wait_until(lambda: second.client.get("/load").json() == {"server_load": 0})


def test_server_info_shows_the_setting(server) -> None:
    assert httpx.get(f"{server.url}/server_info").json()["api_server_count"] == 2


def test_an_abort_reaches_the_requests_of_both_fronts(server) -> None:
    with (
        one_connection_for_each_front(server) as (first, second),
        one_connection_for_each_front(server) as (control, _),
        first.streaming({**ENDLESS, "request_id": "mine"}) as (_, events),
        second.streaming(ENDLESS) as (_, others),
    ):
        reply = control.post("/abort", {"request_id": "nobody"})
        assert reply.json() == {"aborted": 0}
        for connection in (control, control):
            reply = connection.post("/abort", {"request_id": "mine"})
            if reply.json() == {"aborted": 1}:
                break
        assert reply.json() == {"aborted": 1}
        assert '"finish_reason":"abort"' in list(events)[-2]
        assert control.post("/abort", {"abort_all": True}).json() == {"aborted": 1}
        assert '"finish_reason":"abort"' in list(others)[-2]


def test_a_dead_front_takes_only_its_own_connections(folder) -> None:
    with started(folder) as program:
        expected = httpx.post(program.url + COMPLETIONS, json=LONG, timeout=TIMEOUT_S)
        with (
            one_connection_for_each_front(program) as (dead, alive),
            one_connection_for_each_front(program) as (_, observer),
            alive.streaming(LONG) as (begin, events),
            dead.streaming(ENDLESS) as (_, lost),
        ):
            before = observer.metric("generation_tokens_total")
            dead.front.kill()
            with pytest.raises(httpx.TransportError):
                list(lost)
            assert begin + rest_of(events) == expected.json()["choices"][0]["text"]
            wait_until(lambda: running(observer) == 0)
            assert observer.metric("kv_cache_usage_perc") == 0
            assert observer.client.get("/load").json() == {"server_load": 0}
            assert observer.metric("generation_tokens_total") >= before
            program.wait_for(r"front 0 \(pid \d+\) was killed by SIGKILL.*restart 1 of")
            wait_until(lambda: len(fronts(program)) == 2)
            after = observer.metric("generation_tokens_total")
        # The new front serves, and continues the counts of the dead one.
        with one_connection_for_each_front(program) as (older, newer):
            assert older.front.pid == alive.front.pid
            reply = newer.post(COMPLETIONS, LONG)
            assert reply.json() | {"id": 0, "created": 0} == expected.json() | {
                "id": 0,
                "created": 0,
            }
            assert newer.metric("generation_tokens_total") == after + 200


def test_streams_of_both_fronts_survive_the_death_of_an_engine(folder) -> None:
    with started(folder, "--data-parallel-size", 2) as program:
        expected = httpx.post(program.url + COMPLETIONS, json=LONG, timeout=TIMEOUT_S)
        text = expected.json()["choices"][0]["text"]
        with contextlib.ExitStack() as stack:
            streams = []
            for _ in range(4):
                for connection in stack.enter_context(one_connection_for_each_front(program)):
                    streams.append(stack.enter_context(connection.streaming(LONG)))
            engines(program)[0].kill()
            for begin, events in streams:
                assert begin + rest_of(events) == text
        program.wait_for("restart 1 of")
        with one_connection_for_each_front(program) as connections:
            for connection in connections:
                wait_until(lambda c=connection: c.client.get("/health").status_code == 200)
                assert connection.metric("engine_restarts_total", engine=0) == 1
                assert connection.post(COMPLETIONS, LONG).json()["choices"][0]["text"] == text


def test_requests_go_to_the_engine_with_the_lowest_load_of_all_fronts(folder) -> None:
    with (
        started(folder, "--data-parallel-size", 2) as program,
        one_connection_for_each_front(program) as (observer, _),
        contextlib.ExitStack() as stack,
    ):
        for count in range(1, 5):
            # The second front learns from the engines what the first one has sent.
            for connection in stack.enter_context(one_connection_for_each_front(program)):
                stack.enter_context(connection.streaming(ENDLESS))
            wait_until(lambda n=2 * count: running(observer) == n)
            assert [running(observer, engine) for engine in (0, 1)] == [count, count]


def test_a_front_that_stands_still_gets_no_connections(folder) -> None:
    with (
        started(folder) as program,
        one_connection_for_each_front(program) as (stopped, _),
        ThreadPoolExecutor(40) as pool,
    ):
        url = f"{program.url}/live"
        stopped.front.suspend()
        replies: list[Future[httpx.Response]] = []
        # Those that the front gets before it is noticed have to wait for it.
        while not all(reply.done() for reply in replies[-12:]) or len(replies) < 12:
            assert len(replies) < 40
            replies.append(pool.submit(httpx.get, url, timeout=TIMEOUT_S))
            wait([replies[-1]], timeout=1)
        stopped.front.resume()
        assert {reply.result().status_code for reply in replies} == {200}


def test_the_connections_that_a_dead_front_has_not_taken_go_to_the_other(folder) -> None:
    with (
        started(folder) as program,
        one_connection_for_each_front(program) as (dead, _),
        ThreadPoolExecutor(4) as pool,
    ):
        url = f"{program.url}/live"
        dead.front.suspend()
        replies = [pool.submit(httpx.get, url, timeout=TIMEOUT_S) for _ in range(4)]
        wait_until(lambda: any(reply.done() for reply in replies))
        dead.front.kill()
        assert {reply.result().status_code for reply in replies} == {200}


@pytest.mark.parametrize("module", ["server.front", "jaxserve.engine.process"])
def test_a_server_without_fronts_or_engines_ends_with_an_error(folder, module) -> None:
    with started(folder, "--max-engine-restarts", 0) as program:
        program.url  # noqa: B018 - waits until it is ready
        for process in processes(program, module):
            process.kill()
        assert program.wait() == 1
        assert len(re.findall("^error: ", program.output, re.MULTILINE)) == 1


def test_keep_running_answers_errors_from_every_front(folder) -> None:
    with started(folder, "--max-engine-restarts", 0, "--keep-running") as program:
        program.url  # noqa: B018 - waits until it is ready
        engines(program)[0].kill()
        program.wait_for("used up")
        with one_connection_for_each_front(program) as connections:
            for connection in connections:
                wait_until(lambda c=connection: c.client.get("/health").status_code == 503)
                assert connection.post(COMPLETIONS, BODY).status_code == 503


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_front_that_hangs_does_not_delay_the_stop(folder, signals) -> None:
    with started(folder, "--shutdown-timeout", 0.1) as program:
        program.url  # noqa: B018 - waits until it is ready
        hanging, _ = fronts(program)
        hanging.suspend()
        program.signal(*signals)
        assert program.wait() == 0
        assert "hangs" not in program.output, "the stop took as long as a front may be silent"
        assert not hanging.is_running()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chat-template", "/no/file"), "/no/file"),
        (("--override-generation-config", '{"temperature": "hot"}'), "temperature"),
        (("--api-server-count", 0), "--api-server-count"),
    ],
)
def test_user_errors_end_the_start_with_one_message(folder, flags, words) -> None:
    with started(folder, *flags) as program:
        assert program.wait() == 1
        (line,) = re.findall("^error: .*", program.output, re.MULTILINE)
        assert words in line


def test_a_new_front_refuses_files_that_have_changed(tmp_path, make_front_checkpoint) -> None:
    make_front_checkpoint(tmp_path / MODEL)
    with started(tmp_path, "--max-engine-restarts", 1) as program:
        program.url  # noqa: B018 - waits until it is ready
        config = tmp_path / MODEL / "tokenizer_config.json"
        config.write_text(config.read_text() + "\n")
        dead, alive = fronts(program)
        dead.kill()
        program.wait_for("the files of the model have changed since the server started.*used up")
        assert fronts(program) == [alive]
        assert httpx.post(program.url + COMPLETIONS, json=BODY).status_code == 200
