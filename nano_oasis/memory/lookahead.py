"""What the next step is expected to attend to, when drafts ran beside the newest token.

Owns: the predictor `lookahead`, and how well it and `previous` foretell. Must not know: slots, copies, who
drafted.

Row j of a request is the query of its j-th draft, row 0 that of its newest token. If the first a drafts are
right, the next step begins at the position of row a + 1, whose query was made from a wrong token, but in the
right place; after the last draft there is none, and its own row is the nearest. So each draft row weighs as
much as the next step is likely to begin there, rejected drafts included. `previous` goes by row 0 alone.

Agreement is the share of the blocks that a step's own query wants, the forced ones left out, that a predictor
had named one step earlier. It is measured on some layers at every step. A request whose lookahead falls
behind `previous` uses that one instead, until it is ahead again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nano_oasis.kernels import select
from nano_oasis.memory.oasis_rows import Layout, Rows
from nano_oasis.memory.seat import Seat

EVERY = 4  # layers that choose; one of so many is measured
MEMORY = 0.9


@dataclass
class Agreement:
    """Mean agreement since start, of one predictor."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class Lookahead:
    def __init__(self, enabled: bool, layers: Sequence[int]) -> None:
        """enabled: predictor=lookahead. layers: those that choose blocks."""
        self.enabled, self.measured = enabled, set(layers[::EVERY])
        self.agreement = {"lookahead": Agreement(), "previous": Agreement()}

    def ahead(self, rows: Rows, mass: np.ndarray) -> np.ndarray | None:
        """mass fp32 [G, n, M] by each row's own query -> what to order by, fp32 [G, n, M], in the seats' last
        rows.

        None where no row is a draft: then there is the own query only.
        """
        if not rows.has_drafts:
            return None
        out = np.empty_like(mass)
        for last in np.flatnonzero(rows.last):
            first, seat = last - rows.drafts[last], rows.seats[last]
            use = self.enabled and seat.looks_ahead and last > first
            drafts = mass[:, first + 1 : last + 1]
            out[:, last] = self._weighted(seat, drafts) if use else mass[:, first]
        return out

    @staticmethod
    def _weighted(seat: Seat, mass: np.ndarray) -> np.ndarray:
        """mass [G, k, M] of the drafts -> [G, M]."""
        total: np.ndarray = weights(seat.draft_chance, mass.shape[1]) @ mass
        return total

    def measure(self, layer: int, rows: Rows, x: Layout, own: np.ndarray, mass: np.ndarray) -> None:
        """own bool [G, n, M]: what the rows' own queries want; mass fp32 [G, n, M]. Both predictors are
        judged, whichever is used."""
        if layer not in self.measured:
            return
        if not rows.has_drafts or not mass.any():
            for seat in rows.seats:
                seat.foretold.pop(layer, None)  # it was of the step after that, which is this one
            return
        for last in np.flatnonzero(rows.last):
            seat, first = rows.seats[last], last - rows.drafts[last]
            row = x.rows[first]
            wanted = own[:, first, row[select.SINK] : row[select.RECENT]]  # beyond the forced ones
            before = seat.foretold.pop(layer, None)
            if before is not None and wanted.any():
                for name, named in before.items():
                    named = named[:, row[select.SINK] :][:, : wanted.shape[1]]
                    both = named & wanted[:, : named.shape[1]]
                    self._learn(seat, name, float(both.sum() / wanted.sum()))
            if last > first:
                named = select.best_blocks(self._weighted(seat, mass[:, first + 1 : last + 1]), x.rows[last])
                seat.foretold[layer] = {"previous": own[:, first].copy(), "lookahead": named}

    def _learn(self, seat: Seat, name: str, share: float) -> None:
        total = self.agreement[name]
        total.total += share
        total.count += 1
        seat.agreement[name] = MEMORY * seat.agreement.get(name, share) + (1 - MEMORY) * share
        seat.looks_ahead = seat.agreement.get("lookahead", 1.0) >= seat.agreement.get("previous", 0.0)


def weights(chance: float, count: int) -> np.ndarray:
    """fp32 [count]: how likely the next step begins at the place of draft 1..count, or after the last.

    chance: that a draft is right, given that those before it are.
    """
    out = (chance ** np.arange(count)) * (1 - chance)
    out[-1] += chance**count
    return out.astype(np.float32)
