"""Compiles every Triton kernel for GPUs that need not be present, and reads what it costs there.

    python -m nano_oasis.kernels.compile_check [--target cuda:90 ...] [--dim 64 ...] [--dtype bf16 ...]
        [--kernels attention oasis]

Owns: the list of variants, reading registers, spills and shared memory out of the binaries. Must not
know: how the kernels are launched beyond their tile settings. Exit status 1 if anything spills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nano_oasis.kernels.reference_blocks import SMALLEST_SCALE
from nano_oasis.kernels.reference_sketch import SMALLEST_QUERY
from nano_oasis.kernels.triton_common import Tiles
from nano_oasis.kernels.triton_decode import (
    MAX_SPLITS,
    MERGE_STEP,
    MERGE_TILES,
    decode_kernel,
    decode_tiles,
    merge_kernel,
)
from nano_oasis.kernels.triton_gather import gather_kernel, gather_tiles
from nano_oasis.kernels.triton_kv_write import TILES as KV_WRITE_TILES
from nano_oasis.kernels.triton_kv_write import kv_write_kernel
from nano_oasis.kernels.triton_prefill import prefill_kernel, prefill_tiles
from nano_oasis.kernels.triton_quant import TILES as QUANT_TILES
from nano_oasis.kernels.triton_quant import dequantise_kernel, quantise_kernel
from nano_oasis.kernels.triton_sketch import (
    TILE_C,
    build_tiles,
    fourbit_build_kernel,
    fourbit_logits_kernel,
    logits_tiles,
)
from nano_oasis.kernels.triton_topk import TILES as TOPK_TILES
from nano_oasis.kernels.triton_topk import top_blocks_kernel

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"cuda:80": 166_912, "cuda:90": 232_448, "cuda:100": 232_448, "hip:gfx942": 65_536}  # bytes
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = (64, 128, 256)
BLOCK_SIZE = 16
WINDOWS = (0, 512)  # without and with a sliding window


@dataclass(frozen=True)
class Variant:
    """One compilation: a kernel, the types of its arguments, its constants and launch settings."""

    name: str
    kernel: Any
    types: dict[str, str]  # every argument that is not a constant
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one compiled kernel takes. Registers per thread; spills in bytes per thread."""

    registers: int
    spills: int
    shared: int


def variants(
    dim: int, dtype: str, heads: int = 32, kv_heads: int = 8, windows: Sequence[int] = WINDOWS
) -> Iterator[Variant]:
    """The kernels as paged_prefill, paged_decode and write_kv launch them for a model of this shape."""
    group, pad = heads // kv_heads, triton.next_power_of_2(dim)
    model = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": pad, "BLOCK_SIZE": BLOCK_SIZE}
    data = "*" + dtype
    qkv = {"q_ptr": data, "k_ptr": data, "v_ptr": data}
    batch = {"table_ptr": "*i32", "starts_ptr": "*i32", "lens_ptr": "*i32", "table_width": "i32"}

    def make(
        name: str, kernel: Any, types: dict[str, str], constants: dict[str, int], tiles: Tiles
    ) -> Variant:
        return Variant(f"{name} D={dim} {dtype}", kernel, types, constants, tiles.options)

    for window in windows:
        label = " window" if window else ""
        tiles = prefill_tiles(pad, DTYPES[dtype], group)
        constants = {"WINDOW": window, **model, "TILE_M": tiles.m, "TILE_N": tiles.n}
        types = {
            **qkv,
            "out_ptr": data,
            "lse_ptr": "*fp32",
            **batch,
            "query_tiles": "i32",
            "scale_log2": "fp32",
        }
        yield make("prefill" + label, prefill_kernel, types, constants, tiles)
        tiles = decode_tiles(pad, DTYPES[dtype], group)
        constants = {"WINDOW": window, **model, "TILE_M": tiles.m, "TILE_N": tiles.n}
        for part in dict.fromkeys(("*fp32", data)):  # several splits; a single one writes the result itself
            types = {**qkv, "part_ptr": part, "part_lse_ptr": "*fp32", **batch, "splits": "i32"}
            del types["starts_ptr"]
            kind = " split" if part != data else " whole"
            yield make(
                "decode" + kind + label, decode_kernel, {**types, "scale_log2": "fp32"}, constants, tiles
            )
    types = {
        "part_ptr": "*fp32",
        "part_lse_ptr": "*fp32",
        "out_ptr": data,
        "lse_ptr": "*fp32",
        "splits": "i32",
    }
    constants = {"DIM": dim, "DIM_PAD": pad, "MAX": MAX_SPLITS, "STEP": MERGE_STEP}
    yield make("merge", merge_kernel, types, constants, MERGE_TILES)
    types = {"k_ptr": data, "v_ptr": data, "k_cache_ptr": data, "v_cache_ptr": data, "slots_ptr": "*i64"}
    width = kv_heads * dim
    constants = {"WIDTH": width, "WIDTH_PAD": triton.next_power_of_2(width)}
    yield make("kv_write", kv_write_kernel, types, constants, KV_WRITE_TILES)


def oasis_variants(
    dim: int, dtype: str, heads: int = 32, kv_heads: int = 8, block_size: int = BLOCK_SIZE
) -> Iterator[Variant]:
    """What select_oasis_kernels has for a GPU, as its functions launch it for a model of this shape."""
    size = DTYPES[dtype].itemsize
    where = f" D={dim} B={block_size} {dtype}"
    block = {"HEADS": kv_heads, "DIM": dim, "BLOCK_SIZE": block_size}
    half, pad = triton.next_power_of_2(dim // 2), triton.next_power_of_2(dim)
    data, sketch = "*" + dtype, {"codes_ptr": "*u8", "base_ptr": "*fp16", "step_ptr": "*fp16"}

    types = {"k_ptr": data, **sketch}
    constants: dict[str, Any] = {**block, "HALF_PAD": half}
    tiles = build_tiles(half, block_size)
    yield Variant("sketch_build" + where, fourbit_build_kernel, types, constants, tiles.options)

    types = {"q_ptr": "*fp32", **sketch, "table_ptr": "*i64", "counts_ptr": "*i64", "out_ptr": "*fp32"}
    types |= {"width": "i32", "first_head": "i32"}
    tiles = logits_tiles(heads // kv_heads, block_size)
    constants = {**block, "HEADS": heads, "KV_HEADS": kv_heads, "SLAB_HEADS": kv_heads}
    constants |= {"TILE_M": tiles.m, "TILE_N": tiles.n, "TILE_C": TILE_C}
    constants["SMALLEST"] = SMALLEST_QUERY
    yield Variant("sketch_logits" + where, fourbit_logits_kernel, types, constants, tiles.options)

    types = {"mass_ptr": "*fp32", "forced_ptr": "*u8", "valid_ptr": "*u8", "ids_ptr": "*i64"}
    types |= {"width": "i32", "heads": "i32", "count": "i32"}
    constants = {"MASKED": True, "TILE_M": TOPK_TILES.m, "TILE_N": TOPK_TILES.n}
    yield Variant("top_blocks" + where, top_blocks_kernel, types, constants, TOPK_TILES.options)

    row = kv_heads * dim
    tiles = gather_tiles(block_size * row, size)
    for label, group in ((" whole", 1), (" heads", 2)):  # whole blocks, and one of two head groups
        types = {p + "_ptr": data for p in ("host_k", "host_v", "slot_k", "slot_v")}
        types |= {"blocks_ptr": "*i64", "slots_ptr": "*i64"}
        constants = {"BLOCK_STRIDE": block_size * row, "TOKEN_STRIDE": row, "ROW": row // group}
        constants |= {"BLOCK_SIZE": block_size, "CHUNK": tiles.n}
        yield Variant("gather" + label + where, gather_kernel, types, constants, tiles.options)

    for label, per_channel in ((" keys", True), (" values", False)):
        constants = {**block, "DIM_PAD": pad, "PER_CHANNEL": per_channel}
        types = {"x_ptr": data, "codes_ptr": "*i8", "scale_ptr": "*i16", "limit": "fp32"}
        small = {**constants, "SMALLEST": SMALLEST_SCALE}
        yield Variant("quantise" + label + where, quantise_kernel, types, small, QUANT_TILES.options)
        types = {"codes_ptr": "*i8", "scale_ptr": "*bf16", "out_ptr": data}
        yield Variant("dequantise" + label + where, dequantise_kernel, types, constants, QUANT_TILES.options)


def compile_variant(variant: Variant, target: str) -> Cost:
    """Compile for a target by name. Raises whatever Triton raises when it cannot."""
    names = variant.kernel.arg_names
    signature = {n: variant.types.get(n, "constexpr") for n in names}
    missing = [n for n in names if n not in variant.types and n not in variant.constants]
    if missing:
        raise ValueError(f"{variant.name}: no type or value for {', '.join(missing)}")
    # As in a launch: tensors start at multiples of 16 bytes, except the ones declared otherwise.
    loose = variant.kernel.do_not_specialize_on_alignment
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") and n not in loose]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(variant.kernel, signature, variant.constants, attrs)
    compiled = triton.compile(source, target=TARGETS[target], options=variant.options)
    if target.startswith("hip"):
        return _amd_cost(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia_cost(compiled.asm["cubin"], compiled.metadata.shared)


def _nvidia_cost(cubin: bytes, shared: int) -> Cost:
    """Triton carries NVIDIA's cuobjdump; spilled registers show up as stack or local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text!r}")
    registers, stack, static, local = map(int, found.groups())
    return Cost(registers, stack + local, max(shared, static))


def _amd_cost(assembly: str, shared: int) -> Cost:
    """The assembly's metadata counts registers and spills (in registers of 4 bytes)."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if not found:
            raise RuntimeError(f"no .{name} in the assembly's metadata")
        return int(found[1])

    spills = 4 * (field("vgpr_spill_count") + field("sgpr_spill_count"))
    scratch = field("private_segment_fixed_size")
    return Cost(field("vgpr_count"), max(spills, scratch), max(shared, field("group_segment_fixed_size")))


def _asked_for(args: argparse.Namespace) -> Iterator[Variant]:
    for dtype in args.dtype:
        for dim in args.dim:
            if "attention" in args.kernels:
                yield from variants(dim, dtype, args.heads, args.kv_heads, args.window)
            if "oasis" in args.kernels:
                for block_size in args.block:
                    yield from oasis_variants(dim, dtype, args.heads, args.kv_heads, block_size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nano_oasis.kernels.compile_check", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--dim", nargs="+", type=int, default=list(DIMS))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bf16", "fp16"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--window", nargs="+", type=int, default=list(WINDOWS), help="tokens; 0 = none")
    parser.add_argument(
        "--kernels", nargs="+", choices=("attention", "oasis"), default=["attention", "oasis"]
    )
    parser.add_argument("--block", nargs="+", type=int, default=[BLOCK_SIZE], help="of the oasis kernels")
    args = parser.parse_args(argv)
    bad = 0
    print(f"{'registers / spilled bytes / shared KiB':<38}" + "".join(f"{t:>16}" for t in args.target))
    for variant in _asked_for(args):
        cells = []
        for target in args.target:
            cost = compile_variant(variant, target)
            wrong = cost.spills > 0 or cost.shared > SHARED_LIMIT[target]
            bad += wrong
            mark = "!" if wrong else ""
            cells.append(f"{mark}{cost.registers}/{cost.spills}/{cost.shared / 1024:.1f}")
        print(f"{variant.name:<38}" + "".join(f"{c:>16}" for c in cells), flush=True)
    print(
        "no spills, shared memory within limits" if not bad else f"{bad} entries marked ! spill or do not fit"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
