"""What is compared: the settings of a sweep.

Owns: Setting, the sweep's product, the meaning of a budget that is a share of the context.
Must not know: samples, the engine's parts, how a setting is carried out.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from nano_oasis.config import ConfigError, EngineConfig

SWEPT = ("budget", "selector", "predictor", "miss_policy", "block", "head_groups")
_DEFAULT = EngineConfig(kv_mode="oasis")


@dataclass(frozen=True)
class Setting:
    """One way to decode. The defaults are the engine's, but for the budget: an eighth of the context."""

    budget: str = "1/8"  # tokens, or a share of the context
    selector: str = _DEFAULT.selector
    predictor: str = _DEFAULT.predictor
    miss_policy: str = _DEFAULT.miss_policy
    block: int = _DEFAULT.block_size
    head_groups: int | None = _DEFAULT.head_groups  # None: one for each KV head

    def __str__(self) -> str:
        """budget and selector, and the rest where it is not the engine's default."""
        words = [self.selector, str(self.budget)]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(value if isinstance(value, str) else f"{field.name.replace('_', ' ')} {value}")
        return " ".join(words)

    def asked(self, context: int) -> int:
        """The budget in tokens, as it was asked for, at a context of so many tokens."""
        return int(Fraction(self.budget) * context) if "/" in self.budget else int(self.budget)

    def tokens(self, context: int) -> int:
        """The budget that the engine works with, which raises a smaller one: sink, newest, and one more
        block."""
        least = (_DEFAULT.sink_blocks + _DEFAULT.recent_blocks + 1) * self.block
        return max(self.asked(context), least)

    def engine(self, budget: int, rows: int) -> EngineConfig:
        """The engine's options for decoding `rows` samples together; budget in tokens. Raises ConfigError."""
        ahead = self.predictor == "lookahead"  # needs drafts: the session makes one guess a step
        return EngineConfig(
            kv_mode="oasis", draft="ngram" if ahead else "none", num_draft_tokens=1 if ahead else None,
            block_size=self.block, kv_budget=budget, selector=self.selector,
            predictor=self.predictor, miss_policy=self.miss_policy, head_groups=self.head_groups,
            max_num_seqs=rows, max_num_batched_tokens=rows,
        )  # fmt: skip


def parse_budget(value: int | str) -> str:
    """512, "512" or "1/8" -> as kept in a Setting. Raises ConfigError."""
    text = str(value).strip()
    if re.fullmatch(r"[1-9]\d*", text):
        return text
    if re.fullmatch(r"[1-9]\d*/[1-9]\d*", text) and Fraction(text) <= 1:
        return text
    raise ConfigError(
        f"budget: {text!r} must be a number of tokens, or a share of the context such as 1/8, at most 1/1"
    )


def make_settings(
    budget: Sequence[int | str], selector: Sequence[str], predictor: Sequence[str],
    miss_policy: Sequence[str], block: Sequence[int], head_groups: Sequence[int | None],
) -> list[Setting]:  # fmt: skip
    """The product of the lists, in their order, the selector changing last. Raises ConfigError."""
    budgets = [parse_budget(b) for b in budget]
    settings = [
        Setting(b, s, p, m, n, g)
        for s, n, g, p, m, b in itertools.product(
            selector, block, head_groups, predictor, miss_policy, budgets
        )
    ]
    for setting in settings:
        setting.engine(setting.tokens(4096), 1)  # refuses a name or a number that the engine does not take
    return list(dict.fromkeys(settings))
