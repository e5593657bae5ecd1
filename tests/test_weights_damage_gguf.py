"""Damaged GGUF files: a precise error within a second, in flat memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage_helpers import EDITS, HUGE, QUICK, loads_or_refuses, refused, u64
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoints import hf_state, hf_to_gguf, make_hf

from nano_oasis.weights import CheckpointError, load_checkpoint, load_config, read_gguf_metadata

TOKENS = [f"token{i}" for i in range(128)]


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    make_hf("llama", folder)
    path = hf_to_gguf(folder, folder / "m.gguf", "Q8_0", extra=lambda w: w.add_token_list(TOKENS))
    return path.read_bytes()


class Header:
    """Where things are in a GGUF file's header, found by searching for their names."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def after(self, name: str) -> int:
        at = self.raw.index(u64(len(name)) + name.encode())
        return at + 8 + len(name)

    def poke(self, at: int, new: bytes) -> bytes:
        return self.raw[:at] + new + self.raw[at + len(new) :]

    def tensor(self, name: str, field: str, new: int) -> bytes:
        """Set the number of dimensions, the first dimension, the type or the offset of a tensor."""
        at = self.after(name)
        dims = struct.unpack_from("<I", self.raw, at)[0]
        places = {"ndims": (at, "<I"), "dim": (at + 4, "<Q")}
        places |= {"type": (at + 4 + 8 * dims, "<I"), "offset": (at + 8 + 8 * dims, "<Q")}
        place, form = places[field]
        return self.poke(place, struct.pack(form, new))

    def offset(self, name: str) -> int:
        at = self.after(name)
        dims = struct.unpack_from("<I", self.raw, at)[0]
        return int(struct.unpack_from("<Q", self.raw, at + 8 + 8 * dims)[0])


Q0, Q1 = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
GGUF_DAMAGE: dict[str, tuple[Callable[[Header], bytes], str]] = {
    "empty": (lambda h: b"", "0 bytes long"),
    "too short": (lambda h: h.raw[:20], "20 bytes long"),
    "wrong magic": (lambda h: h.poke(0, b"GGML"), "starts with b'GGML'"),
    "version 99": (lambda h: h.poke(4, struct.pack("<I", 99)), "version 99; versions 2 and 3"),
    "version 1": (lambda h: h.poke(4, struct.pack("<I", 1)), "version 1;"),
    "big-endian": (lambda h: h.poke(4, struct.pack(">I", 3)), "big-endian"),
    "tensor count 2^60": (lambda h: h.poke(8, u64(HUGE)), f"{HUGE} tensors"),
    "kv count 2^60": (lambda h: h.poke(16, u64(HUGE)), f"{HUGE} keys"),
    "tensor count + 1": (
        lambda h: h.poke(8, u64(struct.unpack_from("<Q", h.raw, 8)[0] + 1)),
        "tensor|string",
    ),
    "kv count 60,000": (lambda h: h.poke(16, u64(60_000)), "keys|key|type"),
    "key length 2^60": (lambda h: h.poke(24, u64(HUGE)), f"a key claims a string of {HUGE}"),
    "string length 2^60": (
        lambda h: h.poke(h.after("general.architecture") + 4, u64(HUGE)),
        f"general.architecture.*{HUGE}",
    ),
    "string longer than the file": (
        lambda h: h.poke(h.after("general.architecture") + 4, u64(2**23)),
        "ends inside key 'general.architecture'",
    ),
    "array length 2^60": (
        lambda h: h.poke(h.after("tokenizer.ggml.tokens") + 8, u64(HUGE)),
        f"tokenizer.ggml.tokens.*{HUGE} array elements",
    ),
    "array length 2^22": (
        lambda h: h.poke(h.after("tokenizer.ggml.tokens") + 8, u64(2**22)),
        "ends inside key 'tokenizer.ggml.tokens'",
    ),
    "number array past the end": (
        lambda h: h.poke(h.after("tokenizer.ggml.tokens") + 4, struct.pack("<IQ", 10, 2**22)),
        "ends inside key 'tokenizer.ggml.tokens'",
    ),
    "array of arrays": (
        lambda h: h.poke(h.after("tokenizer.ggml.tokens") + 4, struct.pack("<I", 9)),
        "tokenizer.ggml.tokens.*array of type 9",
    ),
    "unknown value type": (
        lambda h: h.poke(h.after("general.architecture"), struct.pack("<I", 77)),
        "general.architecture.*type 77",
    ),
    "not UTF-8": (lambda h: h.poke(h.after("general.architecture") + 12, b"\xff\xff"), "not UTF-8"),
    "key twice": (
        lambda h: h.raw.replace(b"llama.attention.key_length", b"llama.attention.head_count"),
        "'llama.attention.head_count' appears twice",
    ),
    "offset outside": (lambda h: h.tensor(Q0, "offset", 2**40), f"{Q0}' would end at byte"),
    "offset 2^63": (lambda h: h.tensor(Q0, "offset", 2**63), f"{Q0}' would end at byte"),
    "offset unaligned": (lambda h: h.tensor(Q0, "offset", h.offset(Q0) + 1), f"{Q0}.*multiple of 32"),
    "overlap": (lambda h: h.tensor(Q0, "offset", h.offset(Q1)), f"{Q0}.*{Q1}.*overlap|{Q1}.*{Q0}.*overlap"),
    "partial overlap": (lambda h: h.tensor(Q0, "offset", h.offset(Q0) + 32), f"{Q0}.*overlap"),
    "dimension 2^60": (lambda h: h.tensor(Q0, "dim", HUGE), f"{Q0}' would end at byte"),
    "dimension 0": (lambda h: h.tensor(Q0, "dim", 0), f"{Q0}.*must be positive"),
    "half a block": (lambda h: h.tensor(Q0, "dim", 48), f"{Q0}.*multiple of 32"),
    "2^31 dimensions": (lambda h: h.tensor(Q0, "ndims", 2**31), f"{Q0}' claims {2**31} dimensions"),
    "unknown tensor type": (lambda h: h.tensor(Q0, "type", 999), f"{Q0}' has the unknown type 999"),
    "tensor twice": (
        lambda h: h.poke(h.after(Q1) - len(Q1), Q0.encode()),
        f"{Q0}' appears twice",
    ),
    "cut by one byte": (lambda h: h.raw[:-1], "cut"),
    "cut in half": (lambda h: h.raw[: len(h.raw) // 2], "would end at byte.*cut"),
    "cut in the vocabulary": (lambda h: h.raw[: h.after("tokenizer.ggml.tokens") + 100], "cut|hold"),
}


@pytest.mark.parametrize("name", GGUF_DAMAGE)
def test_b071_damaged_gguf(name: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    damage, message = GGUF_DAMAGE[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(damage(Header(gguf_bytes)))
    refused(lambda: load_checkpoint(path, None), "broken.gguf", message)
    refused(lambda: read_gguf_metadata(path), "broken.gguf", message)


def test_b071_gguf_may_end_after_a_tensor_or_its_padding_only(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for shorter in range(8):  # the last tensor's floats, 64 of them, replaced by padding
        data = Header(gguf_bytes).tensor("output_norm.weight", "dim", 64 - shorter)
        for cut in range(33):
            path.write_bytes(data[: len(data) - cut])
            if cut in (0, 4 * shorter):
                read_gguf_metadata(path)
            else:
                with pytest.raises(CheckpointError, match=r"output_norm\.weight"):
                    read_gguf_metadata(path)


@pytest.mark.parametrize(("kind", "name"), [(20, "IQ4_NL"), (24, "I8"), (2 + 8, "Q2_K"), (39, "MXFP4")])
def test_b065_unsupported_types_are_named(kind: int, name: str, tmp_path: Path) -> None:
    make_hf("llama", tmp_path, hidden_size=256)
    raw = hf_to_gguf(tmp_path, tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(Header(raw).tensor(Q0, "type", kind))
    refused(lambda: load_checkpoint(tmp_path / "m.gguf", None), Q0, f"type {name}", "Q8_0, Q4_0")


def test_gguf_contents_that_do_not_fit(tmp_path: Path) -> None:
    make_hf("llama", tmp_path)
    state = hf_state(tmp_path)
    path = tmp_path / "m.gguf"
    up = "model.layers.1.mlp.up_proj.weight"

    hf_to_gguf(tmp_path, path, state={n: t for n, t in state.items() if n != up})
    refused(lambda: load_config(path), "m.gguf", "lacks 1", "blk.1.ffn_up.weight")
    hf_to_gguf(tmp_path, path, state=state | {"model.layers.1.mlp.up_proj.bias": torch.zeros(96)})
    refused(lambda: load_config(path), "m.gguf", "no place for.*blk.1.ffn_up.bias")
    hf_to_gguf(tmp_path, path, state=state | {up: torch.zeros(96, 32)})
    refused(lambda: load_config(path), "blk.1.ffn_up.weight", r"\[96, 32\]", r"\[96, 64\]")
    hf_to_gguf(tmp_path, path, state={n: t for n, t in state.items() if "embed_tokens" not in n})
    refused(lambda: load_config(path), "token_embd.weight")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overwritten scales may be infinite
@QUICK
@given(edits=EDITS, cut=st.none() | st.integers(0, 6000))
def test_fuzz_gguf_header(
    gguf_bytes: bytes, edits: list[tuple[int, bytes]], cut: int | None, tmp_path: Path
) -> None:
    raw = gguf_bytes
    for at, new in edits:
        raw = raw[:at] + new + raw[at + len(new) :]
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw[:cut])
    loads_or_refuses(path)
