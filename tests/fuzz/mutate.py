"""Ways to spoil a file, from a random number generator: the same generator, the same file.

Bytes are flipped, cut and spliced whatever the format is; texts get other values in the place of theirs, or lose and
double their lines; trees of JSON or MessagePack get other branches.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

Mutator = Callable[[bytes, Random], bytes]

DEEP = 10_000  # brackets
LITERAL = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\b(?:true|false|null)\b')
WORD = re.compile(rb"[^\s,=\"']+")
NUMBERS = [b"0", b"-0.0", b"-1", b"1", b"0.5", b"1e308", b"-1e308", b"1e400", b"1e-320", b"4294967296",
           b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 30,
           b"9" * 5000, b"1e9", b"3"]  # fmt: skip
TEXTS = [b'""', b'"x"', b'"nan"', b'"1e999"', b'"\\u0000"', b'"' + b"y" * 100_000 + b'"', b'"../../../etc/passwd"',
         b'"\xff"', b'"[b]x[/b]"', '"\u00e9\u202e"'.encode()]  # fmt: skip
SHAPES = [b"[]", b"{}", b"[[]]", b"[1, 2]", b'["a"]', b"true", b"[" * DEEP + b"]" * DEEP]
JSON = [*NUMBERS, *TEXTS, *SHAPES, b"null", b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'{"a": {"b": []}}',
        b'{"":' * DEEP + b"1" + b"}" * DEEP]  # fmt: skip
TOML = [*NUMBERS, *TEXTS, *SHAPES, b"nan", b"inf", b"-inf", b"1979-05-27T07:32:00Z", b"07:32:00", b"{ a = 1 }",
        b"0x1F", b"1_000", b"'''\n'''"]  # fmt: skip
CELLS = [*NUMBERS, b"", b"nan", b"inf", b"-inf", b"x", b'"', b'"a,b"', b"y" * 200_000, b"\x00", "\u0663".encode(),
         b"1_000", b" 5 ", b"\xff\xfe", b"=1+1", b"0x10", b"\r"]  # fmt: skip
BITS = [
    b"",
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x80" * 10,
    b"\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b"\xef\xbb\xbf",
]


def damaged(data: bytes, rng: Random) -> bytes:
    """A few pieces overwritten, cut out, put in or doubled."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, len(out))
        end = len(out) if rng.random() < 0.1 else min(len(out), at + rng.choice((0, 1, 1, 4, 12)))
        put = rng.choice((rng.choice(BITS), rng.randbytes(rng.randint(0, 12)), bytes(out[at:end]) * 2))
        out[at:end] = put
    return bytes(out)


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def wrapped(data: bytes, rng: Random) -> bytes:
    """In what it should not be in: a byte order mark, other line ends or coding, gzip, gzip that is damaged."""
    packed = gzip.compress(data, 1, mtime=0)
    ways: Sequence[Callable[[], bytes]] = (
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: data.replace(b"\n", b"\r"),
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: packed,
        lambda: damaged(packed, rng),
        lambda: cut(packed, rng),
        lambda: packed + packed,
        lambda: packed + b"rest",
        lambda: gzip.compress(packed, 1, mtime=0),
        lambda: gzip.compress(damaged(data, rng), 1, mtime=0),
        lambda: b"\x00" * 64 + data,
        lambda: data * 2,
        lambda: b"",
        lambda: rng.randbytes(200),
    )
    return rng.choice(ways)()


def replaced(values: Sequence[bytes], pattern: re.Pattern[bytes] = LITERAL) -> Mutator:
    """Some of a text's values replaced by others."""

    def mutate(data: bytes, rng: Random) -> bytes:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            places = [m.span() for m in pattern.finditer(data[:200_000])]
            if places:
                start, end = rng.choice(places)
                data = data[:start] + rng.choice(values) + data[end:]
        return data

    return mutate


def lines(data: bytes, rng: Random) -> bytes:
    """Lines dropped, doubled, moved or run together."""
    text = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, to = rng.randrange(len(text)), rng.randrange(len(text))
        match rng.randrange(4):
            case 0 if len(text) > 1:
                del text[at]
            case 1:
                text.insert(to, text[at])
            case 2:
                text[at], text[to] = text[to], text[at]
            case 3:
                text[at] += text[to]
    return b"\n".join(text)


def columns(data: bytes, rng: Random) -> bytes:
    """A column of a table dropped, renamed, doubled or all of one value."""
    rows = [row.split(b",") for row in data.split(b"\n")]
    at, what, value = rng.randrange(len(rows[0])), rng.randrange(4), rng.choice(CELLS)
    for i, row in enumerate(rows):
        if at < len(row):
            if what == 0:
                del row[at]
            elif what == 1:
                row.append(row[at])
            elif (what == 2 and i) or (what == 3 and not i):
                row[at] = value
    return b"\n".join(b",".join(row) for row in rows)


BRANCHES: list[Any] = [
    None, True, 0, -1, 1, 2, 3, 0.5, 1e308, -1e308, 2**63 - 1, 2**40, "", "x", "\x00", "y" * 10_000, [], {}, [[]], [1],
    {"a": 1}, [[1, 2], 3], "1", "nan",
]  # fmt: skip


def altered(tree: Any, rng: Random) -> Any:
    """A tree in which one to three branches are of another kind, gone, doubled or moved from elsewhere."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        holder, key, at = None, None, tree
        while isinstance(at, dict | list) and at and (key is None or rng.randrange(4)):
            holder, key = at, rng.choice(sorted(at, key=str) if isinstance(at, dict) else range(len(at)))
            at = holder[key]
        if holder is None:
            return copy.deepcopy(rng.choice(BRANCHES))
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, at)
            case 2 if isinstance(holder, dict):
                holder[rng.choice(("", "x", f"{key}2", "name", "id"))] = at
            case 3:
                holder[key] = copy.deepcopy(tree) if len(repr(tree)) < 20_000 else at
            case _:
                holder[key] = copy.deepcopy(rng.choice(BRANCHES))
    return tree


def json_tree(data: bytes, rng: Random) -> bytes:
    return json.dumps(altered(json.loads(data), rng)).encode()


def json_lines(data: bytes, rng: Random) -> bytes:
    text = data.split(b"\n")
    at = rng.choice([i for i, line in enumerate(text) if line])
    text[at] = json_tree(text[at], rng)
    return b"\n".join(text)


def graph_tree(data: bytes, rng: Random) -> bytes:
    """A saved graph: its first line, then MessagePack in gzip; in form, but with other contents."""
    first, _, packed = data.partition(b"\n")
    inside = gzip.decompress(packed)
    if rng.randrange(2):
        inside = damaged(inside, rng)
    else:
        inside = msgspec.msgpack.encode(altered(msgspec.msgpack.decode(inside), rng))
    return first + b"\n" + gzip.compress(inside, 1, mtime=0)


def _arrays(rng: Random, old: Any) -> Any:
    number = old.dtype.kind in "if"
    some: list[Any] = [
        np.zeros(0), np.array(3), np.array([-1, 2]), np.full((2, 2), np.nan), np.array(["a", "b"]), np.array([True]),
        np.array([2**63], np.uint64), np.zeros((1, 1, 1, 1), np.int64), np.array([1 + 2j]), np.zeros(3, [("a", "i4")]),
        np.array([{"a": 1}], object), np.zeros((0, 5), np.int64), np.zeros((5, 0), np.int64), np.full(3, 2**62),
        old[:1] if old.ndim else old, old[None], old.astype(np.float64) if number else old, -old if number else old,
    ]  # fmt: skip
    return rng.choice(some)


def npz(data: bytes, rng: Random) -> bytes:
    """One of its arrays another, gone, or claiming to be what it is not."""
    with np.load(io.BytesIO(data)) as held:
        arrays = dict(held)
    name = rng.choice(sorted(arrays))
    if rng.randrange(4) == 0:
        del arrays[name]
    else:
        arrays[name] = _arrays(rng, arrays[name])
    out = io.BytesIO()
    np.savez(out, **arrays)
    return _lying(out.getvalue(), rng) if rng.randrange(3) == 0 else out.getvalue()


def npy(data: bytes, rng: Random) -> bytes:
    out = io.BytesIO()
    np.save(out, _arrays(rng, np.load(io.BytesIO(data))))
    return _lying(out.getvalue(), rng) if rng.randrange(3) == 0 else out.getvalue()


def _lying(data: bytes, rng: Random) -> bytes:
    """A header that claims another shape or type; in a zip the sum of its check is then wrong as well."""
    claims = [b"'shape': (1000000000000,)", b"'shape': (-1,)", b"'shape': (9,) * 9", b"'shape': 5", b"'shape': (1e9,)"]
    data = re.sub(rb"'shape': \([^)]*\)", rng.choice(claims), data, count=1)
    kinds = [b"'|O'", b"'<f8'", b"'<U9999'", b"'V0'", b"[('a', '|O')]", b"'x'"]
    return data if rng.randrange(2) else re.sub(rb"'descr': '[^']*'", b"'descr': " + rng.choice(kinds), data, count=1)


def zipped(data: bytes, rng: Random) -> bytes:
    """A zip whose parts are damaged, whole though the zip is."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        bad = rng.choice(names)
        for name in names:
            part = old.read(name)
            called = rng.choice((name, "x", "../" + name)) if rng.randrange(8) == 0 else name
            made = zipfile.ZipInfo(called)  # of 1980: with the time of day, the same seed gives other bytes
            new.writestr(made, damaged(part, rng) if name == bad else part, zipfile.ZIP_DEFLATED)
    return out.getvalue()


KINDS: dict[str, tuple[Mutator, ...]] = {
    "json": (replaced(JSON), replaced(JSON), json_tree, json_tree, lines, damaged, cut, wrapped),
    "jsonl": (replaced(JSON), json_lines, json_lines, lines, damaged, cut, wrapped),
    "toml": (replaced(TOML), replaced(TOML), replaced(TOML), lines, lines, damaged, cut, wrapped),
    "csv": (replaced(CELLS, WORD), replaced(CELLS, WORD), columns, columns, lines, damaged, cut, wrapped),
    "text": (replaced(CELLS, WORD), replaced(CELLS, WORD), lines, damaged, damaged, cut, wrapped),
    "graph": (graph_tree, graph_tree, graph_tree, damaged, cut, wrapped),
    "npz": (npz, npz, zipped, damaged, cut, wrapped),
    "npy": (npy, npy, damaged, cut, wrapped),
    "zip": (zipped, zipped, damaged, cut),
    "binary": (damaged, damaged, damaged, cut, wrapped),
}  # fmt: skip


def spoiled(kind: str, data: bytes, rng: Random) -> bytes:
    """The file spoiled in one of the ways of its kind; gzip is unpacked before and packed after."""
    packed = data[:2] == b"\x1f\x8b"
    out = rng.choice(KINDS[kind])(gzip.decompress(data) if packed else data, rng)
    return gzip.compress(out, 1, mtime=0) if packed and rng.randrange(4) else out
