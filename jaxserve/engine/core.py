"""One turn of the engine: schedule, run, update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from jaxserve.core.constraint import Constraint
from jaxserve.core.plan import Runner, StepHandle, StepPlan
from jaxserve.core.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import FinishReason, RequestOutput, StepStats, Submit
from jaxserve.structured_output.compiling import Compile, CompilingRequests

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005
"""How long a step that has nothing else to do waits for a grammar before it looks around."""


class EngineCore:
    """Keeps up to ``depth`` steps of a scheduler in flight on a runner.

    With depth 1 a step's tokens are taken in before the next step is planned. With depth 2 the
    next step is already on the device when they are, so the device does not wait for the host.

    One thread calls it. It has no clock: `step` is told the time.

    Args:
      scheduler, runner: what to run, and on what.
      depth: steps that may be in flight, 1 or 2.
      compile_grammar: makes the constraints of requests with a grammar; None: grammars are not
        obeyed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int,
        compile_grammar: Compile | None = None,
    ) -> None:
        assert depth in (1, 2), f"depth must be 1 or 2, got {depth}"
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._under_way: deque[tuple[StepPlan, StepHandle]] = deque()
        self._refused: list[RequestOutput] = []
        self._compiling = None if compile_grammar is None else CompilingRequests(compile_grammar)
        self._num_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._under_way or self._refused or self._scheduler.has_work or self._compiling)

    def add(self, submit: Submit) -> None:
        """Queues a request. One that cannot be served ends with an error in the next `step`.

        The front refuses such requests before they come here, with the reason.
        """
        if submit.params.grammar is None or self._compiling is None:
            self._admit(submit, None)
        elif submit.request_id in self._compiling:
            self._refuse(submit.request_id, "the id is in use by another request")
        else:
            self._compiling.add(submit)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output. Unknown ids are ignored."""
        ids = list(request_ids)
        self._scheduler.abort(ids)
        if self._compiling is not None:
            self._compiling.abort(ids)

    def step(self, now: float) -> list[RequestOutput]:
        """Starts the next step if there is one, then waits for the oldest one if it must.

        It must when ``depth`` steps are in flight or nothing more can be started. Otherwise it
        returns at once, so that the caller can add what has arrived before it steps again.

        Args:
          now: the time in seconds, of the clock that ``Submit.arrival_s`` is read from.

        Raises:
          Exception: whatever the runner raises. The engine cannot be used after that.
        """
        self._num_step_tokens = 0
        outputs: list[RequestOutput] = []
        if self._compiling:
            self._admit_compiled(now)
        plan = self._scheduler.schedule(now)
        if plan is not None:
            self._under_way.append((plan, self._runner.execute(plan)))
        elif not self._under_way:
            assert not self._scheduler.has_work, "there are requests and none of them can go on"
            if self._compiling and not self._refused:
                self._compiling.wait(IDLE_WAIT_S)
        if len(self._under_way) == 2:
            outputs = self._finish_oldest()
        if plan is not None and plan.is_constrained:
            # All tokens before this step's are known now, and its forward pass is in flight.
            self._under_way[-1][1].sample()
        if self._under_way and (plan is None or self._depth == 1):
            outputs = self._finish_oldest()
        refused, self._refused = self._refused, []
        return refused + outputs

    def _finish_oldest(self) -> list[RequestOutput]:
        plan, handle = self._under_way.popleft()
        self._num_step_tokens = plan.num_tokens
        return self._scheduler.update(plan, handle.result())

    def _admit_compiled(self, now: float) -> None:
        assert self._compiling is not None
        ready, failed = self._compiling.take(now)
        for submit, constraint in ready:
            self._admit(submit, constraint)
        for request_id in failed:
            self._refuse(request_id, "its grammar cannot be compiled")

    def _admit(self, submit: Submit, constraint: Constraint | None) -> None:
        try:
            self._scheduler.add(submit, constraint)
        except InvalidRequestError as error:
            self._refuse(submit.request_id, str(error))

    def _refuse(self, request_id: str, why: str) -> None:
        logger.error("refused request %s: %s", request_id, why)
        self._refused.append(RequestOutput(request_id, [], finish_reason=FinishReason.ERROR))

    def stats(self) -> StepStats:
        """The state after the last `step`. ``num_step_tokens`` is of the step that it waited for,
        and 0 if it waited for none.
        """
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + len(self._compiling or ()),
            total_compilations=self._runner.num_compilations,
            num_step_tokens=self._num_step_tokens,
        )
