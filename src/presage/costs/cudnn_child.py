"""A process of its own that asks cuDNN which engine it would take, for a GPU that need not be there.

    python cudnn_child.py libcudnn.so.9 libcublasLt.so.13 < questions.json > answers.json

cuDNN plans for a GPU that is described to it (its "device properties", since 9.8), without a driver. It ends the whole
process where something is missing, hence a process of its own; and standard library only, to start at once.

As PyTorch does with benchmark mode off: the heuristics' instant mode, then the fallback list; the first engine whose
plan can be made; for float32 none that rounds its inputs, and without TF32 none on tensor cores. Engines of cuBLASLt
(pointwise convolutions) cannot be planned without a GPU: there the next one is told.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Numbers of cudnn_graph.h, the same in every cuDNN 9: types of values, kinds of descriptors, attributes.
DATA_TYPE, INT64, FLOAT, CONVOLUTION_MODE, HEURISTICS, KNOB, NOTE, DESCRIPTOR, CHAR = 1, 3, 4, 7, 8, 9, 11, 15, 24
C_TYPES: dict[int, Any] = {INT64: ctypes.c_int64, FLOAT: ctypes.c_float, DESCRIPTOR: ctypes.c_void_p,
                           CHAR: ctypes.c_char}  # fmt: skip
CONVOLUTION, ENGINE, CONFIG, HEURISTIC, PLAN, KNOB_CHOICE, GRAPH, TENSOR, DEVICE = 1, 2, 3, 4, 5, 7, 15, 17, 38
OPERATIONS = (10, 12, 11)  # forward, data gradient, weight gradient
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
# Attributes of each operation: alpha, beta, convolution; then the large side, the weights, the small side.
PARTS = ((700, 701, 702, 704, 703, 705), (706, 707, 708, 710, 709, 711), (712, 713, 714, 716, 715, 717))
INSTANT, FALLBACK = 0, 2
LISTS = ((INSTANT, 8), (INSTANT, 128), (FALLBACK, 128))  # where to look, and at how many: the first mostly does
TENSOR_CORE, ROUNDS_INPUTS = 0, 1  # numerical notes
KNOBS = 44


class CudnnError(Exception):
    """What cuDNN says it cannot do."""


class Session:
    """cuDNN's backend API, with what was made for one question given back after it."""

    def __init__(self, cudnn: str, cublas: str, device: dict[str, Any]) -> None:
        ctypes.CDLL(cublas, mode=ctypes.RTLD_GLOBAL)  # cuDNN looks it up by name and aborts without it
        self.library = ctypes.CDLL(cudnn, mode=ctypes.RTLD_GLOBAL)
        self.library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.made: list[ctypes.c_void_p] = []
        text = json.dumps(device).encode() + b"\0"
        self.device = self.make(DEVICE, (2702, CHAR, [bytes([c]) for c in text]))
        self.made.clear()

    @contextmanager
    def question(self) -> Iterator[None]:
        try:
            yield
        finally:
            for d in self.made:
                self.library.cudnnBackendDestroyDescriptor(d)
            self.made.clear()

    def new(self, kind: int) -> ctypes.c_void_p:
        d = ctypes.c_void_p()
        self.check(self.library.cudnnBackendCreateDescriptor(kind, ctypes.byref(d)))
        self.made.append(d)
        return d

    def make(self, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> ctypes.c_void_p:
        """A finished descriptor with these attributes: number, type, values."""
        d = self.new(kind)
        for number, of, values in attributes:
            held = [v.value if isinstance(v, ctypes.c_void_p) else v for v in values]
            array = (C_TYPES.get(of, ctypes.c_int) * len(held))(*held)
            self.check(self.library.cudnnBackendSetAttribute(d, number, of, ctypes.c_int64(len(held)), array))
        self.check(self.library.cudnnBackendFinalize(d))
        return d

    def parts(self, d: ctypes.c_void_p, number: int, kind: int, most: int) -> list[ctypes.c_void_p]:
        """The descriptors that one holds."""
        got = self.read(d, number, DESCRIPTOR, [self.new(kind).value for _ in range(most)])
        return [ctypes.c_void_p(v) for v in got]

    def numbers(self, d: ctypes.c_void_p, number: int, of: int = INT64, most: int = 1) -> list[int]:
        return self.read(d, number, of, [0] * most)

    def read(self, d: ctypes.c_void_p, number: int, of: int, room: list[Any]) -> list[Any]:
        array, count = (C_TYPES.get(of, ctypes.c_int) * len(room))(*room), ctypes.c_int64()
        args = (d, number, of, ctypes.c_int64(len(room)), ctypes.byref(count), array)
        self.check(self.library.cudnnBackendGetAttribute(*args))
        return list(array[: count.value])

    def check(self, status: int) -> None:
        if status:
            raise CudnnError(self.library.cudnnGetErrorString(status).decode())


def strides(sizes: Sequence[int], channels_last: bool) -> list[int]:
    order = [*range(len(sizes) - 1, -1, -1)]
    if channels_last:
        order = [1, *range(len(sizes) - 1, 1, -1), 0]
    out, step = [0] * len(sizes), 1
    for i in order:
        out[i], step = step, step * sizes[i]
    return out


Answer = tuple[int, list[tuple[int, int]], int]


def answer(session: Session, q: dict[str, Any]) -> Answer | None:
    """Engine, its knobs and the bytes of its workspace; None where cuDNN has no engine."""
    with session.question():
        try:
            return next(_engines(session, q), None)
        except CudnnError:
            return None


def _engines(session: Session, q: dict[str, Any]) -> Iterator[Answer]:
    dtype, spatial = DTYPES[q["dtype"]], len(q["stride"])
    tensors = [
        session.make(TENSOR, (900, INT64, [16]), (901, DATA_TYPE, [dtype]), (902, INT64, sizes),
                     (903, INT64, strides(sizes, q["channels_last"])), (906, INT64, [i + 1]))
        for i, sizes in enumerate((q["large"], q["weights"], q["small"]))
    ]  # fmt: skip
    convolution = session.make(
        CONVOLUTION, (100, DATA_TYPE, [dtype if dtype == 1 else 0]), (101, CONVOLUTION_MODE, [1]),
        (102, INT64, q["dilation"]), (103, INT64, q["stride"]), (104, INT64, q["padding"]), (105, INT64, q["padding"]),
        (106, INT64, [spatial]),
    )  # fmt: skip
    alpha, beta, how, *places = PARTS[q["role"]]
    operation = session.make(
        OPERATIONS[q["role"]], (alpha, FLOAT, [1.0]), (beta, FLOAT, [0.0]), (how, DESCRIPTOR, [convolution]),
        *((place, DESCRIPTOR, [t]) for place, t in zip(places, tensors, strict=True)),
    )  # fmt: skip
    graph = session.make(GRAPH, (801, DESCRIPTOR, [operation]))
    for mode, most in LISTS:
        heuristic = session.make(HEURISTIC, (200, HEURISTICS, [mode]), (201, DESCRIPTOR, [graph]),
                                 (204, DESCRIPTOR, [session.device]))  # fmt: skip
        for config in session.parts(heuristic, 202, CONFIG, most):
            (engine,) = session.parts(config, 300, ENGINE, 1)
            if q["forbidden"] and set(q["forbidden"]) & set(session.numbers(engine, 1303, NOTE, 20)):
                continue
            try:
                plan = session.make(PLAN, (401, DESCRIPTOR, [config]), (407, DESCRIPTOR, [session.device]))
            except CudnnError:
                continue
            chosen = session.parts(config, 302, KNOB_CHOICE, KNOBS)
            knobs = [(session.numbers(k, 600, KNOB)[0], session.numbers(k, 601)[0]) for k in chosen]
            yield session.numbers(engine, 1301)[0], knobs, session.numbers(plan, 402)[0]


def main(cudnn: str, cublas: str) -> None:
    asked = json.load(sys.stdin)
    session = Session(cudnn, cublas, asked["device"])
    json.dump([answer(session, q) for q in asked["questions"]], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
