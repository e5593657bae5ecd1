"""KV of the oasis mode: everything in the host tier, a bounded working set per request on the device.

Owns: which requests are on the device and how much each may hold, sealing, shrinking.
Must not know: how a layer picks its blocks (oasis_view.py), how bytes move (link.py), who runs when.

The life of a block:
  1. written token by token into slots of the request's tail        begin(), view.write
  2. sealed when full: copied to the host tier, sketched            end()
  3. from here on its device copies are a cache                     residency.py
  4. dropped from a layer when memory is needed elsewhere           make_room, trim
  5. wanted: a query against the sketches says so                   oasis_view.py
  6. fetched by a ticket while a step computes                      coordinator.py
  7. published when the copy is complete, read by later steps       flights.py
  8. found again by its hash in the host tier by other requests     blocks.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nano_oasis.config import EngineConfig, ModelConfig, format_bytes
from nano_oasis.kernels.dispatch import Kernels
from nano_oasis.memory.centroids import Centroids
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.flights import Flights
from nano_oasis.memory.host_tier import HostTier
from nano_oasis.memory.link_rate import admission_cap
from nano_oasis.memory.lookahead import Lookahead
from nano_oasis.memory.oasis_view import OasisView
from nano_oasis.memory.residency import EMPTY, FLYING, Residency, SlotPool
from nano_oasis.memory.sealing import seal_or_fail
from nano_oasis.memory.seat import OasisStats, Seat
from nano_oasis.memory.sketch_slabs import SketchSlabs
from nano_oasis.memory.stream import Stage
from nano_oasis.request import Request, ScheduledRow


@dataclass(eq=False)
class OasisKV:
    """slot_keys, slot_values: [S, B, Hg, D], the device tier."""

    config: ModelConfig
    options: EngineConfig
    kernels: Kernels
    host: HostTier
    slot_keys: torch.Tensor
    slot_values: torch.Tensor
    sketches: SketchSlabs
    coordinator: PrefetchCoordinator
    stage: Stage
    max_model_len: int
    step: int = field(init=False, default=0)  # of every pass, drafts' too
    passes: int = field(init=False, default=0)  # whose results count
    cap: int = field(init=False, default=1)
    failures: dict[int, str] = field(init=False, default_factory=dict)  # this step's, by request id
    stats: OasisStats = field(init=False, default_factory=OasisStats)
    seats: dict[int, Seat] = field(init=False, default_factory=dict)
    view: OasisView | None = field(init=False, default=None)  # of this step, or of its last draft pass

    def __post_init__(self) -> None:
        c, o = self.config, self.options
        self.block_size, self.groups = o.block_size, o.groups_of(c.num_kv_heads)
        self.planes = c.num_layers * self.groups
        self.forced = o.sink_blocks + o.recent_blocks
        self.pool = SlotPool(len(self.slot_keys))
        max_blocks = -(-self.max_model_len // self.block_size)
        self.residency = Residency(self.pool, self.planes, o.max_num_seqs, max_blocks, self.groups)
        # What one step's new tokens need before they can be sealed and dropped, whoever they belong to.
        chunk_blocks = -(-o.max_num_batched_tokens // self.block_size)
        self.reserve = self.planes * (chunk_blocks + 1)
        self.centroids: Centroids | None = None
        if o.miss_policy == "estimate":
            self.centroids = Centroids(self.host.num_blocks, c.num_layers, c.num_kv_heads, c.head_dim)
        self._generation = 0
        self._step_seconds, self._began = 0.0, time.monotonic()
        choosing = [i for i in range(c.num_layers) if c.window(i) is None]
        self.lookahead = Lookahead(o.predictor == "lookahead", choosing)
        # Blocks a request may hold beyond its sealed ones: the newest, and more that drafts reach into.
        self.tail_blocks = 1 + -(-o.most_drafts // self.block_size)
        self.flights = Flights(self.coordinator, self.residency, self.seats)

    # --- the scheduler's side: no torch in its answers ---------------------------------------------
    def admit(self, request: Request) -> bool:
        """Take a request onto the device if its floor fits beside the others'. Called once per admission."""
        if request.id in self.seats:
            return True
        budget, caps, floor = self._needs(request)
        held = sum(s.floor for s in self.seats.values())
        if held + floor + self.reserve > self.pool.num_slots or len(self.seats) >= self.options.max_num_seqs:
            return False
        self._generation += 1
        seat = Seat(request, self.residency.sit(), self._generation, budget, caps, floor)
        seat.sealed = request.num_computed // self.block_size  # a prefix found in the host tier
        seat.dense = seat.sealed == 0
        seat.lossless = (request.params.kv_mode or self.options.kv_mode) == "lossless"
        self.seats[request.id] = seat
        return True

    def leave(self, request: Request) -> None:
        """Finished, aborted or preempted: cancel its tickets, free its slots (those in flight follow)."""
        seat = self.seats.get(request.id)
        if seat is not None:
            request.kv_bytes = self.device_bytes(request), seat.sealed * self.host.bytes_per_block
            del self.seats[request.id]
            if not self.seats:  # nobody computes meanwhile, and nothing is left on its way
                self.flights.wait_for_all()
            self.coordinator.cancel(request.id)
            self.residency.leave(seat.index)

    def policy_refusal(self, policy: str) -> str | None:
        if policy == "estimate" and self.centroids is None:
            return "needs an engine started with miss_policy=estimate: only that keeps the blocks' means"
        if policy != "wait" and self.options.predictor == "current":
            return "the engine was started with predictor=current, which waits for every miss"
        return None

    def refusal(self, request: Request) -> str | None:
        """Why this request could not run even with nothing else on the device; None if it could."""
        if request.params.kv_mode == "lossless" and self.host.in_place(0) is None:
            return "lossless needs host_kv_format=auto: this engine's host tier holds rounded keys and values"
        _, _, floor = self._needs(request)
        if floor + self.reserve <= self.pool.num_slots:
            return None
        need = format_bytes((floor + self.reserve) * self.slot_bytes)
        have = format_bytes(self.pool.num_slots * self.slot_bytes)
        return f"a working set of this size needs {need} of device KV memory, and there are {have}"

    def _needs(self, request: Request) -> tuple[int, torch.Tensor, int]:
        most = -(-request.max_len // self.block_size)
        dense = request.params.kv_mode == "dense"
        tokens = request.max_len if dense else request.params.kv_budget or self.options.kv_budget
        caps = self._caps(tokens, most)
        return max(math.ceil(tokens / self.block_size), self.forced + 1), caps, int(caps.sum())

    def _caps(self, budget_tokens: int, most: int) -> torch.Tensor:
        """[layers] slots: the budget times the buffer factor; the window, or everything in dense layers."""
        o, c = self.options, self.config
        budget = max(math.ceil(budget_tokens / self.block_size * o.buffer_factor), self.forced + 1)
        budget += self.tail_blocks
        caps = []
        for layer in range(c.num_layers):
            window = c.window(layer)
            blocks = most if layer < o.dense_layers else budget
            if window is not None:
                # Not below what shrink() always keeps, or making room would try for ever.
                blocks = max(-(-window // self.block_size), self.forced) + 1 + self.tail_blocks
            caps.append(min(blocks, most + self.tail_blocks - 1) * self.groups)
        return torch.tensor(caps)

    # --- the runner's side -------------------------------------------------------------------------
    def begin(self, rows: Sequence[ScheduledRow]) -> OasisView:
        """Publish what has arrived, give this step's tokens their slots, hand out the view."""
        self._pace(len(rows))
        self.passes += 1
        return self._open(rows, drafting=False)

    def peek(self, rows: Sequence[ScheduledRow]) -> OasisView:
        """See KVStore: a pass before the step's own, over working sets, which waits for nothing."""
        return self._open(rows, drafting=True)

    def _open(self, rows: Sequence[ScheduledRow], drafting: bool) -> OasisView:
        if self.view is not None:
            self.view.close()  # of a draft, or of a step that failed half way
        self.step += 1
        self.flights.step = self.step
        self.flights.land()
        for row in rows:
            seat = self.seats[row.request.id]
            if seat.sealed and row.start == seat.sealed * self.block_size and not seat.dense:
                self._restore(seat)
            self._extend(seat, row)
        if any(not s.dense for s in self.seats.values()):
            self._share_pressure(rows)
        self.view = OasisView(self, rows, drafting)
        return self.view

    def _pace(self, rows: int) -> None:
        """Blocks a row may order per layer this step: as set, or what the link can bring in one step."""
        now = time.monotonic()
        self._step_seconds = 0.8 * self._step_seconds + 0.2 * (now - self._began)
        self._began = now
        if self.options.admission_cap is not None:
            self.cap = self.options.admission_cap
        else:
            bandwidth = self.coordinator.stats.bandwidth
            cap = admission_cap(self._step_seconds, bandwidth, self.slot_bytes, self.planes, rows)
            # The paper's best trade is near 5 % of the budget; more costs the step more than it gains.
            most = math.ceil(0.05 * self.options.kv_budget / self.block_size)
            self.cap = max(min(cap, most), 1)

    def _restore(self, seat: Seat) -> None:
        """A prefix found in the host tier comes back to the device whole, if there is room to spare."""
        need = self.planes * seat.sealed
        if self.residency.resident(seat.index) or need + self.reserve > self.pool.num_free:
            return
        self.residency.add(seat.index, range(seat.sealed), self.step)
        blocks = torch.tensor(seat.request.block_table[: seat.sealed])
        for plane in range(self.planes):
            layer, group = divmod(plane, self.groups)
            slots = self.residency.slot_of[plane, seat.index, : seat.sealed].long()
            self.host.load_into(layer, blocks, slots, self.slot_keys, self.slot_values, self.heads(group))
        seat.dense = True

    def heads(self, group: int) -> slice | None:
        size = self.config.num_kv_heads // self.groups
        return slice(group * size, (group + 1) * size) if self.groups > 1 else None

    def _extend(self, seat: Seat, row: ScheduledRow) -> None:
        """Slots for the blocks that this row begins to write."""
        first = -(-row.start // self.block_size)
        end = -(-(row.start + row.num_tokens) // self.block_size)
        while first < end and int(self.residency.slot_of[0, seat.index, first]) != EMPTY:
            first += 1  # this step is run again after a failure: its slots are there
        fresh = range(first, end)
        if not fresh:
            return
        self.make_room(self.planes * len(fresh))
        self.residency.add(seat.index, fresh, self.step)

    def _share_pressure(self, rows: Sequence[ScheduledRow]) -> None:
        """When memory is short it is short for all: whoever decodes keeps a working set."""
        for row in rows:
            seat = self.seats[row.request.id]
            decodes = row.start >= len(row.request.prompt_ids)
            if seat.dense and decodes and row.request.params.kv_mode != "dense" and self._excess(seat) > 0:
                self.shrink(seat)

    @property
    def spare(self) -> int:
        """Free slots beyond what the next step may need for new tokens: working sets may grow into these."""
        return self.pool.num_free - self.reserve

    def make_room(self, need: int) -> None:
        """Until `need` slots are free: trim working sets to their caps, then shrink dense requests.

        The one that holds most above its floor gives first. Floors and the reserve fit the pool together
        (admit), so this ends; slots of requests that have left come back with their tickets.
        """
        while self.pool.num_free < need:
            seats = [s for s in self.seats.values() if s.request.params.kv_mode != "dense"]
            over = [s for s in seats if s.dense or self._excess(s) > 0]
            free = self.pool.num_free
            if over:
                self.shrink(max(over, key=self._excess))
            if self.pool.num_free > free:
                continue
            if len(self.flights):  # what is on its way can be evicted once it is here
                self.flights.wait_for_all()
            else:
                return  # the pool's own error will say so

    def _excess(self, seat: Seat) -> int:
        """Slots of sealed blocks above the caps, some places of each cap being the unsealed blocks'."""
        table = self.residency.slot_of[:, seat.index, : seat.sealed]
        held = (table != EMPTY).sum(1).view(-1, self.groups).sum(1)  # [layers]
        return int((held - (seat.caps - self.tail_blocks * self.groups)).clamp(min=0).sum())

    def shrink(self, seat: Seat) -> None:
        """Down to its caps, least recently selected first; from now on this request keeps a working set."""
        if seat.dense:
            seat.dense, seat.cold = False, True
        o = self.options
        recent = max(o.recent_blocks - 1, 0)
        caps = seat.caps - self.tail_blocks * self.groups
        self.residency.trim(seat.index, caps, o.sink_blocks, recent, seat.sealed)

    def end(self, rows: Sequence[ScheduledRow]) -> dict[int, str]:
        """Seal the blocks this step filled: host copy and sketch, all rows together, layer by layer."""
        view = self.view
        assert view is not None
        view.close()
        parts = []
        for row in rows:
            seat, request = self.seats[row.request.id], row.request
            if row.is_decode and not (seat.dense or seat.lossless) and request.num_exact is None:
                request.num_exact = row.start
            full = (row.start + row.num_tokens) // self.block_size
            parts += [(seat, p) for p in range(seat.sealed, full)]
            seat.cold &= row.start < len(request.prompt_ids)
            proposed = view.num_drafts.get(row.request.id, 0)
            if proposed:
                right = min(len(row.drafts) + 1, proposed)
                seat.draft_chance += 0.1 * (len(row.drafts) - seat.draft_chance * right)
                seat.draft_chance = min(max(seat.draft_chance, 0.02), 0.98)
        if parts:
            self.failures |= seal_or_fail(self, parts)
        for row in rows:
            seat = self.seats[row.request.id]
            seat.sealed = max(seat.sealed, (row.start + row.num_tokens) // self.block_size)
            seat.cold |= not seat.dense and row.start < len(row.request.prompt_ids)
        failures, self.failures = self.failures, {}
        return failures

    def raise_budget(self, seat: Seat) -> None:
        """A quarter more for a request whose audit fell short, once a step, as far as the pool allows."""
        if seat.raised == self.passes:
            return
        seat.raised, blocks = self.passes, math.ceil(seat.budget * 1.25)
        caps = torch.maximum(
            seat.caps, self._caps(blocks * self.block_size, -(-seat.request.max_len // self.block_size))
        )
        held = sum(s.floor for s in self.seats.values()) - seat.floor
        if held + int(caps.sum()) + self.reserve <= self.pool.num_slots:
            seat.budget, seat.caps, seat.floor = blocks, caps, int(caps.sum())

    # --- accounting --------------------------------------------------------------------------------
    @property
    def slot_bytes(self) -> int:
        return 2 * self.slot_keys[0].nbytes

    def device_bytes(self, request: Request) -> int:
        """Everything the device holds for a running request: slots, those in flight, sketches."""
        seat = self.seats[request.id]
        table = self.residency.slot_of[:, seat.index]
        slots = int(((table >= 0) | (table == FLYING)).sum())
        c = self.config
        sketch = self.sketches.selector.bytes_per_block(self.block_size, c.num_kv_heads, c.head_dim)
        sketch += self.centroids.bytes_per_block if self.centroids is not None else 0
        layers = sum(c.window(i) is None for i in range(c.num_layers))
        return slots * self.slot_bytes + layers * seat.sealed * sketch

    def report(self) -> tuple[dict[str, float], dict[str, float]]:
        """See Metrics.tiers."""
        o, c = self.stats, self.coordinator.stats
        totals = {
            "kv_block_hits": o.hits, "kv_block_misses": o.misses, "kv_block_fetched_now": o.fetched_now,
            "kv_block_skipped": o.skipped, "kv_block_estimated": o.estimated,
            "kv_prefetch_completed": c.completed,
            "kv_prefetch_failed": c.failed, "kv_prefetch_cancelled": c.cancelled, "kv_prefetch_late": c.late,
            "kv_prefetch_bytes": c.bytes, "kv_exposed_wait_seconds": c.exposed_s,
        }  # fmt: skip
        levels = {
            "kv_device_bytes": sum(self.device_bytes(s.request) for s in self.seats.values()),
            "kv_host_bytes": sum(s.sealed for s in self.seats.values()) * self.host.bytes_per_block,
            "kv_in_flight_bytes": self.coordinator.bytes_in_flight,
            "kv_mass_recall": o.recall or 0.0,
            "kv_link_bandwidth_bytes_per_second": c.bandwidth,
            "kv_agreement_lookahead": self.lookahead.agreement["lookahead"].mean,
            "kv_agreement_previous": self.lookahead.agreement["previous"].mean,
        }  # fmt: skip
        return totals, levels

    def check(self) -> None:
        """Raise AssertionError unless every slot is in one place (design invariants 1 and 2)."""
        self.residency.check(len(self.flights))
