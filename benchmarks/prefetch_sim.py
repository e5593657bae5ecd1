"""How long a step stands still for its prefetches, by admission cap: the coordinator on a simulated link.

Owns: simulations in virtual time, run by hand: python benchmarks/prefetch_sim.py [--rows 16] [--steps 50].
Must not know: models, bytes, or how blocks are chosen.

Every row orders its full cap for the next step at every layer, and every layer waits for all that was
ordered for it: the most that a cap can cost. In `--repairs` of the layers one block more is found missing
and fetched at once. The coordinator's own CPU time is not in the table; the last line measures it.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from nano_oasis.memory.clock import VirtualClock
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.link import SimulatedLink
from nano_oasis.memory.link_rate import admission_cap
from nano_oasis.memory.tickets import NOW, Ticket

LAYERS = 32
BLOCK_BYTES = 128 << 10  # keys and values of 32 tokens in one layer: 8 KV heads of 128, bf16
BUDGET_BLOCKS = 2048 // 32
BANDWIDTH = 25e9  # bytes per second, PCIe 4.0 x16 in practice
LATENCY_S = 20e-6  # of each copy
DELAYED, DELAY_S = 0.02, 1e-3  # one copy in fifty takes up to a millisecond longer
CAPS = (1, 2, 3, 5, 7, 10, 15, 20)  # percent of the budget
STEPS_S = (0.010, 0.020, 0.040)
UNBOUNDED = {"max_tickets": 10**9, "max_bytes": 10**15}


@dataclass
class Result:
    exposed: float  # share of the step's computing time
    late: float  # share of tickets
    link: float  # share of the time that the wire is busy
    online_cap: int  # blocks per row and layer that admission_cap() would allow


def simulate(
    step_s: float, cap_blocks: float, rows: int, steps: int, repairs: float = 0.0, seed: int = 0
) -> Result:
    """`cap_blocks` per row, layer and step; a fraction is met on average."""
    clock, rng = VirtualClock(), random.Random(seed)
    temper = {"delay_rate": DELAYED, "delay_s": DELAY_S, "seed": seed}
    link = SimulatedLink(bandwidth=BANDWIDTH, latency_s=LATENCY_S, lanes=2, **temper)
    coordinator = PrefetchCoordinator(link, clock=clock, **UNBOUNDED)
    coordinator.start()
    due: dict[int, list[Ticket]] = {layer: [] for layer in range(LAYERS)}
    slot = 0
    for step in range(steps):
        for layer in range(LAYERS):
            coordinator.reached(step, layer)
            coordinator.wait(due[layer], 100.0)
            if rng.random() < repairs:
                repair = Ticket(rows, 0, layer, 0, step, 0, -1, BLOCK_BYTES, NOW)
                coordinator.submit([repair])
                coordinator.wait([repair], 100.0)
            coordinator.completed()
            due[layer] = []
            for row in range(rows):
                for position in range(int(cap_blocks + rng.random())):
                    key = (row, 0, layer, 0, position)
                    due[layer].append(Ticket(*key, 0, slot, BLOCK_BYTES, step + 1, rng.random()))
                    slot += 1
            assert not coordinator.submit(due[layer])
            clock.elapse(step_s / LAYERS)
    stats, total_s = coordinator.stats, clock.now()
    coordinator.stop(timeout_s=100.0)
    cap = admission_cap(step_s, stats.bandwidth, BLOCK_BYTES, LAYERS, rows)
    return Result(
        stats.exposed_s / (steps * step_s), stats.late / stats.submitted, link.busy_s / total_s, cap
    )


def ticket_cost(count: int = 51, rounds: int = 300) -> float:
    """CPU seconds that one ticket costs the step thread, from its making to its return; best of rounds."""
    clock, best = VirtualClock(), float("inf")
    coordinator = PrefetchCoordinator(SimulatedLink(bandwidth=1e15), clock=clock, **UNBOUNDED)
    coordinator.start()
    for step in range(rounds):
        start = time.thread_time()
        coordinator.submit([Ticket(i, 0, 0, 0, 0, 0, i, BLOCK_BYTES, step, 0.01 * i) for i in range(count)])
        middle = time.thread_time()
        clock.elapse(1.0)  # the loop's part, on a thread of its own in real life
        again = time.thread_time()
        assert len(coordinator.completed()) == count
        best = min(best, (middle - start + time.thread_time() - again) / count)
    coordinator.stop()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repairs", type=float, default=0.25)
    args = parser.parse_args()
    print(
        f"{args.rows} rows, {LAYERS} layers, {BLOCK_BYTES >> 10} KiB per block and layer, budget "
        f"{BUDGET_BLOCKS} blocks, {BANDWIDTH / 1e9:.0f} GB/s, {LATENCY_S * 1e6:.0f} us per copy, "
        f"{DELAYED:.0%} of the copies up to {DELAY_S * 1e3:.0f} ms late"
    )
    print(f"exposed wait in % of the step / with a repair in {args.repairs:.0%} of the layers (link busy %)")
    print("| cap | " + " | ".join(f"step {s * 1e3:.0f} ms" for s in STEPS_S) + " |")
    print("|---" * (1 + len(STEPS_S)) + "|")
    for percent in CAPS:
        cells = []
        for step_s in STEPS_S:
            blocks = BUDGET_BLOCKS * percent / 100
            plain = simulate(step_s, blocks, args.rows, args.steps)
            repaired = simulate(step_s, blocks, args.rows, args.steps, args.repairs)
            cells.append(f"{100 * plain.exposed:.1f} / {100 * repaired.exposed:.1f} ({100 * plain.link:.0f})")
        print(f"| {percent}% | " + " | ".join(cells) + " |", flush=True)
    online = [simulate(s, BUDGET_BLOCKS * 0.05, args.rows, 5).online_cap for s in STEPS_S]
    shares = [f"{cap} blocks = {cap / BUDGET_BLOCKS:.0%}" for cap in online]
    print("| admission_cap() | " + " | ".join(shares) + " |")
    print(f"CPU time of the step thread per ticket: {ticket_cost() * 1e6:.1f} us")


if __name__ == "__main__":
    main()
