"""Links: plans as compressed TOML in the fragment of the page's address, which browsers send to nobody."""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from presage.ui.knobs import Wrong
from presage.ui.plans import LONGEST

__all__ = ["Shared", "link_of", "shared_of"]

LONGEST_LINK = 65_536
BROKEN = "this link is cut off or damaged: copy it again, whole"


@dataclass(frozen=True)
class Shared:
    """What a link carries: the texts of plans a and b, and what is asked of them."""

    texts: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


ASKED = ("tokens", "days", "noise")


def link_of(shared: Shared) -> str:
    """The fragment, with its #."""
    pairs = {name: packed(text) for name, text in shared.texts.items()}
    return "#" + urlencode(pairs | {k: v for k, v in shared.asked.items() if v})


def shared_of(fragment: str) -> Shared:
    """What a fragment says; nothing where there is none."""
    if len(fragment) > LONGEST_LINK:
        raise Wrong(f"this link has {len(fragment):,} letters: links of this page have {LONGEST_LINK:,} at most")
    try:
        said = dict(parse_qsl(fragment.removeprefix("#"), max_num_fields=16))
    except ValueError as e:
        raise Wrong(BROKEN) from e
    texts: dict[str, str] = {name: unpacked(said[name]) for name in ("a", "b") if name in said}
    return Shared(texts, {name: said[name] for name in ASKED if name in said})


def packed(text: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def unpacked(code: str) -> str:
    """No more than a job's text may be, whatever it would unpack to."""
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, 4 * LONGEST)
        if unpacker.unconsumed_tail:
            raise Wrong(f"this link unpacks to more than {LONGEST:,} letters, the most that a job's text has")
        if not unpacker.eof:
            raise Wrong(BROKEN)
        return text.decode()
    except (binascii.Error, zlib.error, ValueError) as e:
        raise Wrong(BROKEN) from e
