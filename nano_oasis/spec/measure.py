"""How many drafts of a head the target would have taken, in texts that were held out.

Owns: the replay of greedy decoding with drafts, and its figures. Must not know: training, the engine.

Every held-out text is gone through as the engine would: draft from the target's state, keep what equals the
text, take the target's own next token, draft again. So places where drafts fail count once per step, not once
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nano_oasis.spec.head import DraftHead
from nano_oasis.spec.recording import Recording

DRAFTS = 4  # per step


def acceptance(head: DraftHead, recordings: Sequence[Recording], drafts: int = DRAFTS) -> dict[str, Any]:
    """Figures of texts that were written greedily.

    accepted[j]: share of the steps in which drafts 1..j+1 all were right; given[j]: of those in which the
    drafts before it were. per_step: tokens per target step, the target's own included. in_vocab: share of the
    written tokens that can be drafted at all. All are 0 when there was no step.
    """
    tried, right = [0] * drafts, [0] * drafts
    steps = written = 0
    state_at = [r.prompt - 1 for r in recordings]  # state that the newest token was drawn from
    going = [i for i, r in enumerate(recordings) if len(r.tokens) - r.prompt > 1]
    while going:
        steps += len(going)
        state = torch.stack([recordings[i].hidden[state_at[i]] for i in going]).float()
        tokens = torch.stack([recordings[i].tokens[state_at[i] + 1] for i in going]).long()
        drafted = []
        for _ in range(drafts):
            state, tokens, _ = head.step(state, tokens)
            drafted.append(tokens.tolist())
        left = []
        for row, i in enumerate(going):
            truth = recordings[i].tokens[state_at[i] + 2 :][:drafts].tolist()
            kept = 0
            for j, token in enumerate(truth):
                tried[j] += 1
                if drafted[j][row] != token:
                    break
                right[j] += 1
                kept += 1
            # The pass over the drafts also gives the token after the last right one, unless the text is over.
            advanced = min(kept + 1, len(recordings[i].tokens) - state_at[i] - 2)
            written += advanced
            state_at[i] += advanced
            if state_at[i] + 2 < len(recordings[i].tokens):
                left.append(i)
        going = left
    words = torch.cat([r.tokens[r.prompt :] for r in recordings]).long() if recordings else torch.zeros(0)
    known = torch.isin(words, head.draft_ids.cpu()).float().mean() if len(words) else torch.zeros(())
    return {
        "drafts": drafts, "texts": len(recordings), "steps": steps,
        "accepted": [_share(n, steps) for n in right],
        "given": [_share(n, t) for n, t in zip(right, tried, strict=True)],
        "per_step": _share(written, steps), "in_vocab": round(float(known), 4),
    }  # fmt: skip


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
