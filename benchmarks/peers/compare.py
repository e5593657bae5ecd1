"""Our server beside llama.cpp, vLLM and transformers on the same weights, prompts and machine, in turn.

Owns: one comparison, run by hand after setup.sh: python benchmarks/peers/compare.py --streams 8 --input-len
4000. Must not know: how a server is started, how a request is sent.

All servers run at once, but only the one that is measured is awake (the others are stopped by a signal). The
first pass computes the prompts; the later ones send the same prompts again, which all of these servers
have cached, and take turns: what a neighbour on this machine does hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from servers import SERVERS, Load

from nano_oasis.bench.idle import Others
from nano_oasis.bench.load import LoadError, Target, first_model, random_prompts, send_all
from nano_oasis.bench.report import Spread, save, show
from nano_oasis.bench.serve import summarise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A server in a process group of its own, stopped except inside `with`."""

    def __init__(self, name: str, port: int, load: Load) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        server = SERVERS[name]
        if not server.needs.exists():
            raise LoadError(f"--servers: {name} needs {server.needs}; see benchmarks/peers/setup.sh")
        self.log = Path(tempfile.gettempdir()) / f"peer-{name}.log"
        began = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                server.command(port, load), env=os.environ | server.env, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            model = self._wait()
        except BaseException:
            self.close()
            raise
        self.target = Target(f"{self.url}/v1/completions", model, chat=False)
        self.start_s = time.perf_counter() - began

    def _wait(self, seconds: float = 300.0) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise LoadError(f"{self.name} ended before it was ready: {self.log}")
            try:
                return asyncio.run(first_model(self.url))
            except LoadError:
                time.sleep(0.2)
        raise LoadError(f"{self.name} was not ready in {seconds:.0f} s: {self.log}")

    def __enter__(self) -> Running:
        os.killpg(self.process.pid, signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        for sign in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                return
        self.process.wait()


def measure(server: Running, prompts: list[str], new: int) -> dict[str, Any]:
    """One pass of all prompts at once. Raises LoadError when a request fails."""
    with server:
        others = Others(server.process.pid)
        sent = asyncio.run(send_all(server.target, prompts, new))
        figures = summarise(sent, [50.0])
    if figures["failed"]:
        raise LoadError(f"{server.name}: {figures['errors'][0]}")
    return figures | {"others": others.cores()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--servers", default=",".join(SERVERS), help="default: %(default)s")
    add("--streams", type=int, default=8)
    add("--input-len", type=int, default=4000, help="words of a prompt, a little more in tokens")
    add("--output-len", type=int, default=64)
    add("--repeats", type=int, default=5, help="passes after the first")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    args = parser.parse_args()
    names = args.servers.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"--servers: no {sorted(unknown)}; there are {', '.join(SERVERS)}")
    prompts = random_prompts(args.streams, args.input_len, 0, 0.0, seed=1)
    load = Load(args.streams, round(1.45 * args.input_len) + args.output_len + 64)
    running: list[Running] = []
    # Ended like this, too, this process takes the servers with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in names:
            running.append(Running(name, free_port(), load))
            with running[-1] as server:
                warm = random_prompts(1, 16, 0, 0.0, seed=2)
                asyncio.run(send_all(server.target, warm, 8))
            print(f"{name}: ready after {server.start_s:.1f} s", file=sys.stderr)
        passes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(1 + args.repeats):
            for server in running:
                figures = measure(server, prompts, args.output_len)
                passes[server.name].append(figures)
                print(f"pass {number}, {server.name}: {figures['seconds']:.1f} s, "
                      f"{_rate(figures):.1f} tokens/s, "
                      f"others {figures['others']:.2f} cores", file=sys.stderr)  # fmt: skip
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for server in running:
            server.close()
        signal.signal(signal.SIGTERM, before)
    _show(passes, {s.name: s.start_s for s in running}, args)
    if args.output:
        save(args.output, "peers", vars(args), [{"server": k, "passes": v} for k, v in passes.items()])
    return 0


def _rate(figures: dict[str, Any]) -> float:
    """Tokens/s, prompts left out if there was a time when all streams were decoding."""
    return float(figures["decode_tokens_per_s"] or figures["output_tokens_per_s"])


def _show(
    passes: dict[str, list[dict[str, Any]]], started: dict[str, float], args: argparse.Namespace
) -> None:
    """decode: tokens/s summed over streams while all of them decode, of the passes after the first."""
    rates = {name: Spread(tuple(map(_rate, all_[1:] or all_))) for name, all_ in passes.items()}
    base = next(iter(rates.values())).median
    rows = []
    for name, all_ in passes.items():
        ttft = statistics.median(p["ttft"]["p50"] for p in all_[1:] or all_) / 1000
        rows.append([
            name, rates[name], f"{rates[name].median / base:.2f}x", all_[0]["seconds"],
            all_[0]["prompt_tokens"], ttft, started[name],
        ])  # fmt: skip
    show(
        f"{args.streams} streams after {args.input_len} words, {args.output_len} tokens each",
        ["server", "decode tokens/s", "to the first", "first pass, s", "its prompt tokens", "later TTFT, s",
         "start, s"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
