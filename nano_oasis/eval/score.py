"""How an answer is scored: RULER's string match (Hsieh et al., arXiv 2404.06654), 0 to 100.

Owns: the two rules. Must not know: tasks, models, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

MATCHES = ("all", "part")


def score_answer(text: str, answers: Sequence[str], match: str = "all") -> float:
    """`all`: the share of the answers that occur in the text; `part`: 100 if any does. Case does not count.

    Raises ValueError for another rule, or where there is nothing to look for.
    """
    if match not in MATCHES:
        raise ValueError(f"match: must be one of {', '.join(MATCHES)}, got {match!r}")
    if not answers:
        raise ValueError("an answer is scored against at least one reference")
    text = text.lower()
    found = [answer.lower() in text for answer in answers]
    return 100.0 * (sum(found) / len(found) if match == "all" else any(found))
