"""What-ifs: how long a training step would take with other code, another machine or other arguments."""

from presage.whatif.before_after import Range, Stage, WhatIf, what_if
from presage.whatif.edit_spec import OTHERS, ParsedEdit, parse, parse_edits
from presage.whatif.edits.edit import ALIASES
from presage.whatif.suggest import Suggestions, suggest, suggestions

__all__ = [
    "ALIASES", "OTHERS", "ParsedEdit", "Range", "Stage", "Suggestions", "WhatIf", "parse", "parse_edits", "suggest",
    "suggestions", "what_if",
]  # fmt: skip
