"""Orders of pipeline schedules that are listed stage by stage: ZB-V, DualPipeV, DualPipe. No times.

A stage runs blocks of operations; what a block makes is handed on at its end. Moments are the times at which
operations start where each takes one unit.

ZB-V: arXiv 2401.10241, section 6, in the order of its authors' and PyTorch's code (ScheduleZBVZeroBubble). DualPipe:
arXiv 2412.19437, section 3.2.1, in the eight steps of github.com/deepseek-ai/DualPipe; DualPipeV is its half that goes
through the stages and back (same repository).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNIT = 4  # between two operations of a stage; what comes between them (weight gradients, messages) has room
F, B, W = range(3)


class Route(Enum):
    """How a microbatch goes through the chunks of a pipeline's stages."""

    LOOP = "from the first stage to the last, for each chunk again"
    BACK = "chunk 0 from the first stage to the last, chunk 1 back to the first"
    BOTH_WAYS = "one half from the first stage to the last (chunk 0), the other from the last to the first (chunk 1)"

    @property
    def copies(self) -> int:
        """Chunks that have the same layers."""
        return 2 if self is Route.BOTH_WAYS else 1

    def slots(self, stages: int, virtual: int) -> tuple[tuple[int, ...], ...]:
        """[stage][chunk]: the place of its layers in the model."""
        if self is Route.LOOP:
            return tuple(tuple(c * stages + s for c in range(virtual)) for s in range(stages))
        last = 2 * stages - 1 if self is Route.BACK else stages - 1
        return tuple((s, last - s) for s in range(stages))


class Extent(NamedTuple):
    """How large a pipeline's step is: stages, microbatches, chunks a stage, microbatches that go through a chunk before
    the next chunk's turn."""

    stages: int
    microbatches: int
    virtual: int
    group: int


@dataclass(frozen=True, eq=False)
class OperationMoments:
    """Moments by [stage, turn], and the task at whose end an output is handed on: numbers of F, B and W one after the
    other, by stage and turn. `weight` is empty where backwards are not split."""

    forward: Ints
    backward: Ints
    weight: Ints
    forward_done: Ints
    backward_done: Ints


class Operation(NamedTuple):
    """One operation of a stage: what (F, B or W), on which chunk, the number of its microbatch there."""

    what: int
    chunk: int
    number: int


Block = tuple[Operation, ...]  # run one after the other; outputs are handed on at the end
Counts = dict[tuple[int, int], int]
Take = Callable[[int, int], Operation]


def _counter() -> Take:
    """Numbers the operations of each (what, chunk) as they are taken."""
    taken: Counts = {}

    def take(what: int, chunk: int) -> Operation:
        number = taken.get((what, chunk), 0)
        taken[what, chunk] = number + 1
        return Operation(what, chunk, number)

    return take


def zero_bubble_v(extent: Extent) -> OperationMoments:
    """ZB-V."""
    return _moments(extent, Route.BACK, [_zero_bubble_v(k, extent) for k in range(extent.stages)])


def dual_pipe_v(extent: Extent) -> OperationMoments:
    """DualPipeV."""
    orders = [_dual(extent.stages, k, extent.microbatches) for k in range(extent.stages)]
    return _moments(extent, Route.BACK, orders)


def dual_pipe(extent: Extent) -> OperationMoments:
    """DualPipe: stages of the second half do what their mirror images do, the other way."""
    half, orders = extent.stages // 2, []
    for k in range(extent.stages):
        order = _dual(half, min(k, extent.stages - 1 - k), extent.microbatches // 2)
        if k >= half:
            order = [tuple(op._replace(chunk=1 - op.chunk) for op in block) for block in order]
        orders.append(order)
    return _moments(extent, Route.BOTH_WAYS, orders)


def _zero_bubble_v(stage: int, extent: Extent) -> list[Block]:
    """Forwards down, forwards both ways, then F, B and W of both chunks in turn; late weight gradients at the end.
    With few microbatches, as with more that are left out."""
    stages, many = extent.stages, max(extent.microbatches, 2 * extent.stages - 1)
    take, after = _counter(), stages - stage
    ops = [take(F, 0) for _ in range(2 * after - 1)]
    ops += [take(F, c) for _ in range(stage) for c in (1, 0)]
    ops += [take(what, 1) for _ in range(after) for what in (F, B, W)]
    down, up = 2 * after - 1 + stage, stage + after
    while up < down or down < many:
        if down < many:
            ops.append(take(F, 0))
            down += 1
        ops += [take(B, 0), take(W, 0), take(F, 1), take(B, 1), take(W, 1)]
        up += 1
    ops += [take(B, c) for _ in range(stage) for c in (0, 1)]
    ops += [take(what, 0) for _ in range(after) for what in (B, W)]
    ops += [take(W, c) for c in (1, 0) for _ in range(stage)]
    return [(op,) for op in ops if op.number < extent.microbatches]


def _dual(stages: int, stage: int, microbatches: int) -> list[Block]:
    """The eight steps of DualPipe: forwards, forwards of both chunks, the first backwards between them, forwards beside
    backwards, and the same back to the end. A backward is whole (B and W) but where late W fill waits."""
    take, after, here = _counter(), stages - stage - 1, stage + 1
    late: deque[Operation] = deque()

    def backward(chunk: int, split: bool = False) -> Block:
        both = take(B, chunk), take(W, chunk)
        if split:
            late.append(both[1])
        return both[:1] if split else both

    def paired(ahead: int, back: int) -> Block:
        return (take(F, ahead), *backward(back))

    out: list[Block] = [(take(F, 0),) for _ in range(2 * after)]
    out += [(take(F, c),) for _ in range(here) for c in (0, 1)]
    for _ in range(after):
        out += [backward(1, split=True), (late.popleft(),), (take(F, 1),)]
    for i in range(microbatches - 2 * stages + here):
        apart = i == 0 and not after  # in the middle of the way the first two are not run beside each other
        out += [(take(F, 0),), backward(1)] if apart else [paired(0, 1)]
        out.append(paired(1, 0))
    for _ in range(after):
        out += [backward(1), paired(1, 0)]
    for i in range(here):
        odd, half = stage % 2 == 1, here // 2
        out.append(backward(1, split=i >= half if odd else i > half))
        out.append(backward(0, split=i >= half))
    for _ in range(after):
        out += [(late.popleft(),), backward(0, split=True)]
    return out + [(op,) for op in late]


def _source(op: Operation, stage: int, stages: int, route: Route) -> tuple[int, Operation] | None:
    """The stage and operation whose output an operation needs, other than on its own stage before it."""
    if op.what == W:
        return None
    step = 1 if (op.what == F) == (op.chunk == 0) else -1
    if 0 <= stage - step < stages:
        return stage - step, op
    turns_back = route is Route.BACK and stage == stages - 1 and op.chunk == (op.what == F)
    return (stage, op._replace(chunk=1 - op.chunk)) if turns_back else None


def _moments(extent: Extent, route: Route, orders: list[list[Block]]) -> OperationMoments:
    """Run the blocks, each operation one unit long and what it needs handed on at once."""
    stages, each = extent.stages, extent.microbatches // route.copies
    start = np.zeros((3, stages, extent.virtual * each), np.int64)
    done = np.zeros((2, stages, extent.virtual * each), np.int64)
    ready: dict[tuple[int, Operation], int] = {}
    free, at, moved = [0] * stages, [0] * stages, True
    while moved:
        moved = False
        for k, order in enumerate(orders):
            while at[k] < len(order):
                block = order[at[k]]
                needs = [x for op in block if (x := _source(op, k, stages, route))]
                if any(need not in ready for need in needs):
                    break
                free[k] = max([free[k], *(ready[need] for need in needs)])
                final = block[-1]
                number = (final.what * stages + k) * start.shape[2] + final.chunk * each + final.number
                for op in block:
                    turn = op.chunk * each + op.number
                    start[op.what, k, turn] = free[k]
                    free[k] += UNIT
                    if op.what != W:
                        done[op.what, k, turn] = number
                for op in block:
                    ready[k, op] = free[k]
                at[k], moved = at[k] + 1, True
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "stages wait for each other in a circle"
    return OperationMoments(start[F], start[B], start[W], done[F], done[B])
