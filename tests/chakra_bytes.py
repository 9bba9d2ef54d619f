"""Chakra graphs written byte by byte."""

from __future__ import annotations


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes((*out, n))


def field(number: int, value: int | str | bytes, wire: int | None = None) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    if wire is None:
        return varint(number << 3 | 2) + varint(len(data)) + data
    return varint(number << 3 | wire) + data


def attr(name: str, number: int, value: int | str | bytes, wire: int | None = None) -> bytes:
    return field(1, name) + field(number, value, wire)


def sized(message: bytes) -> bytes:
    return varint(len(message)) + message


def node(i: int, *parts: bytes, name: str = "op", kind: int = 4) -> bytes:
    return field(1, i) + field(2, name) + field(3, kind) + b"".join(parts)


META = field(1, "0.0.4")


def chakra(*messages: bytes, meta: bytes = META) -> bytes:
    return b"".join(map(sized, (meta, *messages)))
