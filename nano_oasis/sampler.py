"""Logits to tokens: filters, seeded draws, log-probabilities.

Owns: the meaning of temperature, top_k, top_p, min_p, min_tokens and seed, row by row.
Must not know: text, blocks, or who else is in the batch (no row may change another's result).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from nano_oasis.request import Request, SampledToken, SamplingParams, TokenLogprob

_NUCLEUS = 1024  # top_p first looks at this many candidates; a full sort only if they do not suffice


def uniform(seed: int, index: int, position: int) -> float:
    """The draw in [0, 1) that belongs to (seed, choice index, position) and to nothing else.

    A counter-based generator: no state to carry, so preemption, batch order and neighbours cannot
    change what a request draws.
    """
    key = b"%d/%d/%d" % (seed, index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64


class Sampler:
    """Draws one token per row. `num_tokens`: ids the tokenizer knows; padded ids are never drawn."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __call__(
        self, logits: torch.Tensor, requests: Sequence[Request], ahead: Sequence[int] | None = None
    ) -> list[SampledToken]:
        """logits [N, V] fp32, one row per request, overwritten. Returns N tokens.

        ahead: per row, how many draft tokens are assumed after what the request has; default: none.
        """
        ahead = ahead or [0] * len(requests)
        if not requests:
            return []
        logits[:, self.num_tokens :] = -torch.inf
        if logits.isnan().any():  # the engine then runs the rows alone, so only the broken one fails
            raise FloatingPointError("the model's logits are not numbers")
        raw = self._copies_for_logprobs(logits, requests)
        for row, request in enumerate(requests):
            ban_ends(logits[row], request, ahead[row])
        drawn = logits.argmax(dim=-1)  # [N]; greedy rows are done
        sampled = [i for i, r in enumerate(requests) if not r.params.greedy]
        if sampled:
            chosen = [requests[i] for i in sampled]
            rows = logits if len(sampled) == len(requests) else logits[sampled]
            draws = [
                uniform(requests[i].seed, requests[i].index, requests[i].num_tokens + ahead[i])
                for i in sampled
            ]
            drawn[sampled] = draw(probabilities(rows, [r.params for r in chosen]), draws)
        out = [SampledToken(t) for t in drawn.tolist()]
        for row, values in raw.items():
            count = requests[row].params.logprobs or 0
            out[row].logprob = token_logprobs(values[None], [out[row].token_id], count)[0]
        return out

    @staticmethod
    def _copies_for_logprobs(logits: torch.Tensor, requests: Sequence[Request]) -> dict[int, torch.Tensor]:
        return {i: logits[i].clone() for i, r in enumerate(requests) if r.params.logprobs is not None}


def ban_ends(logits: torch.Tensor, request: Request, ahead: int = 0) -> None:
    """Until min_tokens are out, no end token and no stop id can be drawn. logits [V], in place."""
    p = request.params
    if len(request.output_ids) + ahead < p.min_tokens:
        banned = [i for i in (*request.end_ids, *(p.stop_token_ids or ())) if i < len(logits)]
        logits[banned] = -torch.inf


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Filtered distribution of each row: temperature, then min_p, top_k, top_p. [N, V] fp32.

    Filters are thresholds on values, so tokens that tie at the edge stay together and the result
    does not depend on sorting order. Where everything is off this is a plain softmax.
    """
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    # Subtracting the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    for row, p in enumerate(params):
        if p.min_p > 0:
            logits[row].masked_fill_(logits[row] < torch.tensor(p.min_p).log(), -torch.inf)
        if 0 < p.top_k < logits.shape[1]:
            kth = logits[row].topk(p.top_k).values[-1]
            logits[row].masked_fill_(logits[row] < kth, -torch.inf)
    probs = logits.softmax(dim=-1)
    for row, p in enumerate(params):
        if p.top_p < 1:
            probs[row].masked_fill_(probs[row] < _nucleus_edge(probs[row], p.top_p), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def _nucleus_edge(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest probability inside the nucleus: the fewest likeliest tokens that reach top_p."""
    best = probs.topk(min(_NUCLEUS, len(probs))).values
    if best.sum() < top_p and len(best) < len(probs):
        best = probs.sort(descending=True).values
    before = best.cumsum(0) - best  # mass of everything likelier; 0 for the first, which always stays
    return best[: max(int((before < top_p).sum()), 1)][-1]


def draw(probs: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Inverse transform over ids in vocabulary order. probs [N, V]; returns ids [N] int64.

    Vocabulary order, not sorted order: two near-equal logits that swap places through rounding
    must not change which id a draw lands on.
    """
    cumulative = probs.double().cumsum(dim=-1)  # [N, V]
    target = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # Rounding can push a target past the last id with any mass.
    last = probs.shape[1] - 1 - (probs.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(ids, last)


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities under the plain model distribution. logits [N, V] fp32; `top` alternatives."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(1, ids)  # [N, 1]
    ranks = (logprobs > own).sum(dim=-1) + 1
    best, best_ids = logprobs.topk(max(top, 1), dim=-1)
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), best_ids.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, value, rank, tuple(zip(others[:top], values[:top], strict=True)))
        for token, value, rank, others, values in rows
    ]
