"""Who runs this step, and how many tokens of each.

Owns: the waiting and running requests, admission, block reservation, preemption, commit.
Must not know: torch, tensors, text, why a request ends, or where KV bytes are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from nano_oasis.memory.blocks import BlockManager, OutOfBlocks
from nano_oasis.request import Request, ScheduledRow, Status, StepPlan


class Gate(Protocol):
    """Where running requests keep their KV, if that is not simply the logical blocks' own place."""

    def admit(self, request: Request) -> bool:
        """Whether the request can run beside those that do; if so, it holds its place from now on."""

    def leave(self, request: Request) -> None: ...

    def policy_refusal(self, policy: str) -> str | None:
        """Why a request cannot have this miss policy; None if it can."""

    def refusal(self, request: Request) -> str | None:
        """Why the request could never run; None if it could."""


class DraftPolicy(Protocol):
    """How many draft tokens are worth computing; see draft_policy.py."""

    price: float  # after counts(): the chance of acceptance below which a draft token does not pay

    def counts(self, requests: Sequence[Request]) -> list[int]:
        """For each decoding request of the batch, the most it may have."""

    def record(self, requests: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None: ...


class Scheduler:
    """Continuous batching with one mixed batch per step: decodes first, then prefill chunks.

    First come, first served: `Request.id` grows with arrival, the oldest waiting request is admitted
    first and never overtaken, the youngest running one is preempted first. A preempted request keeps
    its id, so it is back at the head of the queue; its KV is recomputed (or found in the prefix cache).
    Follows Orca (iteration-level scheduling) and Sarathi-Serve (arXiv 2403.02310, chunked prefill).
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        gate: Gate | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        self.blocks = blocks
        self.gate = gate
        self.drafts = drafts
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: dict[int, Request] = {}
        self._waiting: list[tuple[int, Request]] = []  # heap; aborted ones are dropped when they surface
        self._num_waiting = 0
        self._blocked: tuple[int, int] | None = None  # (head id, free blocks) that did not fit
        self._query_tokens = self._hit_tokens = 0  # prefix cache, since last taken

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        heapq.heappush(self._waiting, (request.id, request))
        self._num_waiting += 1

    # --- planning -----------------------------------------------------------------------------
    def plan(self) -> StepPlan:
        """The next step's batch. Every row's blocks are reserved when this returns."""
        plan = StepPlan()
        budget = self.max_num_batched_tokens
        order = [self.running[i] for i in sorted(self.running)]
        for request in order:  # a token for every running stream, so prefill never freezes them
            if request.status is Status.RUNNING and request.is_decode and self._reserve(request, plan):
                plan.rows.append(ScheduledRow(request, request.num_computed, 1, samples=True))
                budget -= 1
        budget -= self._add_drafts(plan, budget)
        for request in order:
            if budget and request.status is Status.RUNNING and not request.is_decode:
                budget -= self._prefill(request, budget, plan)
        while budget and not plan.preempted and len(self.running) < self.max_num_seqs:
            admitted = self._admit()
            if admitted is None:
                break
            budget -= self._prefill(admitted, budget, plan)
        return plan

    def _prefill(self, request: Request, budget: int, plan: StepPlan) -> int:
        start, left = request.num_computed, request.num_tokens - request.num_computed
        count = min(left, budget)
        plan.rows.append(ScheduledRow(request, start, count, samples=count == left))
        return count

    def _reserve(self, request: Request, plan: StepPlan) -> bool:
        """A block for the newest token; the youngest running requests make room. False: it was itself."""
        missing = self.blocks.blocks_for(request.num_tokens) - len(request.block_table)
        while missing > self.blocks.num_free:
            victim = self.running[max(self.running)]
            self._preempt(victim, plan)
            if victim is request:
                return False
        if missing > 0:
            request.block_table += self.blocks.allocate(missing)
        return True

    def _add_drafts(self, plan: StepPlan, budget: int) -> int:
        """Places for draft tokens after the decodes, as far as there is room: nobody gives way to a guess.

        While prompts wait to be computed, drafts take no more than half of what the decodes leave.
        """
        if self.drafts is None or not plan.rows or plan.preempted:
            return 0
        if self._num_waiting or len(plan.rows) < len(self.running):
            budget //= 2
        taken, spare = 0, len(self.running)  # a block for every next decode stays free
        for i, count in enumerate(self.drafts.counts([r.request for r in plan.rows])):
            request = plan.rows[i].request
            # The step may yield one token more than it has drafts; none of them past the limit.
            count = min(count, budget - taken, request.max_len - request.num_tokens - 1)
            missing = self.blocks.blocks_for(request.num_tokens + max(count, 0)) - len(request.block_table)
            if missing > 0 and (self._num_waiting or missing + spare > self.blocks.num_free):
                count = min(count, len(request.block_table) * self.blocks.block_size - request.num_tokens)
                missing = 0  # as many as its newest block holds
            if count <= 0:
                continue
            if missing > 0:
                request.block_table += self.blocks.allocate(missing)
            plan.rows[i] = ScheduledRow(
                request, request.num_computed, 1, samples=True, max_drafts=count, price=self.drafts.price
            )
            taken += count
        return taken

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        self._leave(victim)
        victim.num_preemptions += 1
        plan.preempted.append(victim)
        self.add(victim)

    def _admit(self) -> Request | None:
        """Move the oldest waiting request to running if its whole prompt fits now."""
        request = self._head()
        if request is None or (self.running and self._blocked == (request.id, self.blocks.num_free)):
            return None
        tokens = request.tokens(0, request.num_tokens)
        # Prompt log-probabilities need every position computed, so they take no prefix from the cache.
        wants_all = request.params.prompt_logprobs is not None and not request.output_ids
        hit = [] if wants_all else self.blocks.lookup(tokens, request.salt)
        # One spare block per running request keeps their next decodes from preempting the newcomer.
        spare = len(self.running)
        need = self.blocks.blocks_for(len(tokens)) - len(hit)
        try:
            if self.running and need + spare > self.blocks.num_free:
                raise OutOfBlocks
            request.block_table = hit + self.blocks.allocate(need)
        except OutOfBlocks:
            self.blocks.release(hit)
            self._blocked = (request.id, self.blocks.num_free)
            return None
        request.num_hashed = len(hit)
        request.num_computed = len(hit) * self.blocks.block_size
        if self.gate is not None and not self.gate.admit(request):
            self._release(request)
            self._blocked = (request.id, self.blocks.num_free)
            return None
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self.running[request.id] = request
        request.status = Status.RUNNING
        if not request.num_preemptions:
            request.num_cached = request.num_computed
            self._query_tokens += len(request.prompt_ids)
            self._hit_tokens += request.num_cached
        return request

    def _head(self) -> Request | None:
        while self._waiting and self._waiting[0][1].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    # --- after the step -----------------------------------------------------------------------
    def commit(self, row: ScheduledRow, token: int | None) -> None:
        """The row's KV is written: publish the blocks it filled, append the token it drew."""
        self._computed(row.request, row.start + row.num_tokens - len(row.drafts))
        if token is not None:
            row.request.output_ids.append(token)

    def accept(self, request: Request, token: int) -> None:
        """The newest token was drafted rightly, so its KV is there too: append what followed it."""
        self._computed(request, request.num_computed + 1)
        request.output_ids.append(token)

    def give_back(self, request: Request) -> None:
        """Release the blocks that were reserved for drafts which proved wrong."""
        needed = self.blocks.blocks_for(request.num_tokens)
        if len(request.block_table) > needed:
            self.blocks.release(request.block_table[needed:])
            del request.block_table[needed:]

    def _computed(self, request: Request, count: int) -> None:
        request.num_computed = count
        # What sparse attention has touched is this request's own: others may have been promised exactness.
        exact = count if request.num_exact is None else min(count, request.num_exact)
        if exact // self.blocks.block_size > request.num_hashed:
            tokens = request.tokens(0, exact)
            request.num_hashed = self.blocks.publish(
                tokens, request.block_table, request.num_hashed, request.salt
            )

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state; its blocks are free (or cached) when this returns."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING:
            self._num_waiting -= 1  # its heap entry is dropped when it surfaces
        request.status = Status.FINISHED
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        if self.gate is not None:
            self.gate.leave(request)
        self._release(request)
        self._blocked = None

    def _release(self, request: Request) -> None:
        self.blocks.release(request.block_table)
        request.block_table = []
        request.num_computed = request.num_hashed = 0
        request.num_exact = None

    def take_hit_counts(self) -> tuple[int, int]:
        """(prompt tokens looked up, of these found cached) since the last call."""
        counts = self._query_tokens, self._hit_tokens
        self._query_tokens = self._hit_tokens = 0
        return counts

    def waiting_requests(self) -> list[Request]:
        return [r for _, r in sorted(self._waiting) if r.status is Status.WAITING]

    def check(self) -> None:
        """Raise AssertionError unless counts and tables agree (design invariants 1 and 4)."""
        self.blocks.check([r.block_table for r in self.running.values()])
        assert self._num_waiting == len(self.waiting_requests())
        assert all(not r.block_table for r in self.waiting_requests())
        for r in self.running.values():
            assert len(r.block_table) >= self.blocks.blocks_for(r.num_computed)
