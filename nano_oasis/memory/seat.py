"""A running request as the oasis mode sees it, and what it counts.

Owns: Seat and OasisStats. Must not know: slots' contents, queries, how a seat came to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nano_oasis.request import Request


@dataclass
class Seat:
    """A running request on the device."""

    request: Request
    index: int  # in the residency tables
    generation: int
    budget: int  # blocks attention reads per layer and head group once shrunk, tail included
    caps: torch.Tensor  # [layers] slots it may hold once shrunk, in all head groups
    floor: int  # slots it may always hold
    dense: bool = True  # everything is resident: attention reads it all and is exact
    cold: bool = False  # just shrunk: the next decode step fetches what it wants and waits
    sealed: int = 0  # leading blocks that are in the host tier and sketched
    lossless: bool = False  # its tokens come from attention to everything, wherever that is
    raised: int = -1  # the pass in which an audit last raised its budget
    draft_chance: float = 0.5  # how often its drafts were right lately
    looks_ahead: bool = True  # whether its drafts' queries foretell better than its own
    agreement: dict[str, float] = field(default_factory=dict)  # by predictor, lately; see lookahead.py
    foretold: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by layer and predictor


@dataclass
class OasisStats:
    """Counts since start, in blocks of one plane."""

    hits: int = 0  # wanted and resident
    misses: int = 0  # wanted and not resident, whatever was done about it
    fetched_now: int = 0  # of these, waited for
    skipped: int = 0  # of these, left out of attention, or
    estimated: int = 0  # represented by their means
    recall_sum: float = 0.0  # audit: share of the true attention mass that was read, summed
    recall_count: int = 0

    @property
    def recall(self) -> float | None:
        return self.recall_sum / self.recall_count if self.recall_count else None
