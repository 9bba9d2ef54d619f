"""What is asked of both plans: how many tokens, by when, under which noise and failures, with which spares."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, nan
from typing import Any
from urllib.parse import parse_qsl, urlencode

from presage.errors import PresageError
from presage.noise.priors import CONDITIONS, DEFAULT
from presage.prediction.jobs.cost import parse_tokens
from presage.runs.sets import DEFAULT as DEFAULT_SET
from presage.runs.sets import names
from presage.search.job_toml import table_toml
from presage.ui.knobs import InvalidPlan
from presage.ui.plans import LONGEST

# What the page begins with, by control: an empty one leaves it to the set of failure rates, a spare is always ready.
FIRST_QUESTION: dict[str, Any] = {
    "tokens": "15T", "days": 60, "noise": "production", "failures": DEFAULT_SET, "rate": None, "restart": None,
    "spares": None, "interval": "auto",
}  # fmt: skip
IN_FILE = {"restart": "restart_seconds", "days": "deadline"}  # what [run] calls it, where that is another word
DAY = 86400.0
MOST_STEPS = 1_000_000_000


@dataclass(frozen=True)
class RunQuestion:
    """`days`: until the deadline; `rate`: failures per 1,000 node-days; `restart`: seconds; `spares`: nodes."""

    tokens: float
    days: float | None = None
    noise: str = DEFAULT
    failures: str = DEFAULT_SET
    rate: float | None = None
    restart: float | None = None
    spares: int | None = None
    interval: str = "auto"

    def steps(self, tokens_per_step: int) -> int:
        many = ceil(self.tokens / tokens_per_step)
        if many > MOST_STEPS:
            raise InvalidPlan(f"Tokens: that is {many:,} steps, more than {MOST_STEPS:,}", ("tokens",))
        return many


def parse_question(
    tokens: Any,
    days: Any,
    noise: Any,
    failures: Any = None,
    rate: Any = None,
    restart: Any = None,
    spares: Any = None,
    interval: Any = None,
) -> RunQuestion:
    """From what a page says, which may be anything."""
    if not isinstance(tokens, str | int | float) or isinstance(tokens, bool):
        raise InvalidPlan("Tokens: write 15T, 300B or 1.5e12", ("tokens",))
    try:
        many = parse_tokens(str(tokens)[:40])
    except PresageError as e:
        raise InvalidPlan(f"Tokens: {e}", ("tokens",)) from e
    if noise not in CONDITIONS:
        raise InvalidPlan(f"GPUs are: choose one of {', '.join(CONDITIONS)}", ("noise",))
    if failures not in (None, "", *names()):
        raise InvalidPlan(f"Failures as in: choose one of {', '.join(names())}", ("failures",))
    many_spares = _parse_number(spares, "spares", "Spare nodes: write a whole number, or leave it empty", 0, 1e6)
    if many_spares is not None and many_spares != int(many_spares):
        raise InvalidPlan("Spare nodes: write a whole number, or leave it empty", ("spares",))
    return RunQuestion(
        many,
        _parse_days(days),
        str(noise),
        failures or DEFAULT_SET,
        _parse_number(rate, "rate", "Failure rate: write failures per 1,000 node-days, or leave it empty", 0, 1e4),
        _parse_number(restart, "restart", "Restart: write seconds, such as 300, or leave it empty", 0.001, 1e7),
        None if many_spares is None else int(many_spares),
        _parse_interval(interval),
    )


def _parse_days(given: Any) -> float | None:
    if given in (None, ""):
        return None
    text = str(given)[:40].strip().lower().removesuffix("d")
    return _parse_number(text, "days", "Deadline: write a number of days, such as 60, or leave it empty", 1e-9, 36525)


def _parse_number(given: Any, name: str, wrong: str, least: float, most: float) -> float | None:
    if given in (None, ""):
        return None
    try:
        value = float(str(given)[:40])
    except ValueError:
        value = nan
    if isinstance(given, bool) or not least <= value <= most:
        raise InvalidPlan(wrong, (name,))
    return value


def _parse_interval(given: Any) -> str:
    from presage.runs.run import parse_interval

    text = "auto" if given in (None, "") else str(given)[:40]
    try:
        parse_interval(text)
    except PresageError as e:
        raise InvalidPlan(f"Checkpoint every: {e}", ("interval",)) from e
    return text


# ---- the question as the [run] of a job file, and back


def with_question(text: str, asked: Mapping[str, Any] | None) -> str:
    """A job's text with what is asked of its run, as `presage run` takes it."""
    if not asked:
        return text
    said = {IN_FILE.get(n, n): v for n in FIRST_QUESTION if (v := asked.get(n)) not in (None, "", "auto")}
    if "deadline" in said:
        said["deadline"] = f"{_parse_days(said['deadline']):g}d"
    return f"{text.rstrip()}\n\n{table_toml({'run': said})}"


def question_of(run: Any) -> dict[str, Any]:
    """The values of controls that a [run] says; those it leaves out are as usual, and without one nothing is said."""
    from presage.runs.run import parse_duration

    if not isinstance(run, Mapping) or not run:
        return {}
    said = {n: run.get(IN_FILE.get(n, n), None if n in ("tokens", "days") else v) for n, v in FIRST_QUESTION.items()}
    if said["days"] is not None:
        try:
            said["days"] = parse_duration(str(said["days"])[:40], "60d or 900h; the page takes no dates") / DAY
        except PresageError as e:
            raise InvalidPlan(f"run.deadline: {e}", ("days",)) from e
    said["tokens"] = said["tokens"] or FIRST_QUESTION["tokens"]
    parse_question(**said)
    return said


# ---- Links: plans as compressed TOML in the fragment of the page's address, which browsers send to nobody.

LONGEST_LINK = 65_536
BROKEN = "this link is cut off or damaged: copy it again, whole"


@dataclass(frozen=True)
class SharedPlans:
    """What a link carries: the texts of plans a and b, and what is asked of them."""

    texts: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


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
    return SharedPlans(texts, {name: said[name] for name in FIRST_QUESTION if name in said})


def link_values(asked: Mapping[str, str]) -> dict[str, Any]:
    """What a link asks as the values of controls; what it leaves out is empty or as usual."""
    numbers = ("days", "rate", "restart", "spares")
    said = {n: asked.get(n, "" if n in numbers else v) for n, v in FIRST_QUESTION.items()}
    return {n: _number(v) if n in numbers else v for n, v in said.items()}


def _number(text: str) -> float | int | None:
    try:
        value = float(text)
        return int(value) if value.is_integer() else value
    except (ValueError, OverflowError):
        return None


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
