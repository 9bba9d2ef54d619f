"""Co-design: what a training step would take if it, its machine or its arguments were other than they are."""

from presage.whatif.before_after import Range, Stage, WhatIf, what_if
from presage.whatif.edit_spec import ALIASES, OTHERS, Asked, asked_for, parse
from presage.whatif.suggest import Suggestions, suggest, suggestions

__all__ = [
    "ALIASES", "OTHERS", "Asked", "Range", "Stage", "Suggestions", "WhatIf", "asked_for", "parse", "suggest",
    "suggestions", "what_if",
]  # fmt: skip
