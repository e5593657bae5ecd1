"""Frozen settings of a model and of an engine.

Owns: the names, defaults, units and limits of every option, and their validation.
Must not know: torch, files, sockets, or how any option is carried out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from nano_oasis.request import KV_MODES, MISS_POLICIES

MOST_DRAFTS = 6  # draft tokens of a request and step when nobody says how many
DRAFTS = ("none", "ngram", "self", "model", "head", "auto")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the setting, the value and the limit."""


def parse_bytes(value: int | str, name: str = "size") -> int:
    """`2147483648`, `"2GiB"`, `"512MB"` -> bytes. Raises ConfigError on anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name}: expected a number of bytes or a string like '2GiB', got {value!r}")
    if isinstance(value, int):
        amount: float = value
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not found or found[2].upper() not in _UNITS:
            raise ConfigError(f"{name}: expected a number of bytes or a string like '2GiB', got {value!r}")
        amount = float(found[1]) * _UNITS[found[2].upper()]
    if amount <= 0 or amount > 2**60:
        raise ConfigError(f"{name}: must be between 1 byte and 2^60 bytes, got {value!r}")
    return int(amount)


def default_threads() -> int:
    """CPU threads where no number is given: OMP_NUM_THREADS as everywhere, else the cores there are."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else os.cpu_count() or 1


def format_bytes(count: float) -> str:
    """1610612736 -> '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `type` is one of ROPE_TYPES; see model.rope_frequencies."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3 and yarn: the context length of pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None = derived
    mscale: float | None = None  # yarn (DeepSeek spelling); None = derived
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    freq_factors: tuple[float, ...] | None = None  # per-frequency divisors from a GGUF (rope_freqs)


ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """What the one decoder (model.py) must know about a checkpoint. Families differ only here."""

    family: str  # llama, mistral, qwen2, qwen3, gemma3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # trained context length, in tokens
    rms_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # sliding-window layers, where they differ (Gemma 3)
    windows: tuple[int | None, ...] = ()  # per layer: sliding window in tokens, None = full
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head's query and key before rope (Qwen3, Gemma 3)
    sandwich_norms: bool = False  # norms after attention and after the MLP too (Gemma 3)
    activation: str = "silu"  # or gelu_tanh
    embed_scale: float = 1.0
    attn_scale: float = 0.0  # 0 = head_dim ** -0.5
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # from config.json, generation_config.json or GGUF keys

    @property
    def scale(self) -> float:
        return self.attn_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def _opt(default: Any, help: str, **meta: Any) -> Any:
    return field(default=default, metadata={"help": help, **meta})


def _oasis(default: Any, help: str, **meta: Any) -> Any:
    """An option that means something only with kv_mode=oasis, and is refused without it."""
    return _opt(default, f"oasis: {help}", oasis=True, **meta)


@dataclass(frozen=True)
class EngineConfig:
    """Every engine option. The command line, `LLM(...)` and `AsyncEngine(...)` are made from this table."""

    model: str = _opt("smollm2", "GGUF file, model folder, hub id, or 'smollm2' (the packaged default)")
    served_model_name: str | None = _opt(None, "name in the API; default: derived from --model")
    dtype: str = _opt("auto", "weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    weights: str = _opt(
        "auto",
        "how matrices are kept on a CPU: auto = as the file has them; int8 = 8 bits, a scale for each 32",
        choices=("auto", "float32", "float16", "int8"),
    )  # fmt: skip
    device: str = _opt("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    threads: int = _opt(0, "CPU threads of the step; 0 = OMP_NUM_THREADS, else all cores", low=0, high=1024)
    seed: int | None = _opt(None, "makes requests without a seed repeatable", low=0, high=2**63 - 1)
    max_model_len: int | None = _opt(
        None, "longest prompt plus output, in tokens; default: the model's", low=2, high=2**24
    )
    max_num_seqs: int = _opt(256, "requests running at once", low=1, high=65536)
    max_num_batched_tokens: int = _opt(512, "tokens computed per step", low=1, high=2**20)
    block_size: int = _opt(
        None, "tokens per KV block; default: 16, or 8 where blocks are chosen (kv_mode=oasis)",
        low=1, high=1024,
    )  # fmt: skip
    device_kv_memory: int | str | None = _opt(None, "bytes (or '2GiB') of KV on the device", bytes=True)
    num_device_blocks: int | None = _opt(
        None, "KV blocks on the device; overrides --device-kv-memory", low=1, high=2**31 - 1
    )
    enable_prefix_caching: bool = _opt(True, "reuse the KV of shared prompt prefixes")
    kv_mode: str = _opt(
        "dense", "dense: all KV on the device; oasis: all in host memory, a working set on the device;"
        " lossless: so too, and every token is verified with all of it",
        choices=KV_MODES,
    )  # fmt: skip
    host_kv_memory: int | str | None = _oasis(None, "bytes (or '8GiB') of KV in host memory", bytes=True)
    host_kv_path: str | None = _oasis(None, "file or folder that holds the host KV instead of memory")
    host_kv_format: str = _oasis("auto", "auto = as the model; int8", choices=("auto", "int8"))
    kv_budget: int = _oasis(2048, "tokens attention reads per layer under pressure", low=1, high=2**24)
    selector: str = _oasis(
        "fourbit", "key sketch that ranks blocks",
        choices=("exact", "mean", "minmax", "sign1", "twobit", "fourbit"),
    )  # fmt: skip
    predictor: str = _oasis(
        "previous", "what is prefetched: what the last query wanted; what the drafts' queries want; current ="
        " nothing, misses are waited for",
        choices=("previous", "lookahead", "current"),
    )  # fmt: skip
    miss_policy: str = _oasis(
        "wait",
        "a wanted block that is late: wait for it, or for the heavy ones, take its mean, or skip it",
        choices=MISS_POLICIES,
    )  # fmt: skip
    repair_threshold: float = _oasis(0.02, "repair waits above this share of a choice's mass", low=0, high=1)
    sink_blocks: int = _oasis(1, "first blocks, always read", low=0, high=1024)
    recent_blocks: int = _oasis(4, "newest blocks, always read", low=1, high=1024)
    dense_layers: int = _oasis(0, "first layers that keep and read everything", low=0, high=1024)
    buffer_factor: float = _oasis(1.25, "blocks kept on the device per block read", low=1, high=16)
    admission_cap: int | None = _oasis(
        None, "blocks prefetched per row, layer and pass; default: by the link, at most 5% of a budget",
        low=0, high=65536,
    )  # fmt: skip
    head_groups: int | None = _oasis(
        None, "block choices per layer; must divide the KV heads; default: one for each", low=1, high=1024
    )
    audit_every: int = _oasis(0, "steps between checks of true mass recall; 0 = never", low=0, high=2**31)
    audit_recall: float = _oasis(
        0.0, "a request audited below this recall has its budget raised", low=0, high=1
    )
    draft: str = _opt(
        "none", "speculative decoding: who proposes tokens that the model verifies", choices=DRAFTS
    )
    num_draft_tokens: int | None = _opt(
        None, "draft tokens per request and step, always; default: as many as pay, 0 included", low=1, high=16
    )
    draft_model: str | None = _opt(None, "draft=model: the smaller checkpoint, with the same vocabulary")
    draft_head: str | None = _opt(
        None, "draft=head or auto: file made by nano_oasis.spec.train; default: the built-in"
    )
    draft_layers: str | None = _opt(
        None, "draft=self: the layers that draft, such as '0-5,28', or a file that calibration wrote"
    )
    chat_template: str | None = _opt(None, "file with a chat template that replaces the model's")
    stall_timeout: float = _opt(120.0, "seconds without progress before health turns bad", low=1, high=86400)

    def groups_of(self, num_kv_heads: int) -> int:
        """Block choices per layer for a model. Raises ConfigError if its KV heads cannot be shared out so."""
        if num_kv_heads % (self.head_groups or 1):
            raise ConfigError(
                f"head_groups: {self.head_groups} does not divide the model's {num_kv_heads} KV heads"
            )
        return self.head_groups or (num_kv_heads if self.chooses else 1)

    @property
    def chooses(self) -> bool:
        """Attention of some pass reads chosen blocks: in the lossless mode that of draft=self alone."""
        return self.kv_mode == "oasis" or (self.kv_mode == "lossless" and self.draft == "self")

    def __post_init__(self) -> None:
        if self.block_size is None:
            object.__setattr__(self, "block_size", 8 if self.chooses else 16)
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            self._check(f.name, getattr(self, f.name), hints[f.name], f.metadata)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token per step"
            )
        if self.kv_mode == "lossless" and self.host_kv_format != "auto":
            raise ConfigError(
                f"host_kv_format: lossless needs auto; {self.host_kv_format} rounds what it keeps"
            )
        if self.kv_mode == "dense":
            for f in dataclasses.fields(self):
                if f.metadata.get("oasis") and getattr(self, f.name) != f.default:
                    raise ConfigError(f"{f.name}: needs kv_mode=oasis or lossless, this engine is dense")
        if self.predictor == "current" and self.miss_policy in ("skip", "estimate"):
            raise ConfigError(
                f"miss_policy: {self.miss_policy} means nothing with predictor=current: all is waited for"
            )
        readers = {"draft_model": ("model",), "draft_head": ("head", "auto"), "draft_layers": ("self",)}
        for name, kinds in readers.items():
            if getattr(self, name) is not None and self.draft not in kinds:
                raise ConfigError(
                    f"{name}: needs draft={' or '.join(kinds)}, this engine has draft={self.draft}"
                )
        if self.draft == "model" and self.draft_model is None:
            raise ConfigError("draft: model needs draft_model, the checkpoint that drafts")
        if self.num_draft_tokens is not None and self.draft == "none":
            raise ConfigError("num_draft_tokens: needs a draft, and draft is none")
        if self.predictor == "lookahead" and self.draft == "none":
            raise ConfigError("predictor: lookahead needs a draft, and draft is none")
        if self.kv_mode == "lossless":  # verification reads everything; drafts wait for nothing
            unread = () if self.chooses else ("head_groups",)
            for name in ("predictor", "miss_policy", "audit_every", *unread):
                if getattr(self, name) != getattr(EngineConfig, name):  # the default
                    raise ConfigError(f"{name}: means nothing with kv_mode=lossless, which reads everything")
        if self.audit_recall and not self.audit_every:
            raise ConfigError("audit_recall: needs audit_every, or nothing is ever audited")

    @property
    def most_drafts(self) -> int:
        """Draft tokens of one request in one step, at most."""
        return 0 if self.draft == "none" else self.num_draft_tokens or MOST_DRAFTS

    @staticmethod
    def _check(name: str, value: Any, hint: Any, meta: Any) -> None:
        types = get_args(hint) or (hint,)
        if meta.get("bytes"):
            if value is not None:
                parse_bytes(value, name)
            return
        if isinstance(value, bool) and bool not in types:
            raise ConfigError(f"{name}: expected {hint}, got {value!r}")
        if isinstance(value, int) and float in types:
            value = float(value)
        if not isinstance(value, types):
            raise ConfigError(f"{name}: expected {getattr(hint, '__name__', hint)}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: must be finite, got {value!r}")
        if "choices" in meta and value not in meta["choices"]:
            raise ConfigError(f"{name}: must be one of {', '.join(meta['choices'])}; got {value!r}")
        if value is not None and "low" in meta and not meta["low"] <= value <= meta["high"]:
            raise ConfigError(f"{name}: must be between {meta['low']} and {meta['high']}, got {value!r}")

    @classmethod
    def make(cls, **options: Any) -> EngineConfig:
        """Like the constructor, but an unknown option is refused with the closest known name."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}{hint}")
        return cls(**options)


@dataclass(frozen=True)
class EngineInfo:
    """What a start-up line says."""

    model_name: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_tokens: int
    kv_bytes: int
    max_model_len: int
    kv_mode: str = "dense"
    host_kv_bytes: int = 0
