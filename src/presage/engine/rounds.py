"""The engine's fast path for pipelines: programs that repeat in rounds, with no task waiting for more than two others.

Thousands of small programs a second (a pipeline schedule for each plan of a search) want no more than this. Tasks are
numbered so that those waited for come first; a meeting of two lanes is one task that waits for both. `unfold` gives the
same as a plain Program: `simulate` of that and `simulate_pipeline` agree (tests/parallel/test_schedules.py).

Once all lanes are at work, such a program does the same again and again. Take one in which, over the last `rounds`
rounds of that, no task fell further behind than `pace` seconds: then none ever will, whatever comes after, because
times only depend on earlier ones by sums and maxima. And if what held up the end runs through a task and the one
`rounds` rounds later, `pace` seconds apart, that stretch can be repeated in a longer program, which so takes no less.
Both together: each further `rounds` rounds take exactly `pace` seconds, and need not be simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.engine.compiled import compiled, inlined
from presage.engine.program import Edges, Lane, Program

Array = NDArray[Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TIE = 1e-15  # of the step: what is nearer than this ended at the same time
SAME = 1e-12  # of the step: sums in another order differ by less
TRIES = (1.0, 2.5)  # times the fewest repetitions that may show the pace


class Pairs(NamedTuple):
    """Task t waits for first[t], and for second[t] with its kind's delay; `len(first)` stands for nobody."""

    first: Array
    second: Array
    kind: Array  # what a task's seconds and the delay of its second wait are looked up by


class Stretch(NamedTuple):
    """Where a program repeats itself."""

    round: int  # tasks of one round, once all lanes are at work
    regular: Array  # [phase, 2]: from which task to which one each does what the one a round before it did
    window: Array  # [phase]: how many tasks before the end of that stretch later ones wait for
    lane: Array
    cascade: bool  # lanes wait for later ones only, so that their paces differ


class Tasks(NamedTuple):
    """Tasks in any order, for `RoundProgram.of`: an entry each."""

    moment: Ints  # what orders them: on a lane, and after what they wait for
    lane: Ints  # of a meeting, the first of its two lanes; the other is the next
    kind: Ints  # what a task's seconds, and the delay of what it waits for, are looked up by
    sender: Ints  # the task whose output it needs, -1: none


@dataclass(frozen=True, eq=False)
class RoundProgram:
    """Tasks in an order in which what is waited for comes first, and where they repeat."""

    waits: Pairs
    stretch: Stretch
    place: Array  # where each task given to `of` is
    meeting: Array  # which tasks are meetings
    first: Array  # tasks whose starts are wanted
    last: Array  # tasks whose ends are wanted

    @staticmethod
    def of(
        tasks: Tasks, lanes: int, meetings: int, round_: int, first: Ints, last: Ints,
        phases: Sequence[slice] = (slice(None),), cascade: bool = False,
    ) -> RoundProgram:  # fmt: skip
        """`meetings`: kinds from this one on are meetings. `round_`: tasks of a round. `phases`: tasks of each phase
        that repeats by itself. `first`, `last`: tasks whose starts and ends are wanted."""
        place = _places(tasks.moment)
        n = len(place)
        second, sends = np.full(n, n, np.int32), np.flatnonzero(tasks.sender >= 0)
        second[place[sends]] = place[tasks.sender[sends]]
        lane, kind = (_moved(c, place) for c in (tasks.lane, tasks.kind))
        waits = Pairs(_lane_waits(lane, kind, meetings, lanes, second), second, kind)
        begins = [0, *(int(place[p].min()) for p in phases[1:]), n] if phases else []
        regular = [_regular(waits, round_, lo, hi) for lo, hi in pairwise(begins)]
        regular = regular if _complete(kind, round_, regular) else []
        window = np.array([_window(waits, hi) for _, hi in regular], np.int64)
        stretch = Stretch(round_, np.array(regular, np.int64).reshape(-1, 2), window, lane, cascade)
        ends = (np.ascontiguousarray(place[x]) for x in (first, last))
        return RoundProgram(waits, stretch, place, kind >= meetings, *ends)

    def __len__(self) -> int:
        return len(self.place)

    @property
    def lane(self) -> Array:
        return self.stretch.lane

    def unfold(
        self, lanes: Sequence[Lane], delay: Floats, name: Ints | None = None, names: Sequence[str] = ("",)
    ) -> tuple[Program, Ints]:
        """The same tasks as a Program (a meeting is a task on each of its two lanes), and the kind of each."""
        shared = self.meeting
        owner = np.repeat(np.arange(len(shared)), 1 + shared)
        place = np.cumsum(1 + shared) - 1 - shared
        lane = self.lane[owner] + (np.arange(len(owner)) != place[owner])
        waits = np.flatnonzero(~shared & (self.waits.second < len(shared)))
        edges = Edges.of(place[self.waits.second[waits]], place[waits], delay[self.waits.kind[waits]])
        group = np.where(shared, np.cumsum(shared) - 1, -1)[owner]
        label = None if name is None else name[owner]
        program = Program.of(lanes, lane, edges, group=group, name=label, names=names)
        return program, np.asarray(self.waits.kind[owner], np.int64)


@dataclass(frozen=True, eq=False)
class PipelineTimes:
    """Starts of a program's `first` tasks, and ends of its `last` ones after all repetitions."""

    start: Floats
    end: Floats
    simulated: int  # repetitions that were simulated; all others follow from them


def simulate_pipeline(
    build: Callable[[int], RoundProgram], total: int, fewest: int, period: int, seconds: Floats, delay: Floats
) -> PipelineTimes:
    """When a program of `total` repetitions runs, from ones with fewer of them where these are certain to show it.

    `build` makes the program with a number of repetitions, of which `fewest` fill all lanes; `period` of them are a
    round. `seconds` and `delay` are by kind of task.
    """
    for few, patient in _tries(total, fewest, period):
        program = build(few)
        end, more = np.empty(len(program) + 1), np.zeros(program.last.size)
        left = (total - few) // period
        if settled(program.waits, seconds, delay, end, program.stretch, program.last.ravel(), left, patient, more):
            start = end[program.first] - seconds[program.waits.kind[program.first]]
            return PipelineTimes(start, end[program.last] + more.reshape(program.last.shape), few)
    raise AssertionError("a program with all its repetitions leaves nothing to be unsure of")


def _tries(total: int, fewest: int, period: int) -> Iterator[tuple[int, bool]]:
    """Numbers of repetitions to simulate: the fewest that may show the pace, some more, all; and whether to go on from
    there round by round."""
    for times in TRIES:
        few = int(fewest * times)
        few += (total - few) % period
        if few * 1.3 < total:
            yield few, times == TRIES[-1]
    yield total, True


# ---- the order of tasks


@compiled
def _places(moment: Array) -> Array:
    """The place of each task when all are sorted by their moments."""
    start = np.zeros(moment.max() + 2, np.int32)
    for m in moment:
        start[m + 1] += 1
    for m in range(len(start) - 1):
        start[m + 1] += start[m]
    place = np.empty(len(moment), np.int32)
    for i in range(len(moment)):
        place[i] = start[moment[i]]
        start[moment[i]] += 1
    return place


def _moved(column: Ints, place: Array) -> Array:
    moved = np.empty(len(place), np.int32)
    moved[place] = column
    return moved


@compiled
def _lane_waits(lane: Array, kind: Array, meetings: int, lanes: int, second: Array) -> Array:
    """The task before each on its lane; a meeting is on two lanes, and waits for both."""
    n = len(lane)
    last, first = np.full(lanes, n, np.int32), np.empty(n, np.int32)
    for t in range(n):
        first[t] = last[lane[t]]
        last[lane[t]] = t
        if kind[t] >= meetings:
            second[t] = last[lane[t] + 1]
            last[lane[t] + 1] = t
    return first


def _regular(w: Pairs, round_: int, lo: int, hi: int) -> tuple[int, int]:
    """The longest stretch in which every task but the first round's is one of the round before, moved on."""
    if hi - lo <= round_:
        return lo, lo
    same = np.ones(hi - lo - round_, np.bool_)
    task, nobody = np.arange(lo, hi), len(w.first)
    for column in (w.first[lo:hi], w.second[lo:hi]):
        back = np.where(column == nobody, 0, task - column)
        same &= back[round_:] == back[:-round_]
    same &= w.kind[lo + round_ : hi] == w.kind[lo : hi - round_]
    at, stop = _longest(same)
    return lo + at, lo + (stop + round_ if stop > at else at)


def _complete(kind: Array, round_: int, regular: list[tuple[int, int]]) -> bool:
    """Whether a round of all phases has every kind of task that recurs: else it is no round, but lanes filling up."""
    inside = [kind[max(lo, hi - round_) : hi] for lo, hi in regular]
    kinds, count = np.unique(kind, return_counts=True)
    return bool(inside) and bool(np.isin(kinds[count > 1], np.concatenate(inside)).all())


@compiled
def _longest(same: Array) -> tuple[int, int]:
    """The longest run of True, the last of those as long."""
    at, stop, begin = 0, 0, 0
    for i in range(len(same)):
        if not same[i]:
            begin = i + 1
        elif i + 1 - begin >= stop - at:
            at, stop = begin, i + 1
    return at, stop


def _window(w: Pairs, stop: int) -> int:
    """How far before `stop` lie the tasks that those from `stop` on wait for; or, within a round, those of a round."""
    least = min(int(w.first[stop:].min(initial=stop)), int(w.second[stop:].min(initial=stop)))
    task = np.arange(stop)
    reach = [np.where(c[:stop] == len(w.first), 0, task - c[:stop]).max(initial=0) for c in (w.first, w.second)]
    return max(stop - least, *map(int, reach))


# ---- the recursion


@compiled
def forward_pairs(w: Pairs, seconds: Array, delay: Array, end: Array, begin: int, stop: int) -> None:
    """Fill `end` for tasks begin..stop; it has one place more than there are tasks: the end of nobody, 0."""
    end[len(w.first)] = 0.0
    for t in range(begin, stop):
        k = w.kind[t]
        a, b = end[w.first[t]], end[w.second[t]] + delay[k]
        end[t] = (a if a > b else b) + seconds[k]


@inlined
def holder(w: Pairs, delay: Array, end: Array, t: int, tie: float) -> int:
    """The task whose end let task t start; the first of its two where they differ by no more than `tie` seconds."""
    a, b = end[w.first[t]], end[w.second[t]] + delay[w.kind[t]]
    return int(w.first[t]) if a >= b - tie else int(w.second[t])


@compiled
def settled(
    w: Pairs, seconds: Array, delay: Array, end: Array, by: Stretch, last: Array, left: int, patient: bool, more: Array
) -> bool:
    """Fill `end`, and `more`: how much later the tasks `last` end in a step with `left` rounds more; False if unsure.

    Patient, it goes on round by round until it is sure, in the same places: the last round takes the first one's.
    """
    n, batch, valid = len(w.first), 1, 0
    fits = _rounds(by)
    forward_pairs(w, seconds, delay, end, 0, n)
    rounds = _paces(w, delay, end, by, last, left, valid, more) if left else 1
    while left and (rounds == 0 or left % rounds):
        if fits == 0 or not (patient or rounds):
            return False
        further = fits + (left - fits) % rounds if rounds else fits * batch
        further = min(further, left)
        valid = _go_on(w, seconds, delay, end, by, further, fits)
        left -= further
        batch *= 2
        rounds = _paces(w, delay, end, by, last, left, valid, more) if left else 1
    for i in range(len(last)):
        more[i] *= left // rounds
    return True


@compiled
def _rounds(by: Stretch) -> int:
    """Rounds that the regular stretch holds besides its window; 0 where it has phases that would all have to grow."""
    if len(by.regular) != 1:
        return 0
    return int(max((by.regular[0, 1] - by.regular[0, 0] - by.window[0]) // by.round, 0))


@compiled
def _go_on(w: Pairs, seconds: Array, delay: Array, end: Array, by: Stretch, further: int, fits: int) -> int:
    """Run `further` rounds more, and what follows them; the first task whose end is of the same step as the last's."""
    stop, window, valid = by.regular[0, 1], by.window[0], 0
    while further:
        step = further % fits or fits
        valid = stop - step * by.round
        for i in range(window):
            end[valid - window + i] = end[stop - window + i]
        forward_pairs(w, seconds, delay, end, valid, stop)
        further -= step
    forward_pairs(w, seconds, delay, end, stop, len(w.first))
    return valid


@compiled
def _paces(w: Pairs, delay: Array, end: Array, by: Stretch, last: Array, most: int, valid: int, pace: Array) -> int:
    """Fill `pace`, how much later the tasks `last` end for every so many rounds more as are given back; 0 if unsure."""
    pace[:] = 0.0
    top = last[np.argmax(end[last])]
    of = np.zeros((len(by.regular), by.lane.max() + 2))
    seen, known = np.zeros(len(w.first), np.int32), np.zeros(len(w.first), np.bool_)
    for rounds in range(1, most + 1):
        step = rounds * by.round
        if not _grown(end, step, by, valid, of):
            return 0
        if not _held(w, delay, end, step, by, of, top, seen, -rounds, known, valid):
            continue
        for i in range(len(last)):
            if not _held(w, delay, end, step, by, of, last[i], seen, i + 1, known, valid):
                return 0
            pace[i] = of[:, by.lane[last[i]]].sum()
        return rounds
    return 0


@compiled
def _grown(end: Array, step: int, by: Stretch, valid: int, of: Array) -> bool:
    """Put into of[phase, lane] how much later than the one `step` tasks before it a task ends at most."""
    of[:] = 0.0
    for k in range(len(by.regular)):
        stop = by.regular[k, 1]
        begin = stop - by.window[k]
        if begin - step < max(by.regular[k, 0], valid - by.window[k]):
            return False
        for t in range(begin, stop):
            of[k, by.lane[t]] = max(of[k, by.lane[t]], end[t] - end[t - step])
        if by.cascade and k == 1:  # a lane waits for those after it only, and so keeps the pace of the slowest of them
            for s in range(of.shape[1] - 2, -1, -1):
                of[k, s] = max(of[k, s], of[k, s + 1])
        else:
            of[k, :] = of[k].max()
    return len(by.regular) > 0


@compiled
def _held(
    w: Pairs, delay: Array, end: Array, step: int, by: Stretch, of: Array, task: int, seen: Array, stamp: int,
    known: Array, valid: int,
) -> bool:  # fmt: skip
    """Whether what held up a task runs, in every phase, through two tasks `step` apart that kept the phase's pace."""
    n, tie, same, lane = len(w.first), TIE * end[task], SAME * end[task], by.lane[task]
    t, k, remembers = task, len(by.regular) - 1, len(by.regular) == 1
    while valid <= t < n and k >= 0 and not (remembers and known[t]):
        seen[t] = stamp
        later = t + step
        if by.regular[k, 0] <= t and later < by.regular[k, 1] and seen[later] == stamp:
            k -= end[later] - end[t] >= of[k, lane] - same
        t = holder(w, delay, end, t, tie)
    sure = k < 0 or (valid <= t < n and known[t])
    if sure and remembers:
        t = task
        while t < n and seen[t] == stamp and not known[t]:
            known[t] = True
            t = holder(w, delay, end, t, tie)
    return sure
