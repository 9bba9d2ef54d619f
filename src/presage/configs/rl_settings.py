"""What readers of verl's and NeMo-RL's settings share: settings by dotted names, and those nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from presage.configs.models import preset_key
from presage.errors import InputError

# Megatron-Core's names of degrees, which both frameworks have.
LAYOUT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "expert_tp": "expert_tensor_parallel_size",
}  # fmt: skip


class Settings:
    """Settings by dotted name; those that were read are remembered."""

    def __init__(self, values: Mapping[str, Any], path: Path, defaults: Mapping[str, Any]) -> None:
        self.values, self.path, self.defaults, self.read = values, path, defaults, set[str]()

    def __call__(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that has one."""
        self.read |= set(names)
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return next((self.defaults[n] for n in names if n in self.defaults), default)

    def whole(self, *names: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self(*names, default=default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)):
            return None if value is None else int(value)
        raise InputError(self.path, f"is {value!r}: it should be a whole number", names[0])

    def number(self, *names: str, default: float | None = None) -> float | None:
        value = self(*names, default=default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return None if value is None else float(value)
        raise InputError(self.path, f"is {value!r}: it should be a number", names[0])

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self(*names, default=default)
        if isinstance(value, bool):
            return value
        raise InputError(self.path, f"is {value!r}: it should be true or false", names[0])

    def refuse(self, name: str, instead: str) -> None:
        """Raise where a setting is on that is not modelled."""
        value = self(name)
        if value is True or (not isinstance(value, bool) and value not in (None, 0, 1, "")):
            raise InputError(self.path, f"is {value!r}, which is not modelled: {instead}", name)

    def unread(self, quiet: re.Pattern[str], known: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A note of settings that nobody asked for; those near a known name are errors."""
        rest = [k for k in self.values if k not in self.read and k not in known and not quiet.search(k)]
        for key in rest:
            close = get_close_matches(key, [k for k in self.read if k not in self.values], 1, 0.9)
            if close:
                raise InputError(self.path, f"is unknown: did you mean {close[0]!r}?", key)
        return (f"not read: {', '.join(rest[:12])}{' and more' if len(rest) > 12 else ''}",) if rest else ()


def model_section(name: Any) -> dict[str, Any]:
    """A [model] table of a Hugging Face name or a checkpoint's folder; empty where presage does not know it."""
    for text in (str(name), str(name).rstrip("/").split("/")[-1]):
        for short in (text, re.sub(r"(?i)-(instruct|base|bf16|chat|0324|2507|it)\b", "", text)):
            if found := preset_key(short) or preset_key(re.sub(r"(?i)-(instruct|base|bf16|0324)\b", "", short)):
                return {"preset": found}
    return {}


def without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without keys that nothing is known of."""
    return {k: v for k, v in table.items() if v is not None}
