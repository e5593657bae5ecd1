"""How each server is started on the default model: ours in several modes, and the peers.

Owns: command lines. Must not know: what is measured. setup.sh installs the peers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

THREADS = 2
HOME = Path(os.environ.get("PEERS", "/tmp/peers"))


# On a CPU with AMX this llama.cpp ends with a segmentation fault in ggml_backend_amx_mul_mat on Q8_0.
_AMX_CRASHES = ["--no-repack"] if "amx_tile" in Path("/proc/cpuinfo").read_text() else []


@dataclass(frozen=True)
class Load:
    """What a server has to hold: so many streams of so many tokens, prompt and answer."""

    streams: int
    tokens: int


@dataclass(frozen=True)
class Server:
    """command(port, load): the arguments it is started with. A path that must be there before: `needs`."""

    command: Callable[[int, Load], list[str]]
    needs: Path = Path(sys.executable)
    env: dict[str, str] = field(default_factory=dict)


def _ours(*options: str) -> Server:
    def command(port: int, load: Load) -> list[str]:
        return [
            sys.executable, "-m", "nano_oasis.serve", "--port", str(port), "--threads", str(THREADS),
            "--max-model-len", str(min(8192, load.tokens)), "--max-num-seqs", str(load.streams), *options,
        ]  # fmt: skip

    return Server(command)


def _oasis(budget: int, *options: str) -> Server:
    """A device with room for the working sets only: 512 tokens beside the budget for each stream."""
    token = 46_080  # bytes of fp32 KV, all layers

    def command(port: int, load: Load) -> list[str]:
        memory = load.streams * (budget + 512) * token
        return _ours("--kv-mode", "oasis", "--kv-budget", str(budget), "--device-kv-memory", str(memory),
                     *options).command(port, load)  # fmt: skip

    return Server(command)


def _llamacpp(model: str, kv: str = "f16") -> Server:
    path, binary = HOME / "model" / f"{model}.gguf", HOME / "llamacpp/build/bin/llama-server"

    def command(port: int, load: Load) -> list[str]:
        room = load.streams * (load.tokens + 255 & ~255)
        return [
            str(binary), "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "--alias", "local",
            "-t", str(THREADS), "-tb", str(THREADS), "-np", str(load.streams), "-no-kvu", "-c", str(room),
            "-ctk", kv, "-ctv", kv, "-fa", "auto", "--offline", "--no-ui", *_AMX_CRASHES,
        ]  # fmt: skip

    return Server(command, path)


def _vllm(*options: str) -> Server:
    binary = HOME / "vllm/bin/vllm"

    def command(port: int, load: Load) -> list[str]:
        return [
            str(binary), "serve", str(HOME / "model/hf"), "--served-model-name", "local", "--host",
            "127.0.0.1", "--port", str(port), "--dtype", "float32",
            "--max-model-len", str(min(8192, load.tokens)),
            "--max-num-seqs", str(load.streams), *options,
        ]  # fmt: skip

    env = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "auto",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }  # fmt: skip
    return Server(command, binary, env)


def _transformers() -> Server:
    binary = HOME / "transformers/bin/transformers"

    def command(port: int, load: Load) -> list[str]:
        return [
            str(binary), "serve", str(HOME / "model/hf"), "--continuous-batching", "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--device", "cpu",
        ]  # fmt: skip

    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(HOME / "hub"), "OMP_NUM_THREADS": str(THREADS)}
    return Server(command, binary, env)


SERVERS = {  # ours: the file's own four bits, unless the name says otherwise
    "ours": _ours(),
    "ours-fp32": _ours("--weights", "float32"),
    "ours-fp16": _ours("--weights", "float16"),
    "ours-int8": _ours("--weights", "int8"),
    "ours-oasis": _oasis(512),
    "ours-oasis-fp32": _oasis(512, "--weights", "float32"),
    "ours-oasis-int8": _oasis(512, "--weights", "int8"),
    "ours-draft": _ours("--draft", "auto"),
    "llamacpp-f32": _llamacpp("f32"),
    "llamacpp-f16": _llamacpp("f16"),
    "llamacpp-q8_0": _llamacpp("q8_0"),
    "vllm": _vllm("--enforce-eager"),
    "transformers": _transformers(),
}
