"""One turn of the engine: schedule, run, update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from jaxserve.core.plan import Runner, StepHandle, StepPlan
from jaxserve.core.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError
from jaxserve.messages import FinishReason, RequestOutput, StepStats, Submit

logger = logging.getLogger(__name__)


class EngineCore:
    """Keeps up to ``depth`` steps of a scheduler under way on a runner.

    With depth 1 a step's tokens are taken in before the next step is planned. With depth 2 the
    next step is already on the device when they are, so the device does not wait for the host.

    One thread calls it. It has no clock: `step` is told the time.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, depth: int) -> None:
        assert depth in (1, 2), f"depth must be 1 or 2, got {depth}"
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._under_way: deque[tuple[StepPlan, StepHandle]] = deque()
        self._refused: list[RequestOutput] = []
        self._num_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._under_way or self._refused or self._scheduler.has_work)

    def add(self, submit: Submit) -> None:
        """Queues a request. One that cannot be served ends with an error in the next `step`.

        The front refuses such requests before they come here, with the reason.
        """
        try:
            self._scheduler.add(submit)
        except InvalidRequestError as error:
            logger.error("refused request %s: %s", submit.request_id, error)
            self._refused.append(
                RequestOutput(submit.request_id, [], finish_reason=FinishReason.ERROR)
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output. Unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def step(self, now: float) -> list[RequestOutput]:
        """Starts the next step if there is one, then waits for the oldest one if it must.

        It must when ``depth`` steps are under way or nothing more can be started. Otherwise it
        returns at once, so that the caller can add what has arrived before it steps again.

        Args:
          now: the time in seconds, of the clock that ``Submit.arrival_s`` is read from.

        Raises:
          Exception: whatever the runner raises. The engine cannot be used after that.
        """
        self._num_step_tokens = 0
        outputs: list[RequestOutput] = []
        plan = self._scheduler.schedule(now)
        if plan is not None:
            self._under_way.append((plan, self._runner.execute(plan)))
        elif not self._under_way:
            assert not self._scheduler.has_work, "there are requests and none of them can go on"
        if self._under_way and (plan is None or len(self._under_way) == self._depth):
            oldest, handle = self._under_way.popleft()
            outputs = self._scheduler.update(oldest, handle.result())
            self._num_step_tokens = oldest.num_tokens
        refused, self._refused = self._refused, []
        return refused + outputs

    def stats(self) -> StepStats:
        """The state after the last `step`. ``num_step_tokens`` is of the step that it waited for,
        and 0 if it waited for none.
        """
        return msgspec.structs.replace(
            self._scheduler.stats(),
            total_compilations=self._runner.num_compilations,
            num_step_tokens=self._num_step_tokens,
        )
