"""Operation tables of made-up pipeline jobs with no host time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from presage.engine import Builder, simulate
from presage_validation.pipeline import MeasuredOp, orders

HEADER = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id,gmc"

WAYS = {"F": "forward", "B": "backward"}


class MadeUpJob:
    """A pipeline job on streams with no host time: F 1 s, B 2 s, one entry of `microbatches` per replica.

    With `idle`, the ends of the model also list the sends and receives that they have no use for.
    """

    def __init__(self, microbatches: Sequence[int], stages: int, chunks: int, schedule: str, idle: bool) -> None:
        self.stages, self.places, self.idle = stages, stages * chunks, idle
        self.build = Builder()
        self.rows: list[tuple[int | str, ...]] = []
        self.lanes: dict[tuple[object, ...], int] = {}
        self.count: dict[tuple[object, ...], int] = {}
        self.meet: dict[tuple[object, ...], list[int]] = {}
        self.work: dict[tuple[int, int, str, int], int] = {}
        self.previous: dict[int, int] = {}
        for dp, count in enumerate(microbatches):
            order = orders(schedule, stages, count, chunks)
            for stage, ops in enumerate(order):
                self.worker(dp, stage, ops)
            for stage, ops in enumerate(order):
                for op in ops:
                    self.send(dp, stage, op)
        for members in self.meet.values():
            self.build.meet(members)

    def add(
        self, dp: int, stage: int, stream: str, name: str, seconds: float, at: tuple[int, ...] = (-1, -1, -1)
    ) -> int:
        key = (dp, stage, stream)
        if key not in self.lanes:
            self.lanes[key] = self.build.lane(str(key))
        seq = self.count[dp, stage, name] = self.count.get((dp, stage, name), -1) + 1
        self.rows.append((dp, stage, dp * self.stages + stage, name, seq, *at))
        return self.build.task(self.lanes[key], seconds, name)

    def worker(self, dp: int, stage: int, ops: Sequence[MeasuredOp]) -> None:
        gather = self.add(dp, stage, "main", "params-all-gather", 0.1, (0, -1, -1))
        self.meet.setdefault(("gather", stage), []).append(gather)
        last: dict[str, int] = {}
        for op in ops:
            at = (op.chunk, op.microbatch, op.chunk * self.stages + stage)
            task = self.add(dp, stage, "main", f"{WAYS[op.way]}-compute", 1.0 if op.way == "F" else 2.0, at)
            self.work[dp, at[2], op.way, op.microbatch] = task
            self.previous[task] = last.get(op.way, gather)
            last[op.way] = task
        for name, key in (("grads-reduce-scatter", stage), ("optimizer-clip-main-grad", -1)):
            self.meet.setdefault((name, key), []).append(self.add(dp, stage, "main", name, 0.2))
        self.add(dp, stage, "main", "optimizer", 0.3)

    def send(self, dp: int, stage: int, op: MeasuredOp) -> None:
        place = op.chunk * self.stages + stage
        to = place + (1 if op.way == "F" else -1)
        way, made = WAYS[op.way], self.work[dp, place, op.way, op.microbatch]
        if self.idle and place == (0 if op.way == "F" else self.places - 1):
            self.build.edge(self.previous[made], self.add(dp, stage, f"no {way}-recv", f"{way}-recv", 0.001))
        if not 0 <= to < self.places:
            if self.idle:
                self.build.edge(made, self.add(dp, stage, f"no {way}-send", f"{way}-send", 0.001))
            return
        needs = self.work[dp, to, op.way, op.microbatch]
        send = self.add(dp, stage, f"{way}-send", f"{way}-send", 0.01)
        receive = self.add(dp, to % self.stages, f"{way}-recv", f"{way}-recv", 0.01)
        self.build.edge(made, send)
        self.build.edge(receive, needs)
        self.build.edge(self.previous[needs], receive)
        self.build.meet([send, receive])

    def table(self, steps: int, spread: float) -> str:
        noise = np.exp(spread * np.random.default_rng(0).standard_normal((len(self.build), steps)))
        line = simulate(self.build.build(), self.build.durations[:, None] * noise)
        text = [HEADER]
        for step in range(steps):
            for task, (dp, stage, rank, name, *at) in enumerate(self.rows):
                start, end = float(line.ready[task, step]), float(line.end[task, step])
                text.append(",".join(map(str, (dp, stage, rank, step, name, start, end - start, *at))))
        return "\n".join(text) + "\n"


def made_up_job(
    path: Path,
    microbatches: Sequence[int] = (4, 4),
    stages: int = 2,
    chunks: int = 1,
    schedule: str = "1f1b",
    steps: int = 6,
    spread: float = 0.0,
    idle: bool = False,
) -> Path:
    path.write_text(MadeUpJob(microbatches, stages, chunks, schedule, idle).table(steps, spread))
    return path


SHAPES = [
    {},
    {"spread": 0.2},
    {"microbatches": (8, 3, 5), "stages": 3, "spread": 0.1},
    {"microbatches": (4,), "stages": 1},
    {"microbatches": (8, 8), "stages": 4, "chunks": 2, "schedule": "interleaved", "spread": 0.05},
    {"microbatches": (4, 8), "stages": 2, "chunks": 3, "schedule": "interleaved", "spread": 0.05, "idle": True},
    {"microbatches": (6, 6), "stages": 3, "schedule": "gpipe", "spread": 0.1},
]
