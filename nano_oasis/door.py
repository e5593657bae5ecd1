"""What an engine refuses before it queues a request: what could never run.

Owns: the checks that need the engine's limits. Must not know: the step loop, text, sockets.
The checks of single parameters are SamplingParams' own.
"""

from __future__ import annotations

from collections.abc import Sequence

from nano_oasis.request import Request, RequestError, SamplingParams
from nano_oasis.scheduler.scheduler import Gate


def longest(prompt_ids: Sequence[int], params: SamplingParams, limit: int, vocab_size: int) -> int:
    """The most tokens prompt plus output may reach; max_tokens beyond `limit` is clamped.

    Raises RequestError for a prompt that is empty, too long, or holds ids outside the vocabulary.
    """
    if not prompt_ids:
        raise RequestError("prompt must have at least one token", "prompt")
    room = 0 if params.max_tokens == 0 else 1
    if len(prompt_ids) + room > limit:
        raise RequestError(
            f"prompt has {len(prompt_ids)} tokens, but the context limit is {limit} tokens"
            " for prompt and output together",
            "prompt",
        )
    for i in prompt_ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise RequestError(
                f"prompt token ids must be between 0 and {vocab_size - 1}, got {i!r}", "prompt"
            )
    return limit if params.max_tokens is None else min(limit, len(prompt_ids) + params.max_tokens)


def check_mode(request: Request, gate: Gate | None) -> None:
    """Raises RequestError if the request asks for a KV mode that the engine does not have room for."""
    params = request.params
    for name in ("kv_budget", "miss_policy"):
        if getattr(params, name) is not None and (gate is None or params.kv_mode == "dense"):
            raise RequestError(f"{name} needs kv_mode=oasis, for the engine and for the request", name)
    if params.kv_mode in ("oasis", "lossless") and gate is None:
        raise RequestError(
            f"kv_mode={params.kv_mode} needs an engine that was started with kv_mode=oasis or lossless",
            "kv_mode",
        )
    if params.miss_policy is not None and params.kv_mode == "lossless":
        raise RequestError(
            "miss_policy means nothing with kv_mode=lossless, which reads everything", "miss_policy"
        )
    if params.miss_policy is not None and gate is not None:
        why = gate.policy_refusal(params.miss_policy)
        if why is not None:
            raise RequestError(f"miss_policy={params.miss_policy}: {why}", "miss_policy")
    why = gate.refusal(request) if gate is not None else None
    if why is not None:
        raise RequestError(why, "kv_mode" if params.kv_mode in ("dense", "lossless") else "kv_budget")
