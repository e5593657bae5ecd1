"""The attention metadata of one step: which blocks each row owns, how long it is, where new KV goes.

Owns: AttentionBatch and its construction from plain lists. Must not know: requests, the scheduler,
or how attention is computed. It is passed as an argument from the runner to every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class AttentionBatch:
    """R rows with T query tokens in all; each row is one request's part of this step.

    The first `num_decodes` rows have exactly one query each, so their queries are tokens
    [0, num_decodes). Lengths are in tokens and include this step's own tokens.
    """

    block_table: Tensor  # [R, M] int32: block ids in order of position; entries past a row's end are ignored
    context_lens: Tensor  # [R] int32
    query_starts: Tensor  # [R + 1] int32: row r's queries are tokens [query_starts[r], query_starts[r + 1])
    slots: Tensor  # [T] int64: block * block_size + offset, where each token's K and V are written
    num_decodes: int
    context_list: list[int]  # context_lens and query_starts again, on the host: reading a length
    query_list: list[int]  # must never wait for the device
    max_context: int
    max_query: int
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  # what a backend works out once per step


def make_batch(
    rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device | str = "cpu"
) -> AttentionBatch:
    """Rows of (block ids, start, count): positions [start, start + count) of a request are computed.

    Rows of one token are decodes as long as no longer row came before them. Raises ValueError when a
    row has no tokens or its blocks do not reach its last position.
    """
    contexts, starts, decodes = [], [0], 0
    for r, (blocks, start, count) in enumerate(rows):
        if count < 1 or start < 0:
            raise ValueError(f"row {r}: needs start >= 0 and at least one token, got {start} and {count}")
        if len(blocks) * block_size < start + count:
            raise ValueError(
                f"row {r}: {len(blocks)} blocks of {block_size} tokens do not hold {start + count} tokens"
            )
        contexts.append(start + count)
        starts.append(starts[-1] + count)
        if count == 1 and decodes == r:
            decodes += 1
    width = max((-(-n // block_size) for n in contexts), default=0)
    table = np.zeros((len(rows), width), np.int32)
    slots = np.empty(starts[-1], np.int64)
    for r, (blocks, start, count) in enumerate(rows):
        used = -(-contexts[r] // block_size)
        table[r, :used] = blocks[:used]
        position = np.arange(start, start + count)
        slots[starts[r] : starts[r + 1]] = table[r, position // block_size] * np.int64(block_size)
        slots[starts[r] : starts[r + 1]] += position % block_size
    return AttentionBatch(
        block_table=torch.from_numpy(table).to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32).to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32).to(device),
        slots=torch.from_numpy(slots).to(device),
        num_decodes=decodes,
        context_list=contexts,
        query_list=starts,
        max_context=max(contexts, default=0),
        max_query=max((count for _, _, count in rows), default=0),
    )
