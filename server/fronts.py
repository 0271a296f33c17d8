"""The front processes of a server: starts them, hands them connections, and restarts them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence

import msgspec
import zmq.asyncio

from jaxserve.client.recovery import Restarts
from jaxserve.errors import JaxserveError
from jaxserve.ipc.control import Aborted, AbortRequests, FrontUp, Stop, ToFront
from jaxserve.program.stops import Haste
from server.acceptor import Acceptor
from server.front_process import FrontProcess, FrontSilence
from server.launch import FrontLaunch

logger = logging.getLogger(__name__)


class Fronts:
    """The fronts of a server. Each has an index that it keeps over restarts.

    Args:
      count: the number of fronts.
      listeners: the sockets that listen.
      launch: returns the settings of a new process, from its index and its reader number.
      on_begin: called with the reader number of each new process. Returns what it must be told
        first; `send` reaches it from then on.
      on_end: called with each process that has ended, at least once.
      max_restarts: the most restarts of a front in a row.
      silence: how long a front may send nothing.

    Attributes:
      gone: set, with the reason, when no front is left and none will be restarted.
    """

    def __init__(
        self,
        count: int,
        listeners: Sequence[socket.socket],
        *,
        launch: Callable[[int, int], FrontLaunch],
        on_begin: Callable[[int], Sequence[ToFront]],
        on_end: Callable[[FrontProcess], None],
        max_restarts: int,
        silence: FrontSilence | None = None,
    ) -> None:
        """Starts the processes. Needs a running event loop."""
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[JaxserveError] = loop.create_future()
        self._count = count
        self._launch = launch
        self._fingerprint = ""  # of the files that the first fronts have read
        self._on_begin = on_begin
        self._on_end = on_end
        self._max_restarts = max_restarts
        self._silence = silence or FrontSilence()
        self._context = zmq.asyncio.Context()
        self._readers = itertools.count(1)
        self._last_index = -1  # of the front that got the last connection
        self._num_retired = 0
        self._stopping: asyncio.Future[None] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._fronts: list[FrontProcess] = []
        self._acceptor = Acceptor(listeners, self)

    async def start(self) -> FrontUp:
        """Starts all fronts; returns the facts about them once all can serve.

        Raises:
          JaxserveError: a front cannot start.
        """
        for index in range(self._count):
            self._fronts.append(self._new_front(index))
            await asyncio.sleep(0)  # signals act between the starts of many processes
        ups = [front.up for front in self._fronts]
        await asyncio.wait(ups, return_when=asyncio.FIRST_EXCEPTION)
        up = [each.result() for each in ups if each.done()][0]
        self._fingerprint = up.fingerprint
        for index in range(len(self._fronts)):
            task = asyncio.create_task(self._keep_running(index))
            task.add_done_callback(self._on_supervision_ended)
            self._tasks.append(task)
        return up

    def send(self, message_for: Callable[[int], ToFront]) -> None:
        """Sends a message to every front; ``message_for`` returns it for a reader number."""
        for front in self._fronts:
            front.send(message_for(front.launch.reader))

    def stop(self, haste: Haste) -> None:
        """Tells all fronts to stop. None is restarted from now on. Can be called again."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        self.send(lambda _: Stop(haste))

    async def ended(self) -> None:
        """Waits until all fronts have ended, after `stop`."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Closes the listeners, kills what is left of the fronts, and removes the sockets."""
        self._acceptor.close()
        for task in (*self._tasks, *self._aborts):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._aborts, return_exceptions=True)
        for connections in await asyncio.gather(*(front.remove() for front in self._fronts)):
            for connection in connections:
                connection.close()
        for front in self._fronts:
            self._on_end(front)
        self._context.destroy(linger=0)

    def _new_front(self, index: int) -> FrontProcess:
        """Starts a process. Raises JaxserveError if the system has no resources for it."""
        reader = next(self._readers)
        launch = msgspec.structs.replace(self._launch(index, reader), fingerprint=self._fingerprint)
        try:
            front = FrontProcess(launch, self._context, self._silence, on_abort=self._pass_on)
        except OSError as error:
            raise JaxserveError(
                f"the process of front {index} cannot be started: {error}"
            ) from error
        for message in self._on_begin(reader):
            front.send(message)
        return front

    async def _keep_running(self, index: int) -> None:
        """Restarts a front whenever it ends, until its restarts are used up or all have to stop."""
        restarts = Restarts(self._max_restarts)
        error, served_s = await self._until_end(self._fronts[index])
        while not self._stopping.done():
            delay_s = restarts.next_delay_s(served_s)
            if delay_s is None:
                break
            logger.error("%s; %s in %.0f s", error, restarts.describe(), delay_s)
            await asyncio.wait([self._stopping], timeout=delay_s)
            if self._stopping.done():
                return
            try:
                self._fronts[index] = self._new_front(index)
            except JaxserveError as failure:
                error, served_s = failure, 0.0
            else:
                error, served_s = await self._until_end(self._fronts[index])
        if self._stopping.done():
            return
        logger.error("%s; the restarts of front %d are used up", error, index)
        self._num_retired += 1
        if self._num_retired == len(self._fronts):
            self.gone.set_result(JaxserveError(f"no front is left; the last one: {error}"))

    async def _until_end(self, front: FrontProcess) -> tuple[JaxserveError, float]:
        """Waits until a front has ended and its process is gone.

        Returns the reason, and how many seconds the front had served.
        """
        error = await asyncio.shield(front.ended)
        served_s = front.served_s
        untaken = await front.remove()
        self._on_end(front)
        self._acceptor.hand_over(untaken)
        return error, served_s

    def _on_supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Gives up all fronts after a defect: nobody would restart them any more."""
        if not task.cancelled() and task.exception() is not None and not self.gone.done():
            logger.error("the supervision of a front failed", exc_info=task.exception())
            error = f"the supervision of a front failed: {task.exception()}"
            self.gone.set_result(JaxserveError(error))

    @property
    def can_take(self) -> bool:
        """See `Takers.can_take`."""
        return any(front.takes_connections for front in self._fronts)

    def hand(self, connection: socket.socket) -> bool:
        """See `Takers.hand`.

        Fronts that can serve come before those that are starting. Of these, the ones that have the
        fewest connections to take have turns: a front that stands still gets only one.
        """
        able = [front for front in self._fronts if front.takes_connections]
        able = [front for front in able if front.serves] or able
        if not able:
            return False
        fewest = min(front.connections.num_untaken for front in able)
        tied = [front for front in able if front.connections.num_untaken == fewest]
        after = [front for front in tied if front.launch.index > self._last_index]
        front = (after or tied)[0]
        self._last_index = front.launch.index
        return front.connections.send(connection)

    def _pass_on(self, origin: FrontProcess, message: AbortRequests) -> None:
        """Aborts requests in all other fronts, and tells ``origin`` how many there were."""
        others = [front for front in self._fronts if front is not origin and front.serves]

        async def abort() -> None:
            counts = await asyncio.gather(*(f.aborts.abort(message.request_id) for f in others))
            origin.send(Aborted(message.call, sum(counts)))

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
