"""The engine's parts as the evaluation drives them: prefill once, then decode again and again.

Owns: everything that is taken from the inside of the engine. Must not know: tasks, sweeps, scores, reports.

A prompt's prefix (all but its last token) is computed once, densely. Its blocks are then sealed into a host
tier and sketched, as the engine does when a block is full. Each setting gets its own OasisKV on that host
tier, with a device that holds exactly what its requests may hold at their caps, plus the engine's reserve:
every request is under pressure, none is dense. The last prompt token is decoded under the setting too (the
engine computes it exactly, with the prefill), so that no token of an answer comes from dense attention.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nano_oasis.config import EngineConfig
from nano_oasis.eval.decoder import Decoder, See
from nano_oasis.eval.settings import Setting
from nano_oasis.eval.tasks import Sample
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.host_tier import HostTier
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.link import BlockMover, Link, MemcpyLink, SimulatedLink
from nano_oasis.memory.oasis_kv import OasisKV
from nano_oasis.memory.sketch import make_selector
from nano_oasis.memory.sketch_slabs import SketchSlabs
from nano_oasis.memory.stream import Stage
from nano_oasis.request import Request, SamplingParams, ScheduledRow

CHUNK = 512  # prefill tokens per forward pass
LATENCY = 20e-6  # seconds of each copy on a simulated link
DENSE_BLOCK = 16  # of the dense cache, whatever block size is swept


@dataclass
class _Tier:
    """The prefixes of a batch in a host tier of one block size. first[i]: the first of row i's host
    blocks."""

    host: HostTier
    first: list[int]
    block_size: int
    sketches: dict[str, SketchSlabs] = field(default_factory=dict)


@dataclass
class Measured:
    """What a store counted while requests were decoded, the first step left out: it fills an empty device.

    Blocks are of one layer (and head group), summed over all requests of the batch. Seconds are of the batch.
    """

    hits: int = 0
    misses: int = 0
    fetched_now: int = 0
    skipped: int = 0
    exposed_s: float = 0.0
    seconds: float = 0.0
    device_bytes: list[int] = field(default_factory=list)  # per request, at the end, sketches included


class Session:
    """Prompts decoded together. Everything is given back by close()."""

    def __init__(
        self, decoder: Decoder, samples: Sequence[Sample], room: int, bandwidth: float | None = None
    ) -> None:
        """room: tokens that may be decoded after a prompt, at most. bandwidth: of a simulated link, bytes per
        second; None: copies in memory."""
        self.decoder, self.samples, self.room, self.bandwidth = decoder, samples, room, bandwidth
        self.first = [0]
        for sample in samples:
            self.first.append(self.first[-1] + -(-(len(sample.ids) + room) // DENSE_BLOCK))
        self.cache = KVCache.allocate(decoder.config, self.first[-1], DENSE_BLOCK, decoder.dtype, "cpu")
        self.dense = DenseKV(self.cache, decoder.kernels)
        self._tiers: dict[int, _Tier] = {}

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.host.close()
        self._tiers.clear()

    @torch.inference_mode()
    def prefill(self, row: int) -> None:
        """All tokens of a prompt but the last."""
        request = self._request(row, self.dense_table(row), 0)
        prefix = len(self.samples[row].ids) - 1
        for start in range(0, prefix, CHUNK):
            rows = [ScheduledRow(request, start, min(CHUNK, prefix - start), samples=False)]
            end = start + rows[0].num_tokens
            tokens = torch.tensor(request.prompt_ids[start:end])
            self.decoder.model.forward(tokens, torch.arange(start, end), self.dense.begin(rows))

    def dense_table(self, row: int) -> list[int]:
        return list(range(self.first[row], self.first[row + 1]))

    def kv(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a prompt's prefix in one layer, each [prefix, H, D]; views."""
        blocks = slice(self.first[row], self.first[row + 1])
        prefix = len(self.samples[row].ids) - 1
        keys, values = (x[blocks].flatten(0, 1)[:prefix] for x in self.cache.layer(layer))
        return keys, values

    def dense_requests(self, rows: Sequence[int]) -> list[Request]:
        """Requests that decode densely from the prefilled prefixes."""
        return [self._request(i, self.dense_table(i), len(self.samples[i].ids) - 1) for i in rows]

    def _request(self, row: int, table: list[int], computed: int, budget: int | None = None) -> Request:
        """The last prompt token counts as the first of the output: it is decoded, not prefilled."""
        ids = self.samples[row].ids
        return Request(
            list(ids[:-1]), SamplingParams(temperature=0, max_tokens=None, kv_budget=budget),
            max_len=len(ids) + self.room, seed=0, output_ids=[ids[-1]], block_table=table,
            num_computed=computed,
        )  # fmt: skip

    # --- the oasis mode ----------------------------------------------------------------------------
    def oasis(
        self, setting: Setting, rows: Sequence[int], lengths: Sequence[int], see: See | None = None,
        teacher: Sequence[Sequence[int]] | None = None,
    ) -> tuple[list[list[int]], dict[int, str], Measured]:  # fmt: skip
        """Decode these rows together under a setting; see Decoder.play. Row i of the results is rows[i]."""
        with self._oasis(setting, rows) as (kv, requests):
            measured, began, before, watching = Measured(), time.perf_counter(), _counts(kv), 0.0

            def watch(step: int, going: list[int], logits: Tensor) -> None:
                nonlocal began, before, watching
                if step == 0:
                    began, before = time.perf_counter(), _counts(kv)
                if see is not None:
                    start = time.perf_counter()
                    see(step, going, logits)
                    watching += time.perf_counter() - start

            drafts = setting.predictor == "lookahead"
            outputs, errors = self.decoder.play(kv, requests, lengths, watch, teacher, drafts)
            measured.seconds = time.perf_counter() - began - watching
            for name, value in _counts(kv).items():
                setattr(measured, name, value - before[name])
            measured.device_bytes = [kv.device_bytes(r) for r in requests]
        return outputs, errors, measured

    @contextmanager
    def _oasis(self, setting: Setting, rows: Sequence[int]) -> Iterator[tuple[OasisKV, list[Request]]]:
        tier, c = self._tier(setting.block), self.decoder.config
        sketches = self._sketches(tier, setting)
        requests, budgets = [], []
        for i in rows:
            table = list(range(tier.first[i], tier.first[i + 1]))
            budgets.append(setting.tokens(self.samples[i].context or len(self.samples[i].ids)))
            requests.append(self._request(i, table, len(self.samples[i].ids) - 1, budgets[-1]))
        options = setting.engine(max(budgets), len(rows))
        max_len = max(r.max_len for r in requests) + setting.block
        heads = c.num_kv_heads // options.groups_of(c.num_kv_heads)
        slots = self._slots_at_caps(options, tier, sketches, requests, max_len, heads)
        shape = (slots, setting.block, heads, c.head_dim)
        keys, values = (torch.empty(shape, dtype=self.decoder.dtype) for _ in range(2))
        mover = BlockMover(tier.host, keys, values)
        link: Link = MemcpyLink(mover)
        if self.bandwidth is not None:
            link = SimulatedLink(mover, bandwidth=self.bandwidth, latency_s=LATENCY, lanes=2)
        coordinator = PrefetchCoordinator(link)
        kv = self._store(options, tier, keys, values, sketches, coordinator, max_len)
        self._fill_centroids(kv, tier)
        coordinator.start()
        try:
            with torch.inference_mode():
                for i, request in zip(rows, requests, strict=True):
                    self._sit(kv, request, i)
            yield kv, requests
        finally:
            coordinator.stop()

    def _store(
        self, options: EngineConfig, tier: _Tier, keys: Tensor, values: Tensor, sketches: SketchSlabs,
        coordinator: PrefetchCoordinator, max_len: int,
    ) -> OasisKV:  # fmt: skip
        d = self.decoder
        # No prompt is prefilled here, so the staging ring is never used.
        stage = Stage(1, options.block_size, d.config.num_kv_heads, keys.shape[3], d.dtype, "cpu")
        return OasisKV(
            d.config, options, d.kernels, tier.host, keys, values, sketches, coordinator, stage, max_len
        )  # fmt: skip

    def _slots_at_caps(
        self, options: EngineConfig, tier: _Tier, sketches: SketchSlabs, requests: Sequence[Request],
        max_len: int, heads: int,
    ) -> int:  # fmt: skip
        """Device slots that hold every request at its caps, and the reserve; asked of a store without
        memory."""
        c = self.decoder.config
        groups = options.groups_of(c.num_kv_heads)
        most = c.num_layers * groups * (len(requests) + 2) * (max_len // options.block_size + 2)
        shape = (1, options.block_size, heads, c.head_dim)
        nothing = torch.empty(shape, dtype=self.decoder.dtype).expand(most, *shape[1:])
        link = MemcpyLink(BlockMover(tier.host, nothing, nothing))
        kv = self._store(options, tier, nothing, nothing, sketches, PrefetchCoordinator(link), max_len)
        for request in requests:
            if not kv.admit(request):
                raise RuntimeError("the store does not admit a request that must fit")
        link.close()
        return kv.reserve + sum(seat.floor for seat in kv.seats.values())

    def _sit(self, kv: OasisKV, request: Request, row: int) -> None:
        """Onto the device as after a prefill under pressure: sink, newest blocks and the unsealed tail are
        there, and the first step fetches what it wants, and waits."""
        if not kv.admit(request):
            raise RuntimeError("the device does not hold a request at its caps")
        seat, size = kv.seats[request.id], kv.block_size
        seat.cold = not seat.dense
        tail = request.num_computed - seat.sealed * size
        low = max(seat.sealed - max(kv.options.recent_blocks - 1, 0), 0)
        for part in (range(min(kv.options.sink_blocks, low)), range(low, seat.sealed + (tail > 0))):
            if part:
                kv.residency.add(seat.index, part, kv.step)
        here = kv.residency.slot_of[:, seat.index] >= 0  # [planes, positions], the same in all planes
        positions = here[0, : seat.sealed].nonzero()[:, 0]
        blocks = torch.tensor(request.block_table)[positions]
        for plane in range(kv.planes):
            layer, group = divmod(plane, kv.groups)
            slots = kv.residency.slot_of[plane, seat.index].long()
            kv.host.load_into(layer, blocks, slots[positions], kv.slot_keys, kv.slot_values, kv.heads(group))
            if tail:
                for pool, whole in zip((kv.slot_keys, kv.slot_values), self.kv(row, layer), strict=True):
                    pool[slots[seat.sealed], :tail] = whole[-tail:, kv.heads(group) or slice(None)]

    @torch.inference_mode()
    def _tier(self, block: int) -> _Tier:
        """The host tier of a block size, made at first use: every full block of every prefix is sealed."""
        if block in self._tiers:
            return self._tiers[block]
        first = [0]
        for sample in self.samples:
            first.append(first[-1] + -(-(len(sample.ids) + self.room) // block) + 1)
        host = HostTier.create(self.decoder.config, first[-1], block, self.decoder.dtype)
        tier = self._tiers[block] = _Tier(host, first, block)
        for row in range(len(self.samples)):
            for layer in range(self.decoder.config.num_layers):
                ids, keys, values = self._sealed(tier, row, layer)
                host.store_layer(layer, ids, keys, values)
        return tier

    def _sealed(self, tier: _Tier, row: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Host block ids [n] of a prefix's full blocks, and their keys and values [n, B, H, D]."""
        count = (len(self.samples[row].ids) - 1) // tier.block_size
        keys, values = (
            x[: count * tier.block_size].unflatten(0, (count, tier.block_size)) for x in self.kv(row, layer)
        )
        return tier.first[row] + torch.arange(count), keys, values

    @torch.inference_mode()
    def _sketches(self, tier: _Tier, setting: Setting) -> SketchSlabs:
        """Sketches of the prefixes' blocks; decoding adds those of the blocks it fills, which it owns."""
        c = self.decoder.config
        if setting.selector not in tier.sketches:
            slabs = SketchSlabs(make_selector(setting.selector), tier.first[-1], c.num_layers)
            for row in range(len(self.samples)):
                for layer in range(c.num_layers):
                    if c.window(layer) is None:
                        ids, keys, _ = self._sealed(tier, row, layer)
                        slabs.put(layer, ids, keys)
            tier.sketches[setting.selector] = slabs
        return tier.sketches[setting.selector]

    @torch.inference_mode()
    def _fill_centroids(self, kv: OasisKV, tier: _Tier) -> None:
        """What the miss policy `estimate` needs of the prefixes."""
        c = self.decoder.config
        layers = [i for i in range(c.num_layers) if c.window(i) is None] if kv.centroids is not None else []
        for layer in layers:
            for row in range(len(self.samples)):
                assert kv.centroids is not None
                kv.centroids.put(layer, *self._sealed(tier, row, layer))


def _counts(kv: OasisKV) -> dict[str, float]:
    s = kv.stats
    return {
        "hits": s.hits, "misses": s.misses, "fetched_now": s.fetched_now, "skipped": s.skipped + s.estimated,
        "exposed_s": kv.coordinator.stats.exposed_s,
    }  # fmt: skip
