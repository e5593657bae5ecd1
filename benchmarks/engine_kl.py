"""KL to dense of the engine's own sparse decode, under device memory pressure, by predictor and miss policy.

Owns: one measurement, run by hand: python benchmarks/engine_kl.py [--texts code legal prose] [--steps 128].
Must not know: how blocks are chosen, fetched or evicted; it sees the runner, the KV store and its counters.

A real text is teacher-forced through Runner and OasisKV: first dense, in a pool with room for all, which
also fills the host tier and the sketches; then once per setting over the same host tier, in a pool that holds
the request's floor and one step's new tokens and nothing else. So its working sets cannot grow, and
`device_bytes` is what a request costs when others want the rest. The last block of the prompt is computed
in the small pool too, as a chunk after a prefix found in the host tier; the first decode step is cold.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from sparse_decode import real_texts
from torch import Tensor

from nano_oasis.config import EngineConfig
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.dense_kv import KVView
from nano_oasis.memory.host_tier import HostTier
from nano_oasis.memory.link import BlockMover, Link, MemcpyLink, SimulatedLink
from nano_oasis.memory.oasis_kv import OasisKV
from nano_oasis.memory.seat import OasisStats
from nano_oasis.memory.sketch import make_selector
from nano_oasis.memory.sketch_slabs import SketchSlabs
from nano_oasis.memory.stream import Stage
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.runner import KVFailure, Runner
from nano_oasis.sampler import Sampler
from nano_oasis.spec.draft import Draft
from nano_oasis.spec.make import make_draft
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint, resolve_model

SETTINGS = ("current+wait", "previous+wait", "previous+repair", "previous+skip")
WITH_DRAFTS = ("lookahead+repair", "lookahead+skip", "lookahead+wait")
CHUNK = 512  # prefill tokens per step in the roomy pool


@dataclass
class Recorder:
    """The model, and the hidden states of its last step: the runner itself only returns samples."""

    model: Model
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))

    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        self.hidden = self.model.forward(token_ids, positions, kv)
        return self.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class Bench:
    """One model, one host tier with one text in it, and stores over it."""

    def __init__(self, args: argparse.Namespace) -> None:
        path = resolve_model(args.model)
        checkpoint = load_checkpoint(path, torch.float32)
        self.args, self.config, self.tokenizer = args, checkpoint.config, load_tokenizer(path)
        self.length = args.prefix + args.steps
        self.model = Recorder(Model(checkpoint.config, checkpoint.tensors, self.length))
        self.blocks = -(-self.length // args.block)
        self.host = HostTier.create(self.config, self.blocks, args.block, torch.float32)
        self.sketches = SketchSlabs(make_selector(args.selector), self.blocks, self.config.num_layers)

    def options(self, **more: object) -> EngineConfig:
        a = self.args
        return EngineConfig(
            kv_mode="oasis", draft="auto" if a.drafts else "none", num_draft_tokens=a.drafts or None,
            block_size=a.block, kv_budget=a.budget, selector=a.selector, max_num_seqs=1,
            dense_layers=a.dense_layers, buffer_factor=a.buffer_factor, recent_blocks=a.recent_blocks, **more,
        )  # fmt: skip

    def store(self, options: EngineConfig, slots: int) -> OasisKV:
        c = self.config
        heads = c.num_kv_heads // options.groups_of(c.num_kv_heads)
        shape = (slots, options.block_size, heads, c.head_dim)
        keys, values = torch.empty(shape), torch.empty(shape)
        mover, a = BlockMover(self.host, keys, values), self.args
        link: Link = MemcpyLink(mover)
        if a.bandwidth:
            link = SimulatedLink(mover, bandwidth=a.bandwidth, latency_s=a.latency, lanes=2)
        coordinator = PrefetchCoordinator(link)
        coordinator.start()
        stage = Stage(64, options.block_size, c.num_kv_heads, c.head_dim, torch.float32, "cpu")
        return OasisKV(
            c, options, select_kernels("cpu"), self.host, keys, values, self.sketches, coordinator, stage,
            self.length,
        )  # fmt: skip

    def request(self, prompt: list[int]) -> Request:
        table = list(range(self.blocks))  # logical blocks are host blocks, in order
        return Request(prompt, SamplingParams(temperature=0), self.length, seed=0, block_table=table)

    def step(self, runner: Runner, request: Request, start: int, count: int) -> Tensor:
        """Compute `count` tokens from `start` -> hidden [count, H]. RuntimeError: their KV failed."""
        (result,) = runner.execute([ScheduledRow(request, start, count, samples=False)])
        if isinstance(result, KVFailure):
            raise RuntimeError(str(result))
        request.num_computed = start + count
        return self.model.hidden

    def log_probs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.model.logits(hidden), -1)

    def dense(self, ids: list[int]) -> tuple[Tensor, int]:
        """Log-probabilities [steps, V] after each of the last tokens; the floor in slots of one head group.

        Afterwards the host tier and the sketches hold the text.
        """
        layers, chunk = self.config.num_layers, -(-CHUNK // self.args.block) + 2
        options = self.options(max_num_batched_tokens=CHUNK, head_groups=1)
        kv = self.store(options, layers * (self.blocks + chunk))
        runner, request = Runner(self.model, kv, Sampler(self.config.vocab_size)), self.request(ids)
        try:
            assert kv.admit(request)
            for start in range(0, self.args.prefix, CHUNK):
                self.step(runner, request, start, min(CHUNK, self.args.prefix - start))
            hidden = self.step(runner, request, self.args.prefix, self.args.steps)
            seat = kv.seats[request.id]
            assert seat.dense
            return self.log_probs(hidden), seat.floor
        finally:
            kv.coordinator.stop()

    def sparse(self, ids: list[int], options: EngineConfig, floor: int, dense: Tensor) -> dict[str, float]:
        """KL and counters of `steps` decode steps in a pool of `floor` slots and what a step needs."""
        a, size = self.args, self.args.block
        options = replace(options, max_num_batched_tokens=size)
        groups = options.groups_of(self.config.num_kv_heads)
        kv = self.store(options, groups * (floor + 2 * self.config.num_layers))
        runner, request = (
            Runner(self.model, kv, Sampler(self.config.vocab_size)),
            self.request(ids[: a.prefix]),
        )
        request.num_computed = a.prefix - size
        kls, same, held = [], [], []
        try:
            assert kv.admit(request)
            self.step(runner, request, a.prefix - size, size)
            t, draft = 0, make_draft(self.options(), self.model.model, self.config.vocab_size, self.length)
            while t < a.steps:
                request.output_ids.append(ids[a.prefix + t])
                logs = self.log_probs(self.draft_step(kv, request, draft, ids, t))  # [1 + right drafts, V]
                truth = dense[t : t + len(logs)]
                kls += (truth.exp() * (truth - logs)).sum(1).tolist()
                same += (truth.argmax(1) == logs.argmax(1)).int().tolist()
                held.append(kv.device_bytes(request) / (request.num_computed * self.dense_bytes))
                if t == 0:
                    began, exposed = time.perf_counter(), kv.coordinator.stats.exposed_s
                    kv.stats = OasisStats()  # the cold step fetches everything: not a hit rate
                request.output_ids += ids[a.prefix + t + 1 : a.prefix + t + len(logs)]
                t += len(logs)
            seconds = time.perf_counter() - began
            exposed = kv.coordinator.stats.exposed_s - exposed
            kv.check()
        finally:
            kv.coordinator.stop()
        s, n, kl = kv.stats, a.steps - 1, torch.tensor(kls)
        return {
            "kl": float(kl.mean()), "kl_error": float(kl.std()) / math.sqrt(len(kl)),
            "p99": float(kl.quantile(0.99)), "same_top": sum(same) / len(same),
            "hit_rate": s.hits / (s.hits + s.misses), "fetched_now": s.fetched_now / n,
            "skipped": s.skipped / n, "device_mb": kv.device_bytes(request) / 1e6,
            "dense_mb": request.num_computed * self.dense_bytes / 1e6,
            "times_least": 1 / max(held), "times_mean": len(held) / sum(held),
            "exposed_share": exposed / seconds, "ms_per_token": 1000 * seconds / n,
            "per_step": a.steps / len(held),
            **{f"agree_{name}": x.mean for name, x in kv.lookahead.agreement.items()},
        }  # fmt: skip

    def draft_step(
        self, kv: OasisKV, request: Request, draft: Draft | None, ids: list[int], t: int
    ) -> Tensor:
        """The newest token with its drafts; those that the text confirms are kept -> hidden [1 + kept, H]."""
        start = self.args.prefix + t
        most = min(self.args.drafts, self.args.steps - t - 1)
        row = ScheduledRow(request, start, 1, samples=True, max_drafts=most)
        if draft is not None and most:
            row = row.with_drafts(draft.propose([row], kv)[0])
        tokens, positions = torch.tensor(row.token_ids()), torch.arange(start, start + row.num_tokens)
        hidden = self.model.forward(tokens, positions, kv.begin([row]))
        truth = ids[start + 1 : start + 1 + len(row.drafts)]
        right = next((j for j, d in enumerate(row.drafts) if d != truth[j]), len(row.drafts))
        failures = kv.end([row.with_drafts(row.drafts[:right])])
        if failures:
            raise RuntimeError(str(failures))
        if draft is not None:
            draft.observe([row], [right], hidden[right : right + 1])
        request.num_computed = start + 1 + right
        return hidden[: right + 1]

    @property
    def dense_bytes(self) -> int:
        return self.config.kv_bytes_per_token(4)  # fp32


def measure(bench: Bench, text: str, wanted: list[tuple[str, int]]) -> Iterator[dict]:
    """A row for each (setting, head groups)."""
    ids = bench.tokenizer.encode(real_texts()[text][: 12 * bench.length])[: bench.length]
    if len(ids) < bench.length:
        raise SystemExit(f"{text} has {len(ids)} tokens, {bench.length} are needed")
    with torch.inference_mode():
        dense, floor = bench.dense(ids)
        for setting, groups in wanted:
            predictor, policy = setting.split("+")
            options = bench.options(predictor=predictor, miss_policy=policy, head_groups=groups)
            yield {"text": text, "setting": setting, "groups": groups} | bench.sparse(
                ids, options, floor, dense
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", nargs="*", default=list(real_texts()))
    parser.add_argument("--settings", nargs="*", default=SETTINGS, choices=SETTINGS + WITH_DRAFTS)
    parser.add_argument("--head-groups", type=int, nargs="*", default=[None])
    parser.add_argument("--bandwidth", type=float, help="bytes/s of a simulated link; default: plain copies")
    parser.add_argument("--latency", type=float, default=5e-5, help="of the simulated link, seconds")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens per step (draft auto)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=8000, help="tokens of context; a multiple of the block")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--selector", default="fourbit")
    parser.add_argument("--dense-layers", type=int, default=0)
    parser.add_argument("--recent-blocks", type=int, default=4)
    parser.add_argument("--buffer-factor", type=float, default=1.25)
    parser.add_argument("--results", type=Path, default=Path("engine_kl.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.prefix % args.block:
        parser.error(f"--prefix {args.prefix} is not a multiple of --block {args.block}")
    torch.set_num_threads(args.threads)
    # Everything but where the results go and what is swept shapes a result, so it is part of its key.
    swept = ("texts", "settings", "head_groups", "results", "threads")
    key = json.dumps({k: v for k, v in vars(args).items() if k not in swept}, sort_keys=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    rows = [r for r in map(json.loads, lines) if r["key"] == key]
    have = {(r["text"], r["setting"], r["groups"]) for r in rows}
    bench = Bench(args)
    for text in args.texts:
        wanted = [(s, g) for s in args.settings for g in args.head_groups if (text, s, g) not in have]
        for row in measure(bench, text, wanted) if wanted else ():
            rows.append({"key": key} | row)
            with args.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print_rows(rows[-1:])
    print()
    print_rows([r for r in rows if r["text"] in args.texts and r["setting"] in args.settings])


def print_rows(rows: list[dict]) -> None:
    for r in rows:
        print(
            f"{r['text']:6} {r['setting']:16} groups {r['groups']}  KL {r['kl']:.4f} +- {r['kl_error']:.4f}, "
            f"p99 {r['p99']:.3f}, same top {r['same_top']:.3f}  hits {r['hit_rate']:.3f}, per step "
            f"{r['fetched_now']:.1f} waited for, {r['skipped']:.1f} skipped  device {r['device_mb']:.1f} of "
            f"{r['dense_mb']:.1f} MB, {r['times_mean']:.2f}x (least {r['times_least']:.2f}x)  "
            f"tokens per step {r['per_step']:.2f}, foretold by lookahead {r['agree_lookahead']:.3f}, "
            f"by previous {r['agree_previous']:.3f}, waiting {100 * r['exposed_share']:.1f}% of the time, "
            f"{r['ms_per_token']:.1f} ms a token",
            flush=True,
        )


if __name__ == "__main__":
    main()
