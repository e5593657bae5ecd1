"""Exact attention of a prefill chunk to a context that is not on the device.

Owns: the staging ring through which a layer's earlier blocks pass, and the merge of partial results.
Must not know: why the blocks are not on the device, selection, the scheduler.

Each piece gives (out, lse); two pieces merge by their log-sum-exp weights, so the result equals attention
over everything at once (the online softmax of FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_oasis.kernels.dispatch import numba_works
from nano_oasis.kernels.reference import FEW_QUERIES, attend, attend_many
from nano_oasis.memory.host_tier import HostTier

QUERY_CHUNK = 256  # queries scored at once: keeps the score matrix small


class Stage:
    """A ring of `blocks` staging blocks, part of the device's memory."""

    def __init__(
        self, blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (blocks, block_size, heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def stream_attention(
    q: Tensor, first: int, host: HostTier, layer: int, blocks: list[int], stage: Stage,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [n, Hq, D], positions first.., to the sealed `blocks` before it (positions 0..).

    Returns out [n, Hq, D] fp32 and lse [n, Hq]; a query that sees none of them has zeros and -inf.
    """
    size = stage.keys.shape[1]
    skip = max(0, first + 1 - window) // size if window else 0  # blocks no query can see
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for at in range(skip, len(blocks), len(stage.keys)):
        ids = torch.tensor(blocks[at : at + len(stage.keys)])
        keys, values = stage.keys[: len(ids)], stage.values[: len(ids)]
        host.load(layer, ids, keys, values)
        piece = piece_attention(q, keys.flatten(0, 1), values.flatten(0, 1), first, at * size, scale, window)
        out, lse = merge(out, lse, *piece)
    return out, lse


def piece_attention(
    q: Tensor, k: Tensor, v: Tensor, q_first: int, k_first: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal (and windowed) attention of q [n, Hq, D] at positions q_first.. to k, v [m, H, D] at k_first..

    Returns out [n, Hq, D] fp32 and lse [n, Hq]; a query that sees no key has zeros and -inf.
    """
    if numba_works():
        from nano_oasis.kernels import cpu_prefill

        if cpu_prefill.supports_piece(q, k, v):
            return cpu_prefill.piece(q, k, v, q_first, k_first, scale, window)
    heads, dim = k.shape[1], k.shape[2]
    keys, values = (x.float().transpose(0, 1)[:, None] for x in (k, v))  # [H, 1, m, D]
    k_at = k_first + torch.arange(len(k), device=q.device)
    many = q.device.type == "cpu" and not window and k_first <= q_first  # and each query sees a key
    outs, sums = [], []
    for a in range(0, len(q), QUERY_CHUNK):
        part = q[a : a + QUERY_CHUNK].float()
        n = len(part)
        q_at = q_first + a + torch.arange(n, device=q.device)[:, None]
        bias = None
        if window or k_first + len(k) > q_first + a + 1:  # else all of it is visible to all
            hidden = k_at > q_at  # [n, m]
            if window:
                hidden |= k_at <= q_at - window
            bias = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, -torch.inf)
        query = part.view(n, heads, -1, dim).permute(1, 2, 0, 3)  # [H, G, n, D]
        shape = (heads, query.shape[1], len(k), dim)
        k_all, v_all = keys.expand(shape), values.expand(shape)
        s: Tensor | None
        if many and n > FEW_QUERIES:
            o, s = attend_many(query, k_all, v_all, scale, bias)
        else:
            o, s = attend(query, k_all, v_all, scale, bias, return_lse=True)
        assert s is not None
        outs.append(o.nan_to_num(0.0).permute(2, 0, 1, 3).reshape(n, -1, dim))
        sums.append(s.permute(2, 0, 1).reshape(n, -1))
    return torch.cat(outs), torch.cat(sums)


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions over disjoint keys -> the attention over both. out [n, H, D], lse [n, H]."""
    total = torch.logaddexp(lse, lse2)
    # Where neither saw a key both weights are exp(-inf - -inf); nan_to_num makes them 0.
    a, b = ((x - total).exp().nan_to_num(0.0)[..., None] for x in (lse, lse2))
    return out * a + out2 * b, total
