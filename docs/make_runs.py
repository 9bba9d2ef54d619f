"""Score predictions of public training runs, by all that may matter, and write docs/runs.md.

python docs/make_runs.py ../shared
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import runs_text as text
from own_steps import score_own_steps
from runs_priors import priors

import presage as ps
from presage.hardware import gpu
from presage.memory import job_memory
from presage.prediction.jobs.efficiency import efficiency_without, shipped_efficiency
from presage_validation.public_table import read_table
from presage_validation.run_jobs import COLUMNS, job_of_run
from presage_validation.runs import score_runs
from presage_validation.score import AccuracyResult, Row, Score, score

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("runs.md")
OWN_STEPS = ROOT / "data" / "h200_jobs" / "steps.json"
GIB = 1024.0**3
LEFT, SHIPPED, LAWS = "step_time_left_out", "step_time", "step_time_unfitted"
HEAD = "| {} | n | MAPE | median | p90 | max | bias | as shipped | laws alone |\n|---|---|---|---|---|---|---|---|---|"
Table = Mapping[int, Mapping[str, str]]


@dataclass(frozen=True)
class Twins:
    """Rows that are one job to presage."""

    source: str
    name: str
    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda r: abs(r.error))

    @property
    def floor(self) -> float:
        """The mean error of the best guess there could be for all of them, their geometric mean."""
        measured = np.array([r.measured for r in self.rows])
        return float(np.abs(np.exp(np.log(measured).mean()) / measured - 1).mean())


# ---- tables of scores


def percent(x: float, sign: bool = False) -> str:
    return f"{100 * x:+.1f}%" if sign else f"{100 * x:.1f}%"


def cells(rows: Iterable[Row]) -> str:
    s = score(rows)
    sizes = (percent(x) for x in (s.mape, s.median, s.p90, s.max))
    return " | ".join([str(s.n), *sizes, percent(s.bias, sign=True)])


def of(result: AccuracyResult, metric: str) -> list[Row]:
    return [r for r in result.rows if r.metric == metric]


def scored(name: str, result: AccuracyResult, keep: Mapping[str, object] | set[str]) -> str:
    """A line for the rows whose names are kept: left out, as shipped, and by the laws alone."""
    left, ships, laws = ([r for r in of(result, m) if r.name in keep] for m in (LEFT, SHIPPED, LAWS))
    return f"| {name} | {cells(left)} | {percent(score(ships).mape)} | {percent(score(laws).mape)} |"


def grouped(what: str, result: AccuracyResult, groups: Mapping[str, set[str]]) -> Iterator[str]:
    yield HEAD.format(what)
    for name, names in groups.items():
        yield scored(name, result, names)


def named(result: AccuracyResult, wanted: re.Pattern[str]) -> dict[str, set[str]]:
    """Names of rows by the group of theirs that the pattern fits."""
    return by(result, lambda r: next(g for g in r.also if wanted.match(g)).removeprefix("GPU "))


def line_of(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])


def by(result: AccuracyResult, group: Callable[[Row], str]) -> dict[str, set[str]]:
    """Names of rows by a group of theirs, the largest first."""
    found: dict[str, set[str]] = defaultdict(set)
    for r in of(result, LEFT):
        found[group(r)].add(r.name)
    return dict(sorted(found.items(), key=lambda kv: -len(kv[1])))


# ---- sources and bars


def sources(result: AccuracyResult) -> list[str]:
    return list(dict.fromkeys(r.group for r in of(result, LEFT)))


def of_source(result: AccuracyResult, metric: str, source: str) -> Score:
    return score(r for r in of(result, metric) if r.group == source)


def source_table(result: AccuracyResult, table: Table) -> Iterator[str]:
    yield "| source | what | n | MAPE | median | p90 | max | bias | as shipped | laws alone | bar | errors of others |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for source in sources(result):
        rows = [r for r in of(result, LEFT) if r.group == source]
        others = [percent(of_source(result, m, source).mape) for m in (SHIPPED, LAWS)]
        bar, peers = (
            verdict(score(rows).mape, text.BARS.get(source)),
            [*text.PEERS.get(source, ()), *own(source, table)],
        )
        line = " | ".join([source, text.WHAT.get(source, ""), cells(rows), *others, bar, "; ".join(peers)])
        yield f"| {line} |"
    yield scored("all | ", result, {r.name for r in of(result, LEFT)}) + " | |"


def verdict(found: float, bar: float | None) -> str:
    if bar is None:
        return ""
    return f"{100 * bar:.0f}%" if found <= bar else f"{100 * bar:.0f}%, **missed**"


def own(source: str, table: Table) -> Iterator[str]:
    """The error of the tool that published a measurement, where the table has what it predicted."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in table.values():
        said = re.search(r"(\w+) predicted ([\d.]+) ms", row["notes"]) if row["source_key"] == source else None
        if said:
            found[said[1]].append(abs(float(said[2]) / 1e3 / float(row["step_time_s"]) - 1))
    for tool, errors in found.items():
        yield f"{tool} itself {percent(float(np.mean(errors)))} on these {len(errors)} rows"


def bars(result: AccuracyResult, full: int) -> Iterator[str]:
    rows, memory = of(result, LEFT), score(of(result, "peak_memory"))
    found = {source: of_source(result, LEFT, source).mape for source in sources(result)}
    rest = score(r for r in rows if "measured" in r.also)
    missed = [f"{s} ({percent(found[s])}, bar {percent(b)})" for s, b in text.BARS.items() if found.get(s, 0.0) > b]
    yield "| | found | bar |"
    yield "|---|---|---|"
    yield f"| all {len(rows)} rows: median | {percent(score(rows).median)} | {percent(text.MEDIAN)} |"
    yield f"| MAPE | {percent(score(rows).mape)} | {percent(text.MAPE)} |"
    yield f"| the {rest.n} that are measured steps: median, MAPE | {percent(rest.median)}, {percent(rest.mape)} | |"
    yield f"| every source once: mean of their MAPEs | {percent(float(np.mean(list(found.values()))))} | |"
    kept = f"{len(text.BARS) - len(missed)} of {len(text.BARS)}; missed: {', '.join(missed) or 'none'}"
    yield f"| sources that keep their bar | {kept} | all |"
    yield f"| peak memory, {memory.n} rows that state it: MAPE | {percent(memory.mape)} | {percent(text.MEMORY)} |"
    yield f"| rows called out of memory, though they ran | {full} | 0 |"


# ---- the fit


def factors(result: AccuracyResult) -> Iterator[str]:
    yield "| fitted without | GEMMs | those of the backward pass, on top | the host of experts' layers |"
    yield "|---|---|---|---|"
    fitted = [s for s in sources(result) if s != "vtrain_single"]
    for name, e in (
        ("nothing: as shipped", shipped_efficiency()),
        *((s, efficiency_without(s)) for s in (*fitted, "aws_moe_ep")),
    ):
        yield f"| {name} | {e.product:.3f} | {e.backward:.3f} | {e.experts:.3f} |"


# ---- one job, many rows


def twins(result: AccuracyResult) -> list[Twins]:
    found: dict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for r in of(result, LEFT):
        found[r.group, r.name.split(": ", 1)[1], r.predicted].append(r)
    return [Twins(source, name, tuple(rows)) for (source, name, _), rows in found.items()]


def twin_table(result: AccuracyResult) -> Iterator[str]:
    heads = ("source", "jobs", "their rows", "slowest over fastest, median", "most", "best possible MAPE", "presage's")
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|---|"
    many = [t for t in twins(result) if len(t.rows) > 1]
    for source in dict.fromkeys(t.source for t in many):
        mine = [t for t in many if t.source == source]
        rows = [r for t in mine for r in t.rows]
        apart = [max(r.measured for r in t.rows) / min(r.measured for r in t.rows) for t in mine]
        floor = sum(t.floor * len(t.rows) for t in mine) / len(rows)
        numbers = f"{np.median(apart):.2f} | {max(apart):.2f} | {percent(floor)} | {percent(score(rows).mape)}"
        yield f"| {source} | {len(mine)} | {len(rows)} | {numbers} |"


def worst(result: AccuracyResult, most: int = 10) -> Iterator[str]:
    yield "| source | job | rows | predicted | measured | error | why |\n|---|---|---|---|---|---|---|"
    for t in sorted(twins(result), key=lambda t: -abs(t.worst.error))[:most]:
        r = t.worst
        times = f"{r.predicted:.3g} s | {r.measured:.3g} s | {percent(r.error, sign=True)}"
        yield f"| {t.source} | {t.name} (line {line_of(r.name)}) | {len(t.rows)} | {times} | {cause(t)} |"


def cause(t: Twins) -> str:
    return next((why for pattern, why in text.CAUSES if re.search(pattern, f"{t.source} {t.name}")), "not looked into")


def biases(result: AccuracyResult) -> str:
    """Sources on A100s, whose errors no pair of factors makes small in all."""
    names = [s for s in sources(result) if all("A100" in r.also[0] for r in of(result, LEFT) if r.group == s)]
    return ", ".join(f"{s} {percent(of_source(result, LEFT, s).bias, sign=True)}" for s in names)


def better_alone(result: AccuracyResult) -> str:
    names = [s for s in sources(result) if of_source(result, LAWS, s).mape < of_source(result, LEFT, s).mape - 1e-4]
    return ", ".join(names) or "none"


# ---- memory, skipped rows


def memory_table(result: AccuracyResult) -> Iterator[str]:
    rows = of(result, "peak_memory")
    yield "| source | n | MAPE | median | p90 | max | bias |\n|---|---|---|---|---|---|---|"
    for source in dict.fromkeys(r.group for r in rows):
        yield f"| {source} | {cells(r for r in rows if r.group == source)} |"
    yield f"| all | {cells(rows)} |"


def called_full(result: AccuracyResult, table: Table) -> list[str]:
    """Rows whose job does not fit, by what is predicted."""
    found = []
    for r in of(result, SHIPPED):
        m = job_memory(job_of_run(table[line_of(r.name)]))
        if not m.fits:
            found.append(f"{r.group} {r.name} ({m.needed / GIB:.1f} GiB of {m.memory / GIB:.1f})")
    return found


def own_steps() -> Iterator[str]:
    found = score_own_steps(OWN_STEPS)
    yield "| model, batch | predicted | measured | error | peak memory error |\n|---|---|---|---|---|"
    memory = {r.name: r for r in of(found, "peak_memory")}
    for r in of(found, SHIPPED):
        times = f"{1e3 * r.predicted:.0f} ms | {1e3 * r.measured:.0f} ms | {percent(r.error, sign=True)}"
        yield f"| {r.name} | {times} | {percent(memory[r.name].error, sign=True)} |"
    yield ""
    yield "| | n | MAPE | median | p90 | max | bias |\n|---|---|---|---|---|---|---|"
    for group in found.groups():
        yield f"| step, {group} | {cells(r for r in of(found, SHIPPED) if r.group == group)} |"
    yield f"| peak memory | {cells(memory.values())} |"


def herd() -> Iterator[str]:
    """A run that the table does not have."""
    yield "| GPUs | plan | TFLOP/s a GPU, predicted | published | error of the step |\n|---|---|---|---|---|"
    for gpus, published in text.HERD.items():
        plan = {"gpus": gpus, "tp": 8, "cp": 1, "pp": 16, "virtual": 8, "zero": 1}
        p = ps.predict_job(ROOT / "examples" / "jobs" / "llama3.1-405b.toml", {"parallel": plan})
        found = p.mfu * gpu("h100_sxm").peak["bf16"] / 1e12
        said = f"tp 8, pp 16, dp {gpus // 128}"
        yield f"| {gpus:,} | {said} | {found:.0f} | {published} | {percent(published / found - 1, sign=True)} |"


def skipped(result: AccuracyResult) -> Iterator[str]:
    for reason, n in Counter(s.reason for s in result.skipped).most_common():
        yield f"- {n}: {reason}"


# ---- the page


def more_runs(path: Path) -> Path:
    """The table of steps by dispatcher, beside that of public runs."""
    return path.parent / "aws_moe" / "aws_moe_runs.csv"


def dispatchers(path: Path) -> Iterator[str]:
    """Every step by dispatcher."""
    result, rows = score_runs(path), dict(read_table(path, COLUMNS))
    yield "| dispatcher | ep | microbatch | overlap | predicted | measured | error |\n|---|---|---|---|---|---|---|"
    for r in of(result, LEFT):
        row = rows[line_of(r.name)]
        way = row["ep_dispatcher"] + (f" over {row['ep_transport']}" if row["ep_dispatcher"] == "deepep" else "")
        what = f"{way} | {row['ep']} | {row['micro_batch']} | {row['a2a_overlap']}"
        yield f"| {what} | {r.predicted:.3g} s | {r.measured:.3g} s | {percent(r.error, sign=True)} |"
    yield from ("", "| | n | MAPE | median | p90 | max | bias |\n|---|---|---|---|---|---|---|")
    kinds = (("left out", LEFT), ("as shipped", SHIPPED), ("laws alone", LAWS))
    yield from (f"| {name} | {cells(of(result, metric))} |" for name, metric in kinds)
    yield from ("", *(f"{name}: {percent(rate)}." for name, rate in result.rates.items() if "sign" in name))


def judged(found: float, bar: float) -> str:
    return f"{percent(found)}{'' if found <= bar else ', **missed**'}"


def asked(result: AccuracyResult, more: AccuracyResult) -> Iterator[str]:
    """Bars that were set, and what was found."""
    rows, extra = of(result, LEFT), of(more, LEFT)
    blackwell = [r for r in rows if any(f"GPU {name}" in r.also for name in ("B200", "B300", "GB300"))]
    yield "| | n | found | asked |\n|---|---|---|---|"
    for name, some, bar in (
        ("experts: MAPE", [r for r in rows if "MoE" in r.also], 0.12), ("steps by dispatcher: MAPE", extra, 0.20),
        ("B200, B300, GB300: MAPE", blackwell, 0.10), ("all rows: MAPE", [*rows, *extra], 0.085),
    ):  # fmt: skip
        found = score(some)
        yield f"| {name} | {found.n} | {judged(found.mape, bar)} | {percent(bar)} |"
    every = [*rows, *extra]
    measured = score(r for r in every if "measured" in r.also)
    yield f"| all rows: median | {len(every)} | {judged(score(every).median, 0.065)} | 6.5% |"
    yield f"| measured steps alone: MAPE | {measured.n} | {judged(measured.mape, 0.085)} | 8.5% |"
    yield f"| measured steps alone: median | {measured.n} | {judged(measured.median, 0.065)} | 6.5% |"
    titan = score(r for r in rows if r.group == "torchtitan")
    yield f"| TorchTitan: MAPE | {titan.n} | {judged(titan.mape, 0.09)} | 9.0% |"


def page(path: Path) -> Iterator[str]:
    result, table = score_runs(path), dict(read_table(path, COLUMNS))
    full = called_full(result, table)
    yield from (text.INTRO, "", *bars(result, len(full)), "", "## By source", "", *source_table(result, table), "")
    yield f"On A100s alone sources disagree, by their bias: {biases(result)}."
    yield "No factor that is the same for all makes them agree."
    yield from (f"Closer by the laws alone than with factors: {better_alone(result)}.", "", text.OTHERS, "")
    yield from ("## Steps by dispatcher", "", text.DISPATCHERS, "", *dispatchers(more_runs(path)), "")
    yield from ("## Rows that another simulator made", "", text.SIMULATED, "")
    yield from ("## What falls short", "", *asked(result, score_runs(more_runs(path))), "", text.SHORT, "")
    yield from ("## What is fitted", "", text.FITTED, "", *factors(result), "")
    yield from ("## What was chosen with errors in view", "", text.CHOSEN, "", *priors((path, more_runs(path))), "")
    yield from cuts(result, table)
    yield from ("## Rows that are one job", "", text.TWINS, "", *twin_table(result), "")
    yield from ("## The ten worst jobs", "", text.WORST, "", *worst(result), "")
    yield from ("## Peak memory", "", *memory_table(result), "")
    yield from (f"Called out of memory, though they ran: {'; '.join(full) or 'none'}.", "")
    yield from ("## Steps of our own", "", text.OWN, "", *own_steps(), "")
    yield from ("## A run that is not in the table", "", text.NOT_IN_TABLE, "", *herd(), "")
    yield from ("## Rows left out", "", *skipped(result), "")
    rec = of(result, "step_time_recommendation")
    yield from ("## Recommendation runs", "", text.RECOMMEND, "", "| source | n | MAPE | median | p90 | max | bias |")
    yield from ("|---|---|---|---|---|---|---|", f"| mlperf_dlrm | {cells(rec)} |")


def cuts(result: AccuracyResult, table: Table) -> Iterator[str]:
    """The same rows, cut other ways."""
    for title, pattern in (("GPU", r"GPU "), ("scale", r".*\d GPUs$"), ("kind of model", r"MoE|dense|hybrid")):
        yield from (f"## By {title}", "", *grouped(title, result, named(result, re.compile(pattern))), "")
    software = by(result, lambda r: job_of_run(table[line_of(r.name)]).framework.key)
    yield from ("## By software", "", "As presage takes it.", "", *grouped("software", result, software), "")
    said = by(result, lambda r: table[line_of(r.name)]["complete"].split(":")[0])
    yield from ("## By what the source says", "", text.SAID, "", *grouped("configuration", result, said), "")


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared") / "runs" / "public_runs.csv"
    if not path.is_file():
        sys.exit(f"no table of public runs at {path}")
    PAGE.write_text("\n".join(line.rstrip() for line in page(path)) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


if __name__ == "__main__":
    main()
