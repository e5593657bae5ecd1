"""The Triton kernels compile for GPUs that are not here, without spilling registers."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the Triton kernels need Triton (Linux)")
ENV = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # what is interpreted cannot compile


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)


EVERY = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]
ATTENTION = ["prefill", "decode split", "decode whole", "merge", "kv_write"]
WINDOW = ["prefill window", "decode split window", "decode whole window", "merge", "kv_write"]
OASIS = ["sketch_build", "sketch_logits", "top_blocks", "gather whole", "gather heads"]
OASIS += [f"{verb} {side}" for verb in ("quantise", "dequantise") for side in ("keys", "values")]


@pytest.mark.parametrize(
    "kernels, targets, options",
    [
        (WINDOW, EVERY, "--kernels attention --dim 64 --dtype bf16 --window 512"),
        (
            ATTENTION,
            ["cuda:80", "hip:gfx942"],
            "--kernels attention --dim 80 --dtype fp16 --window 0 --heads 6 --kv-heads 2",
        ),
        (OASIS, EVERY, "--kernels oasis --dim 96 --dtype bf16"),
        (OASIS, ["cuda:80"], "--kernels oasis --dim 256 --dtype fp32 --block 32 --heads 24 --kv-heads 1"),
    ],
    ids=["every target", "padded head size", "oasis, every target", "oasis, the most registers"],
)
def test_no_spills(kernels: list[str], targets: list[str], options: str) -> None:
    """A part of the table that the command prints in full: hundreds of entries take minutes."""
    done = run("-m", "nano_oasis.kernels.compile_check", "--target", *targets, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    title, *table, verdict = done.stdout.strip().splitlines()
    assert title.split()[-len(targets) :] == targets
    assert verdict == "no spills, shared memory within limits"
    assert len(table) == len(kernels)
    for kernel in kernels:
        (line,) = [row for row in table if row.startswith(f"{kernel} D=")]
        cells = re.findall(r"(\d+)/(\d+)/([\d.]+)", line)
        assert len(cells) == len(targets)
        assert all(int(registers) > 0 and int(spilled) == 0 for registers, spilled, _ in cells)


def test_spills_are_seen_when_there_are_any() -> None:
    """The check can fail: a tile far too large for the registers is reported on both kinds of target."""
    code = """
import dataclasses
from nano_oasis.kernels.compile_check import compile_variant, variants
prefill = next(variants(256, "bf16"))
prefill = dataclasses.replace(prefill, constants={**prefill.constants, "TILE_M": 128, "TILE_N": 64})
for target in ("cuda:80", "hip:gfx942"):
    print(compile_variant(prefill, target).spills)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert [int(n) > 0 for n in done.stdout.split()] == [True, True]
