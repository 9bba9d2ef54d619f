"""What is asked of both plans: how many tokens, by when, under which conditions."""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any
from urllib.parse import parse_qsl, urlencode

from presage.errors import PresageError
from presage.noise.priors import CONDITIONS, DEFAULT
from presage.prediction.jobs.cost import parse_tokens
from presage.ui.knobs import InvalidPlan
from presage.ui.plans import LONGEST

FIRST_QUESTION: dict[str, Any] = {"tokens": "15T", "days": 60, "noise": "production"}  # what the page begins with
DAY = 86400.0
MOST_STEPS = 1_000_000_000


@dataclass(frozen=True)
class RunQuestion:
    """`days`: until the deadline."""

    tokens: float
    days: float | None = None
    noise: str = DEFAULT

    def steps(self, tokens_per_step: int) -> int:
        many = ceil(self.tokens / tokens_per_step)
        if many > MOST_STEPS:
            raise InvalidPlan(f"Tokens: that is {many:,} steps, more than {MOST_STEPS:,}", ("tokens",))
        return many


def parse_question(tokens: Any, days: Any, noise: Any) -> RunQuestion:
    """From what a page says, which may be anything."""
    if not isinstance(tokens, str | int | float) or isinstance(tokens, bool):
        raise InvalidPlan("Tokens: write 15T, 300B or 1.5e12", ("tokens",))
    try:
        many = parse_tokens(str(tokens)[:40])
    except PresageError as e:
        raise InvalidPlan(f"Tokens: {e}", ("tokens",)) from e
    if noise not in CONDITIONS:
        raise InvalidPlan(f"GPUs are: choose one of {', '.join(CONDITIONS)}", ("noise",))
    return RunQuestion(many, _parse_days(days), str(noise))


def _parse_days(given: Any) -> float | None:
    if given in (None, ""):
        return None
    try:
        value = float(str(given)[:40].strip().lower().removesuffix("d"))
    except ValueError:
        value = 0.0
    if isinstance(given, bool) or not isfinite(value) or not 0 < value <= 36525:
        raise InvalidPlan("Deadline: write a number of days, such as 60, or leave it empty", ("days",))
    return value


# ---- Links: plans as compressed TOML in the fragment of the page's address, which browsers send to nobody.

LONGEST_LINK = 65_536
BROKEN = "this link is cut off or damaged: copy it again, whole"


@dataclass(frozen=True)
class SharedPlans:
    """What a link carries: the texts of plans a and b, and what is asked of them."""

    texts: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


QUESTION_KEYS = ("tokens", "days", "noise")


def make_link(shared: SharedPlans) -> str:
    """The fragment, with its #."""
    pairs = {name: pack_text(text) for name, text in shared.texts.items()}
    return "#" + urlencode(pairs | {k: v for k, v in shared.asked.items() if v})


def read_link(fragment: str) -> SharedPlans:
    """What a fragment says; nothing where there is none."""
    if len(fragment) > LONGEST_LINK:
        raise InvalidPlan(f"this link has {len(fragment):,} letters: links of this page have {LONGEST_LINK:,} at most")
    try:
        said = dict(parse_qsl(fragment.removeprefix("#"), max_num_fields=16))
    except ValueError as e:
        raise InvalidPlan(BROKEN) from e
    texts: dict[str, str] = {name: unpack_text(said[name]) for name in ("a", "b") if name in said}
    return SharedPlans(texts, {name: said[name] for name in QUESTION_KEYS if name in said})


def pack_text(text: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def unpack_text(code: str) -> str:
    """No more than a job's text may be, whatever it would unpack to."""
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, 4 * LONGEST)
        if unpacker.unconsumed_tail:
            raise InvalidPlan(f"this link unpacks to more than {LONGEST:,} letters, the most that a job's text has")
        if not unpacker.eof:
            raise InvalidPlan(BROKEN)
        return text.decode()
    except (binascii.Error, zlib.error, ValueError) as e:
        raise InvalidPlan(BROKEN) from e
