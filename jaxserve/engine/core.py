"""The engine loop body: schedule a step, run it, apply its result.

One `EngineCore.step` with two steps in flight:

    Submit ──> Scheduler.add           with a grammar, only after the grammar is compiled
    Scheduler.schedule ──> StepPlan    which tokens of which requests, new blocks, rows
    Runner.execute(plan)               packs the plan, starts the forward pass, returns a handle
    result() of the previous step      waits for its sampled token IDs
    Scheduler.update ──> RequestOutput appends these tokens, ends requests, frees rows and blocks
    handle.sample()                    constrained plans only: the masks depend on these tokens

Sampled tokens stay on the device as the input of the next step. The host receives them one step
later, so the device does not wait for the host. With one step in flight
(``--no-async-scheduling``), the host waits for each step before it plans the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.core.plan import Constraint, Runner, Sizes, StepHandle, StepPlan
from jaxserve.core.scheduler import Scheduler
from jaxserve.core.speculation import Speculation, assumed_costs
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import Decision, FinishReason, Ready, RequestOutput, StepStats, Submit
from jaxserve.ipc.parameters import Parameter
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.compiling import Compile, CompilingRequests

logger = logging.getLogger(__name__)

CheckParams: TypeAlias = Callable[[SamplingParams], None]

IDLE_WAIT_S = 0.005
"""Seconds that `EngineCore.step` waits for a grammar to compile if it has nothing else to do."""


class EngineCore:
    """Runs the steps of a scheduler on a runner, one or two in flight.

    All methods must be called from one thread.

    Args:
      scheduler: plans the steps.
      runner: runs the steps.
      depth: the most steps in flight, 1 or 2.
      compile_grammar: compiles the constraint of a request with a grammar. If None, grammars are
        ignored.
      check_params: raises InvalidRequestError if the runner cannot run requests with these
        parameters. None: it can run all of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int,
        compile_grammar: Compile | None = None,
        check_params: CheckParams | None = None,
    ) -> None:
        assert depth in (1, 2), f"depth must be 1 or 2, got {depth}"
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._refused: list[RequestOutput] = []
        self._compiling = None if compile_grammar is None else CompilingRequests(compile_grammar)
        self._check_params = check_params
        self._num_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight or self._refused or self._scheduler.has_work or self._compiling)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The IDs of all requests that have not ended."""
        return (*self._scheduler.request_ids, *(self._compiling or ()))

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The IDs of the running requests."""
        return self._scheduler.running_ids

    def add(self, submit: Submit) -> None:
        """Queues a request. If it cannot be served, the next `step` ends it with an error.

        The front has validated the request with the same rules, so this is only a safeguard.
        """
        if submit.params.grammar is None or self._compiling is None:
            self._add(submit, None)
        elif submit.request_id in self._compiling:
            self.refuse(submit.request_id, "the request ID is in use by another request")
        else:
            self._compiling.add(submit)

    def refuse(self, request_id: str, reason: str) -> None:
        """Ends a request that was not queued: the next `step` returns an error with the reason."""
        logger.error("refused request %s: %s", request_id, reason)
        output = RequestOutput(request_id, [], finish_reason=FinishReason.ERROR, error=reason)
        self._refused.append(output)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output. Ignores unknown IDs."""
        ids = list(request_ids)
        self._scheduler.abort(ids)
        if self._compiling is not None:
            self._compiling.abort(ids)

    def step(self, now: float) -> list[RequestOutput]:
        """Starts the next step if there is one, then waits for the oldest step if necessary.

        It waits if ``depth`` steps are in flight or no other step can start. Otherwise it returns
        at once, so that the caller can add new requests before the next call.

        Args:
          now: the time in seconds, on the clock of ``Submit.arrival_s``.

        Returns:
          The outputs of the step that it waited for, and an error for each refused request.

        Raises:
          Exception: the runner failed. The engine cannot be used after that.
        """
        self._num_step_tokens = 0
        outputs: list[RequestOutput] = []
        if self._compiling:
            self._add_compiled(now)
        plan = self._scheduler.schedule(now)
        if plan is not None:
            self._in_flight.append((plan, self._runner.execute(plan)))
        elif not self._in_flight:
            assert not self._scheduler.has_work, "there are requests, and none of them can run"
            if self._compiling and not self._refused:
                self._compiling.wait(IDLE_WAIT_S)
        if len(self._in_flight) == 2:
            outputs = self._finish_oldest()
        if plan is not None and plan.is_constrained:
            # All earlier tokens are known now, and the forward pass of this step is running.
            self._in_flight[-1][1].sample()
        if self._in_flight and (plan is None or self._depth == 1):
            outputs = self._finish_oldest()
        refused, self._refused = self._refused, []
        return refused + outputs

    def _finish_oldest(self) -> list[RequestOutput]:
        plan, handle = self._in_flight.popleft()
        self._num_step_tokens = plan.num_tokens
        return self._scheduler.update(plan, handle.result())

    def _add_compiled(self, now: float) -> None:
        assert self._compiling is not None
        ready, failed = self._compiling.take(now)
        for submit, constraint in ready:
            self._add(submit, constraint)
        for request_id, reason in failed:
            self.refuse(request_id, reason)

    def _add(self, submit: Submit, constraint: Constraint | None) -> None:
        try:
            if self._check_params is not None:
                self._check_params(submit.params)
            self._scheduler.add(submit, constraint)
        except InvalidRequestError as error:
            self.refuse(submit.request_id, str(error))

    def stats(self) -> StepStats:
        """Returns the state after the last `step`.

        ``num_step_tokens`` counts the tokens of the step that `step` waited for; 0 if there was
        none.
        """
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + len(self._compiling or ()),
            total_compilations=self._runner.num_compilations,
            num_step_tokens=self._num_step_tokens,
        )


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The result of an engine factory: an engine ready to serve, and its resolved settings."""

    core: EngineCore
    ready: Ready


def assemble(
    config: EngineConfig,
    engine: int,
    runner: Runner,
    sizes: Sizes,
    *,
    vocab_size: int,
    hidden_size: int,
    decisions: list[Decision],
    compile_grammar: Compile | None = None,
    parameters: tuple[Parameter, ...] = (),
    check_params: CheckParams | None = None,
    step_costs: tuple[tuple[int, float], ...] = (),
    fingerprint: str = "",
) -> BuiltEngine:
    """Builds an engine from a runner. Every engine factory ends with this call.

    Args:
      config: gives the scheduling policy, the depth and the limit of log probabilities.
      engine: index of the engine among the replicas.
      runner: built for ``sizes``.
      sizes: the resolved sizes.
      vocab_size: token IDs are in ``[0, vocab_size)``.
      hidden_size: length of the vectors of pooling requests.
      decisions: the resolved settings with reasons, shown to the user.
      compile_grammar: see `EngineCore`.
      parameters: the parameters that `SamplingParams.extra_args` may have.
      check_params: see `EngineCore`.
      step_costs: see `Speculation`; assumed if empty.
      fingerprint: see `Ready`.

    Raises:
      ConfigError: the scheduling policy is unknown.
    """
    speculation = None
    if sizes.max_drafts:
        costs = step_costs or assumed_costs(sizes.max_num_rows)
        speculation = Speculation(sizes.max_drafts, costs)
        decisions = [*decisions, _speculation_decision(config, speculation)]
    scheduler = Scheduler(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        windows=sizes.windows,
        policy=config.scheduler.policy,
        speculation=speculation,
    )
    ready = Ready(
        engine=engine,
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        decisions=decisions,
        hidden_size=hidden_size,
        max_logprobs=config.logprobs.limit(vocab_size),
        parameters=parameters,
        fingerprint=fingerprint,
    )
    depth = 2 if config.scheduler.async_scheduling else 1
    core = EngineCore(
        scheduler, runner, depth=depth, compile_grammar=compile_grammar, check_params=check_params
    )
    return BuiltEngine(core, ready)


def _speculation_decision(config: EngineConfig, speculation: Speculation) -> Decision:
    (fewest, least), (most, longest) = speculation.step_costs[0], speculation.step_costs[-1]
    return Decision(
        "speculation",
        f"{config.speculation.speculative}, up to {speculation.max_drafts} drafts",
        f"a step of {most} rows takes {longest / least:.1f} times as long as one of {fewest}",
    )
