"""Preemption, and the priorities that decide who is preempted."""

from jaxserve.testing.scheduling import EOS, add, make_scheduler, parts, shape, update


class TestPreemption:
    def make_full_scheduler(self, **sizes):
        """Fills the 4 blocks with a and b, 8 tokens each. Both need a third block next."""
        scheduler = make_scheduler(num_blocks=4 + 1, **sizes)
        add(scheduler, "a", "b", num_prompt_tokens=8)
        update(scheduler, scheduler.schedule(0.0), a=20, b=30)
        return scheduler

    def test_preempts_the_last_request_and_keeps_its_tokens(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 8, 1, True)]
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.total_preemptions) == (1, 2, 1)
        update(scheduler, plan, a=EOS)
        plan = scheduler.schedule(1.0)
        assert shape(plan) == [("c", 0, 1, True), ("b", 0, 9, True)]
        b = parts(plan)["b"]
        assert b.token_ids == [*range(10, 18), 30]
        assert b.is_new
        assert b.row == 0, "rows are assigned again, in the order of admission"
        assert b.num_prompt_tokens == 8
        output = update(scheduler, plan)[-1]
        assert (output.request_id, output.scheduled_s) == ("b", 0.0)

    def test_a_preempted_request_goes_to_the_head_of_the_queue(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        update(scheduler, scheduler.schedule(0.0))
        # b needs 3 blocks and 1 is free, so c waits behind b although c would fit.
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True)]

    def test_preempts_the_request_of_lowest_priority(self):
        scheduler = make_scheduler(num_blocks=6 + 1, policy="priority")
        for request_id, priority, arrival_s in [("a", 5, 0.0), ("b", 0, 1.0), ("c", 5, 2.0)]:
            add(
                scheduler,
                request_id,
                num_prompt_tokens=8,
                priority=priority,
                arrival_s=arrival_s,
            )
        update(scheduler, scheduler.schedule(0.0))
        plan = scheduler.schedule(0.0)
        # c, the later of the two of lowest priority, makes room for the others.
        assert shape(plan) == [("b", 8, 1, True), ("a", 8, 1, True)]
        assert scheduler.stats().total_preemptions == 1

    def test_admits_nothing_in_a_step_that_preempts(self):
        scheduler = make_scheduler(num_blocks=4 + 1, policy="priority")
        add(scheduler, "a", num_prompt_tokens=8, priority=0)
        add(scheduler, "b", num_prompt_tokens=8, priority=2)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "c", num_prompt_tokens=1, priority=1)
        # a takes one of b's two blocks. The other would be enough for c, which goes before b.
        plan = scheduler.schedule(0.0)
        assert shape(plan) == [("a", 8, 1, True)]
        update(scheduler, plan)
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True), ("c", 0, 1, True)]

    def test_a_higher_priority_does_not_preempt_while_blocks_are_free(self):
        scheduler = make_scheduler(policy="priority")
        add(scheduler, "a", priority=5)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "b", priority=0)
        assert {p.request_id for p in scheduler.schedule(0.0).scheduled} == {"a", "b"}
        assert scheduler.stats().total_preemptions == 0

    def test_admits_higher_priorities_first(self):
        scheduler = make_scheduler(policy="priority", max_num_seqs=2)
        add(scheduler, "a", priority=1)
        add(scheduler, "b", priority=0, arrival_s=2.0)
        add(scheduler, "c", priority=0, arrival_s=1.0)
        assert [p.request_id for p in scheduler.schedule(0.0).scheduled] == ["c", "b"]

    def test_a_preempted_request_can_be_aborted(self):
        scheduler = self.make_full_scheduler()
        add(scheduler, "c", num_prompt_tokens=1)
        update(scheduler, scheduler.schedule(0.0))
        scheduler.abort(["b"])
        assert shape(scheduler.schedule(0.0)) == [("a", 9, 1, True), ("c", 0, 1, True)]
