"""Co-design: what a training step would take if it, its machine or its arguments were other than they are."""

from presage.plan.codesign.asked import ALIASES, OTHERS, Asked, asked_for, parse
from presage.plan.codesign.suggest import Suggestions, suggest, suggestions
from presage.plan.codesign.whatif import Range, Stage, WhatIf, what_if

__all__ = [
    "ALIASES", "OTHERS", "Asked", "Range", "Stage", "Suggestions", "WhatIf", "asked_for", "parse", "suggest",
    "suggestions", "what_if",
]  # fmt: skip
