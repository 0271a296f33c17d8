"""Decides what the next step runs, and turns its result into outputs."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from jaxserve.core.block_pool import BlockPool
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.draft_planner import DraftPlanner
from jaxserve.core.kv_cache_manager import KVCacheManager
from jaxserve.core.outputs import add_pooled, add_prompt_logprobs, failures, sampled_output
from jaxserve.core.plan import Constraint, StepPlan, StepResult, TableUpdate
from jaxserve.core.policy import policy_named
from jaxserve.core.request import Request, Status, check_length
from jaxserve.core.speculation import Speculation
from jaxserve.core.step_draft import StepDraft
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import RequestOutput, StepStats, Submit, TokenLogprobs


class Scheduler:
    """Queues requests, plans steps and applies their results.

    `schedule` may be called again before the result of the previous step is known. It then plans
    for tokens that only the device knows. If a request turns out to have ended while its next step
    is in flight, the token of that step is dropped. The row and the blocks of the ended request may
    be reused at once: any later step runs after the step in flight.

    Args:
      max_num_seqs: the most requests that run at the same time; the number of rows.
      max_num_batched_tokens: the most tokens in one step; at least ``max_num_seqs``, so that every
        running request with one token to compute is in every step.
      max_model_len: the most tokens of one request, prompt and output together. A request of this
        length fits the KV cache.
      num_blocks, block_size: the KV cache; block 0 is never used.
      windows: the window of each group of layers in the KV cache; see `CacheGroups`.
      policy: a name in `policy.POLICIES`.
      speculation: how requests get draft tokens; None: they get none.

    Raises:
      ConfigError: the policy is unknown.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        policy: str = "fcfs",
        speculation: Speculation | None = None,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs >= 1
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        max_drafts = 0 if speculation is None else speculation.max_drafts
        groups = CacheGroups(windows, block_size, max_num_batched_tokens, max_drafts)
        assert groups.most_blocks(max_model_len) < num_blocks, "the context exceeds the KV cache"
        self._kv = KVCacheManager(BlockPool(num_blocks), groups)
        self._key = policy_named(policy)
        self._drafts = DraftPlanner(speculation)
        self._speculates = speculation is not None
        # Both lists are sorted by the key of the policy. They rarely hold more than a few thousand
        # requests, and moving that many pointers takes a microsecond, so a list beats a heap.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._num_rows = max_num_seqs
        self._free_rows = list(range(max_num_seqs))
        # Step ID -> the requests of the plan, aligned with `StepPlan.scheduled`.
        self._in_flight: dict[int, Sequence[Request]] = {}
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._total_steps = self._total_preemptions = self._total_corrupted = 0
        self._total_prompt_tokens = self._total_generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The IDs of the waiting and the running requests."""
        return tuple(self._requests)

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The IDs of the running requests."""
        return tuple(request.id for request in self._running)

    def stats(self) -> StepStats:
        """Returns counts of requests, blocks and tokens. `EngineCore.stats` adds the rest."""
        return StepStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._kv.usage,
            total_steps=self._total_steps,
            total_preemptions=self._total_preemptions,
            total_prompt_tokens=self._total_prompt_tokens,
            total_generation_tokens=self._total_generation_tokens,
            total_drafts=self._drafts.total_drafts,
            total_draft_tokens=self._drafts.total_draft_tokens,
            accepted_per_position=tuple(self._drafts.accepted_per_position),
            total_corrupted=self._total_corrupted,
        )

    def add(self, submit: Submit, constraint: Constraint | None = None) -> None:
        """Queues a request, whose output obeys ``constraint`` if there is one.

        Raises:
          InvalidRequestError: the ID is in use, or the request can never run to its end.
        """
        if submit.request_id in self._requests:
            raise InvalidRequestError(
                f"request ID {submit.request_id!r} is in use by another request", param="request_id"
            )
        num_prompt_tokens = len(submit.prompt_token_ids) - submit.num_prior_tokens
        check_length(
            num_prompt_tokens, submit.params.most_tokens, max_model_len=self._max_model_len
        )
        request = Request.from_submit(
            submit,
            order=next(self._arrivals),
            context_length=self._max_model_len,
            constraint=constraint,
            speculates=self._speculates,
        )
        if len(request.token_ids) >= request.max_num_tokens:
            raise InvalidRequestError(
                f"the request already has all of its {request.max_num_tokens - num_prompt_tokens} "
                "tokens of output",
                param="max_tokens",
            )
        self._requests[request.id] = request
        insort(self._waiting, request, key=self._key)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests without output and frees their rows and blocks. Ignores unknown IDs."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request)
        self._drop_ended_from_running()

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step, or returns None if no request can run now.

        ``now`` is in seconds, on the clock of ``arrival_s``.
        """
        draft = StepDraft(self._max_num_batched_tokens)
        preempted = self._schedule_running(draft)
        # Blocks freed by preemption are for the running requests, not for new ones.
        if not preempted:
            self._admit(draft, now)
        if draft.is_empty:
            return None
        step_id = next(self._step_ids)
        plan, self._in_flight[step_id] = draft.finish(step_id)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Applies the result of a step. Call it once per plan, in the order of the steps.

        Returns one output for each request that sampled and has not ended. A pooling request has
        one output, with its vector and without tokens. A request whose numbers are not finite ends
        with an output of its own.
        """
        drafted = list(zip(self._in_flight.pop(plan.step_id), plan.scheduled, strict=True))
        add_prompt_logprobs(drafted, result)
        add_pooled(drafted, result)
        sampling = [pair for pair in drafted if pair[1].samples]
        assert len(sampling) == len(result.token_ids)
        logprobs = result.logprobs or [None] * len(sampling)
        num_drafts = result.num_drafts or [0] * len(sampling)
        outputs: list[RequestOutput] = []
        for (request, scheduled), token_ids, entries, proposed in zip(
            sampling, result.token_ids, logprobs, num_drafts, strict=True
        ):
            if request.status is Status.FINISHED or not token_ids:
                continue
            request.settle(scheduled.num_rows, len(token_ids))
            if scheduled.num_drafts:
                self._drafts.add(request, scheduled, proposed, len(token_ids) - 1)
            outputs.append(self._finish_output(request, token_ids, entries))
        for request, output in failures(drafted, result):
            self._end(request)
            self._total_corrupted += 1
            outputs.append(output)
        self._drop_ended_from_running()
        self._total_steps += 1
        self._total_generation_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def check_integrity(self) -> None:
        """Asserts the invariants of rows, blocks and lists. For tests: visits every request."""
        for requests in (self._waiting, self._running):
            assert requests == sorted(requests, key=self._key), "requests are out of order"
        assert all(r.status is Status.WAITING and r.row is None for r in self._waiting)
        assert all(r.status is Status.RUNNING for r in self._running)
        assert {r.id for r in self._waiting + self._running} == self._requests.keys()
        assert not any(r.block_tables for r in self._waiting), "a waiting request holds blocks"
        rows = [r.row for r in self._running if r.row is not None]
        assert len(rows) == len(self._running), "a running request has no row"
        assert sorted(rows + self._free_rows) == list(range(self._num_rows))
        self._kv.check_integrity(self._running)

    def _finish_output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Applies sampled tokens to a request, and ends it if it is complete."""
        if request.num_output_tokens == 0:
            self._total_prompt_tokens += request.num_prompt_tokens
        output = sampled_output(request, token_ids, logprobs)
        if output.finish_reason is not None:
            self._end(request)
        return output

    def _schedule_running(self, draft: StepDraft) -> bool:
        """Adds the running requests to the step; returns whether one was preempted.

        Requests with one token to compute go first; each runs in every step, unless it is preempted
        or the tokens in flight may reach its length limit. Unfinished prompts share the rest of the
        budget; their blocks were allocated at admission, and move on with the window in windowed
        groups.
        """
        total_preemptions = self._total_preemptions
        num_drafts = self._drafts.plan(
            self._running,
            num_new_rows=min(len(self._waiting), len(self._free_rows)),
            budget=draft.budget,
        )
        drafting: list[tuple[Request, Sequence[TableUpdate]]] = []
        # Preemption removes requests from the end of `_running` during this loop: first those after
        # this request, then this request itself.
        for request in self._running:
            if request.num_tokens - request.num_computed_tokens != 1 or request.may_end:
                continue
            updates = self._allocate_or_preempt(request)
            if updates is None:
                continue
            if request.id in num_drafts:
                drafting.append((request, updates))
            else:
                draft.add_last_token(request, 0, updates)
        # Drafts get the blocks that are left, so that they preempt no request.
        for request, updates in drafting:
            count = num_drafts[request.id]
            more = self._kv.allocate(request, request.num_tokens + count)
            if more is None:
                draft.add_last_token(request, 0, updates)
            else:
                draft.add_last_token(request, count, [*updates, *more])
        for request in self._running:
            if draft.budget == 0:
                break
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                updates = self._kv.allocate(request, request.num_tokens)
                assert updates is not None, "an admitted prompt lacks a block"
                draft.add(request, min(num_tokens, draft.budget), updates)
        return self._total_preemptions > total_preemptions

    def _allocate_or_preempt(self, request: Request) -> Sequence[TableUpdate] | None:
        """Allocates blocks for all tokens of a running request, preempting others if necessary.

        Returns the changes of its block tables, or None if the request itself was preempted.
        """
        while (updates := self._kv.allocate(request, request.num_tokens)) is None:
            victim = self._running.pop()
            self._release(victim)
            victim.status = Status.WAITING
            victim.num_computed_tokens = 0
            insort(self._waiting, victim, key=self._key)
            self._total_preemptions += 1
            if victim is request:
                return None
        return updates

    def _admit(self, draft: StepDraft, now: float) -> None:
        """Admits waiting requests to the step, in order, while tokens, rows and blocks are left."""
        while self._waiting and self._free_rows and draft.budget > 0:
            request = self._waiting[0]
            if request.num_unknown_tokens > 0:
                # Preempted while its last token is in flight. The token is an input of the next
                # prefill, so it must be known first.
                return
            # Allocates all blocks that the prompt will hold at once. With fewer, running requests
            # could take the blocks that the rest of the prompt needs, and preempt it halfway.
            updates = self._kv.allocate(request, request.num_tokens)
            if updates is None:
                return
            del self._waiting[0]
            insort(self._running, request, key=self._key)
            request.status = Status.RUNNING
            request.row = heapq.heappop(self._free_rows)
            if request.scheduled_s is None:
                request.scheduled_s = now
            draft.add(request, min(request.num_tokens, draft.budget), updates, is_new=True)

    def _end(self, request: Request) -> None:
        """Ends a request. A running one stays in `_running` until `_drop_ended_from_running`."""
        if request.status is Status.WAITING:
            index = bisect_left(self._waiting, self._key(request), key=self._key)
            assert self._waiting[index] is request
            del self._waiting[index]
        else:
            self._release(request)
        request.status = Status.FINISHED
        del self._requests[request.id]

    def _release(self, request: Request) -> None:
        """Frees the row and the blocks of a running request."""
        assert request.row is not None
        heapq.heappush(self._free_rows, request.row)
        request.row = None
        self._kv.free(request)

    def _drop_ended_from_running(self) -> None:
        # Once per step: removing ended requests one by one would be quadratic.
        if any(request.status is Status.FINISHED for request in self._running):
            self._running = [r for r in self._running if r.status is Status.RUNNING]
