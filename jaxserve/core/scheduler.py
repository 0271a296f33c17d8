"""What the next step runs, and what becomes of its results."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from jaxserve.core.block_pool import BlockPool
from jaxserve.core.constraint import Constraint
from jaxserve.core.kv_cache_manager import KVCacheManager
from jaxserve.core.limits import check_length, context_length
from jaxserve.core.plan import StepPlan, StepResult
from jaxserve.core.policy import POLICIES
from jaxserve.core.request import Request, Status
from jaxserve.core.step_draft import StepDraft
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, RequestOutput, StepStats, Submit


class Scheduler:
    """Requests in, plans out, results in, outputs out.

    `schedule` may be called again before the result of the step before is known. It then plans for
    tokens that only the device knows, and a request may turn out to have ended with a step of its
    own still in flight: that step's token is dropped when it arrives. Its row and blocks can be
    given out at once all the same, since the device runs steps in order.

    Args:
      max_num_seqs: requests that run at the same time, and rows.
      max_num_batched_tokens: tokens in one step; at least ``max_num_seqs``, so that every request
        that has only one token to compute gets it in every step.
      max_model_len: tokens of one request, prompt and answer together.
      num_blocks, block_size: the KV cache; block 0 is never used.
      policy: a name in `policy.POLICIES`.

    Raises:
      ConfigError: there is no such policy.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        policy: str = "fcfs",
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs >= 1
        if policy not in POLICIES:
            raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sizes = {
            "max_model_len": max_model_len,
            "num_blocks": num_blocks,
            "block_size": block_size,
        }
        self._kv = KVCacheManager(BlockPool(num_blocks), block_size)
        self._key = POLICIES[policy]
        # Both in the order of the policy. Rarely more than some thousands, and a list of so many
        # pointers is moved in a microsecond, so inserting into it beats cleverer structures.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs))
        self._under_way: dict[int, Sequence[Request]] = {}
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._total_steps = 0
        self._total_preemptions = 0
        self._total_prompt_tokens = 0
        self._total_generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    def stats(self) -> StepStats:
        """Counts of requests, blocks and tokens; what only the engine knows is left at 0."""
        return StepStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._kv.usage,
            total_steps=self._total_steps,
            total_preemptions=self._total_preemptions,
            total_prompt_tokens=self._total_prompt_tokens,
            total_generation_tokens=self._total_generation_tokens,
        )

    def add(self, submit: Submit, constraint: Constraint | None = None) -> None:
        """Queues a request whose output has to obey ``constraint``.

        Raises:
          InvalidRequestError: it can never run to its end, or its id is taken.
        """
        if submit.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {submit.request_id!r} is in use by another request", param="request_id"
            )
        num_prompt_tokens = len(submit.prompt_token_ids) - submit.num_prior_tokens
        check_length(num_prompt_tokens, submit.params.most_tokens, **self._sizes)
        request = Request.from_submit(
            submit,
            order=next(self._arrivals),
            context_length=context_length(**self._sizes),
            constraint=constraint,
        )
        if len(request.token_ids) >= request.max_num_tokens:
            raise InvalidRequestError(
                f"all of the {request.max_num_tokens - num_prompt_tokens} tokens that may be "
                "generated have been generated already",
                param="max_tokens",
            )
        self._requests[request.id] = request
        insort(self._waiting, request, key=self._key)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests without output and frees what they hold. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request)
        self._drop_ended_from_running()

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step, or returns None if there is nothing that could run now.

        ``now`` is in seconds, of the clock that ``arrival_s`` is read from.
        """
        draft = StepDraft(self._max_num_batched_tokens)
        preempted = self._schedule_running(draft)
        # What a preempted request gave back is for those that run, not for new ones.
        if not preempted:
            self._admit(draft, now)
        if draft.is_empty:
            return None
        step_id = next(self._step_ids)
        plan, self._under_way[step_id] = draft.finish(step_id)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Takes in the tokens that a step sampled; plans are updated in the order of their steps.

        Returns one output for each token of a request that is still alive, and for each request
        that wants no tokens but a vector and has it.
        """
        drafted = list(zip(self._under_way.pop(plan.step_id), plan.scheduled, strict=True))
        if result.prompt_logprobs:
            scoring = [pair for pair in drafted if pair[1].num_prompt_targets]
            for (request, part), entries in zip(scoring, result.prompt_logprobs, strict=True):
                request.add_prompt_logprobs(part.start, entries)
        if result.pooled:
            pooling = [pair for pair in drafted if pair[1].pools]
            for (request, part), vector in zip(pooling, result.pooled, strict=True):
                request.add_pooled(part.start, vector)
        requests = [request for request, part in drafted if part.samples]
        assert len(requests) == len(result.token_ids)
        outputs = []
        logprobs = result.logprobs or itertools.repeat(None)
        for request, token_id, token_logprobs in zip(
            requests, result.token_ids, logprobs, strict=False
        ):
            if request.status is Status.FINISHED:
                continue
            request.num_unknown_tokens -= 1
            if request.params.pooling is not None:
                outputs.append(self._finish_pooling(request))
                continue
            finish_reason, stop_reason = request.append(token_id)
            prompt_logprobs = None
            if request.num_output_tokens == 1:
                self._total_prompt_tokens += request.num_prompt_tokens
                prompt_logprobs = request.hand_over_prompt_logprobs()
            outputs.append(
                RequestOutput(
                    request_id=request.id,
                    token_ids=[token_id],
                    finish_reason=finish_reason,
                    stop_reason=stop_reason,
                    logprobs=None if token_logprobs is None else [token_logprobs],
                    scheduled_s=request.scheduled_s or 0.0,
                    prompt_logprobs=prompt_logprobs,
                )
            )
            if finish_reason is not None:
                self._end(request)
        self._drop_ended_from_running()
        self._total_steps += 1
        self._total_generation_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _finish_pooling(self, request: Request) -> RequestOutput:
        """The only output of a request whose prompt has been computed; its token is dropped."""
        self._total_prompt_tokens += request.num_prompt_tokens
        self._end(request)
        return RequestOutput(
            request_id=request.id,
            token_ids=[],
            finish_reason=FinishReason.STOP,
            scheduled_s=request.scheduled_s or 0.0,
            embedding=request.embedding(),
        )

    def _schedule_running(self, draft: StepDraft) -> bool:
        """Takes the running requests into the step; returns whether one had to be preempted.

        Those with one token to do go first, each of them in every step. Unfinished prompts share
        what is left of the budget; their blocks were allocated when they were admitted.
        """
        total_preemptions = self._total_preemptions
        # Preemption shortens the list from its end, behind the request at hand or with it.
        for request in self._running:
            if request.num_tokens - request.num_computed_tokens != 1 or _will_end(request):
                continue
            new_block_ids = self._allocate_or_preempt(request)
            if new_block_ids is not None:
                draft.add(request, 1, new_block_ids)
        for request in self._running:
            if draft.budget == 0:
                break
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                draft.add(request, min(num_tokens, draft.budget), ())
        return self._total_preemptions > total_preemptions

    def _allocate_or_preempt(self, request: Request) -> Sequence[int] | None:
        """Room for the tokens of a running request, or None if it was preempted itself."""
        while (new_block_ids := self._kv.allocate(request, request.num_tokens)) is None:
            victim = self._running.pop()
            self._give_up_place(victim)
            victim.status = Status.WAITING
            victim.num_computed_tokens = 0
            insort(self._waiting, victim, key=self._key)
            self._total_preemptions += 1
            if victim is request:
                return None
        return new_block_ids

    def _admit(self, draft: StepDraft, now: float) -> None:
        """Takes waiting requests into the step, in order, while budget, rows and blocks last."""
        while self._waiting and self._free_rows and draft.budget > 0:
            request = self._waiting[0]
            if request.num_unknown_tokens > 0:
                # Preempted with a token in flight, which must be known to be computed again.
                return
            # All of its blocks at once: were it let in with less, the requests that run could
            # take what its prompt still needs and throw it out half-way.
            new_block_ids = self._kv.allocate(request, request.num_tokens)
            if new_block_ids is None:
                return
            del self._waiting[0]
            insort(self._running, request, key=self._key)
            request.status = Status.RUNNING
            request.row = heapq.heappop(self._free_rows)
            if request.scheduled_s is None:
                request.scheduled_s = now
            draft.add(request, min(request.num_tokens, draft.budget), new_block_ids, is_new=True)

    def _end(self, request: Request) -> None:
        if request.status is Status.WAITING:
            index = bisect_left(self._waiting, self._key(request), key=self._key)
            assert self._waiting[index] is request
            del self._waiting[index]
        else:
            self._give_up_place(request)
        request.status = Status.FINISHED
        del self._requests[request.id]

    def _give_up_place(self, request: Request) -> None:
        assert request.row is not None
        heapq.heappush(self._free_rows, request.row)
        request.row = None
        self._kv.free(request)

    def _drop_ended_from_running(self) -> None:
        # Once a step for all of them: removing them one by one would be quadratic.
        if any(request.status is Status.FINISHED for request in self._running):
            self._running = [r for r in self._running if r.status is Status.RUNNING]


def _will_end(request: Request) -> bool:
    """Whether a token in flight is known to be the last one."""
    return request.num_tokens >= request.max_num_tokens
