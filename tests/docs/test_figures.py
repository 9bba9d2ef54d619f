"""Figures of accuracy are the same wherever README and docs claim them.

The one place is the generated pages (`make accuracy`): SOURCES says where each figure stands there, CLAIMS where it is
repeated. A claim may have fewer digits, not other ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
N = r"([\d.]+)%"
SOURCES = {
    "jobs, median": ("runs.md", rf"all 1323 rows: median \| {N}"),
    "jobs, mean": ("runs.md", rf"^\| MAPE \| {N}"),
    "jobs, worst": ("runs.md", rf"^\| megatron_bridge \| NVIDIA(?:[^|]*\|){{5}} {N}"),
    "jobs, experts": ("runs.md", rf"^\| MoE \| \d+ \| {N}"),
    "recommendation": ("runs.md", rf"^\| mlperf_dlrm \| 33 \| {N}"),
    "recommendation, worst": ("runs.md", rf"^\| mlperf_dlrm \| 33 \|(?:[^|]*\|){{3}} {N}"),
    "jobs, memory": ("runs.md", rf"peak memory, 55 rows that state it: MAPE \| {N}"),
    "steps, GPU time": ("accuracy.md", rf"the 25 cases: GPU active time \| 25 \| [^|]+\| {N}"),
    "steps, GPU time worst": ("accuracy.md", rf"the 25 cases: GPU active time \| 25 \|(?:[^|]*\|){{3}} {N}"),
    "steps, memory": ("accuracy.md", rf"the 25 cases: peak allocated \| 25 \| [^|]+\| {N}"),
    "steps, memory worst": ("accuracy.md", rf"the 25 cases: peak allocated \| 25 \|(?:[^|]*\|){{3}} {N}"),
    "varied, memory": ("accuracy.md", rf"44 varied cases: peak allocated \| 44 \| [^|]+\| {N}"),
    "varied, memory worst": ("accuracy.md", rf"44 varied cases: peak allocated \| 44 \|(?:[^|]*\|){{3}} {N}"),
    "replay, one rank": ("accuracy.md", rf"^\| one rank, Kineto \| 246 \| {N}"),
    "replay, all ranks": ("accuracy.md", rf"^\| all ranks of a run, Kineto \| 102 \| {N}"),
    "other GPUs, inference": ("labels.md", rf"^\| inference \| 66 \| {N}"),
    "other GPUs, training": ("labels.md", rf"^\| train \| 21 \| {N}"),
    "collectives": ("ranks_accuracy.md", rf"^\| time \| 691 \| {N}"),
    "ranks": ("ranks_accuracy.md", rf"^\| step_time \| 75 \| {N}"),
    "ranks, llm_foundry": ("ranks_accuracy.md", rf"^\| llm_foundry \| 69 \| {N}"),
    "ranks, neusight": ("ranks_accuracy.md", rf"^\| neusight_train \| 6 \| {N}"),
    "ranks, worst": ("ranks_accuracy.md", rf"^\| step_time \| 75 \|(?:[^|]*\|){{4}} {N}"),
}
CLAIMS = [
    ("README.md", rf"1,323 published runs on 1 to 10,240 GPUs: median {N}", "jobs, median"),
    ("README.md", rf"median [\d.]+%, mean {N}; mixture", "jobs, mean"),
    ("README.md", rf"mixture-of-experts {N}", "jobs, experts"),
    ("README.md", rf"mixture-of-experts [\d.]+%; worst {N}", "jobs, worst"),
    ("README.md", rf"33 MLPerf DLRM-DCNv2 runs on 4 to 128 GPUs: {N}", "recommendation"),
    ("README.md", rf"DLRM-DCNv2 runs on 4 to 128 GPUs: [\d.]+%, {N} at worst", "recommendation, worst"),
    ("accuracy_overview.md", rf"33 published runs of recommendation models \| {N}", "recommendation"),
    ("sharding.md", rf"33 on GPUs with\nNVLink: {N} on average", "recommendation"),
    ("which_sharding.md", rf"33 MLPerf DLRM-DCNv2 runs on 4 to 128 GPUs are {N}", "recommendation"),
    ("README.md", rf"peak memory {N} from code", "steps, memory"),
    ("README.md", rf"from code \([\d.]+% at worst\), {N} from a config of", "jobs, memory"),
    ("README.md", rf"from code \({N} at worst\)", "steps, memory worst"),
    ("README.md", rf"median error {N} over 107 traces", "replay, one rank"),
    ("README.md", rf"{N} over 10 complete multi-rank runs", "replay, all ranks"),
    ("README.md", rf"GPU time {N} on average", "steps, GPU time"),
    ("README.md", rf"on average \({N} at worst\), GPU-bound", "steps, GPU time worst"),
    ("README.md", rf"collectives {N} on held-out", "collectives"),
    ("README.md", rf"75 public runs {N}", "ranks"),
    ("accuracy_overview.md", rf"GPU time of a step, from code[^%]* {N} on average", "steps, GPU time"),
    ("accuracy_overview.md", rf"peak memory of a step \| 25 steps \| {N}", "steps, memory"),
    ("accuracy_overview.md", rf"step time of jobs[^%]* {N} on average", "jobs, mean"),
    ("accuracy_overview.md", rf"{N} in the median, [\d.]+% at worst", "jobs, median"),
    ("accuracy_overview.md", rf"in the median, {N} at worst \| \[jobs", "jobs, worst"),
    ("accuracy_overview.md", rf"peak memory of jobs[^%]* {N} on average", "jobs, memory"),
    ("accuracy_overview.md", rf"75 published runs \| {N}", "ranks"),
    ("accuracy_overview.md", rf"691 sizes \| {N}", "collectives"),
    ("README.md", rf"\(docs/labels.md\): inference {N}", "other GPUs, inference"),
    ("README.md", rf"\(docs/labels.md\): inference [\d.]+%, training {N}", "other GPUs, training"),
    ("accuracy_overview.md", rf"66 of inference, 21 of training \| {N}", "other GPUs, inference"),
    ("accuracy_overview.md", rf"21 of training \| [\d.]+%, {N} on average", "other GPUs, training"),
    ("sure.md", rf"own error of the typical step \({N} in the median", "jobs, median"),
    ("whole_runs.md", rf"median error on 1,323 public runs is {N}", "jobs, median"),
    ("which_parallelism.md", rf"Step times: median error {N}", "jobs, median"),
    ("which_parallelism.md", rf"median error [\d.]+%, mean {N}", "jobs, mean"),
    ("which_parallelism.md", rf"Mixture-of-experts models: {N}", "jobs, experts"),
    ("will_it_fit.md", rf"peak allocated within {N} on 25 steps", "steps, memory worst"),
    ("will_it_fit.md", rf"{N} on average on 44 varied ones", "varied, memory"),
    ("will_it_fit.md", rf"44 varied ones, {N} at worst", "varied, memory worst"),
    ("limits.md", rf"Mixture-of-experts jobs\*\*: {N} error", "jobs, experts"),
    ("limits.md", rf"[\d.]+% error on average, {N} at worst \(\[runs", "jobs, worst"),
    ("limits.md", rf"with FSDP are {N} off", "ranks"),
    ("limits.md", rf"off on average, {N} at worst \(\[ranks", "ranks, worst"),
    ("ranks.md", rf"^\| all \| 75 \| \| {N}", "ranks"),
    ("ranks.md", rf"^\| all \| 75 \| (?:[^|]*\|){{4}} {N}", "ranks, worst"),
    ("ranks.md", rf"^\| llm_foundry \| 69 \|[^|]*\| {N}", "ranks, llm_foundry"),
    ("ranks.md", rf"^\| neusight_train \| 6 \|[^|]*\| {N}", "ranks, neusight"),
    ("my_gpu.md", rf"GPU time {N} off on average", "steps, GPU time"),
    ("my_gpu.md", rf"off on average, {N} at worst, on 25 steps", "steps, GPU time worst"),
    ("my_gpu.md", rf"{N} off on average, with the attention", "ranks"),
    ("my_gpu.md", rf"of their time, {N} at worst", "ranks, worst"),
    ("my_gpu.md", rf"{N} off on average over 1,323 runs", "jobs, mean"),
]
# Sentences about measured sets: figures in them stand on the page of that set.
SETS = {r"1,323|1323": "runs.md", r"\b25 steps": "accuracy.md", r"75 (?:public|published) runs": "ranks_accuracy.md"}
WATCHED = {"plain loop": "plain", "slow loader": "slow_loader", "host-bound": "host_bound", "Hugging Face": "trainer",
           "Lightning": "lightning"}  # fmt: skip


def page(name: str) -> str:
    return (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()


def figure(name: str, pattern: str) -> str:
    found = re.findall(pattern, page(name), re.M)
    assert len(found) == 1, f"{name}: {len(found)} places match {pattern}"
    return str(found[0])


def agrees(claim: str, value: str) -> bool:
    """Whether a claim is the value, rounded to the claim's digits."""
    digits = len(claim.partition(".")[2])
    return abs(float(claim) - float(value)) <= 0.5 * 10**-digits * 1.001


@pytest.mark.parametrize(("name", "pattern", "source"), CLAIMS, ids=[f"{n}: {s}" for n, _, s in CLAIMS])
def test_a_claim_is_the_figure_of_the_generated_page(name: str, pattern: str, source: str) -> None:
    claim, value = figure(name, pattern), figure(*SOURCES[source])
    assert agrees(claim, value), f"{name} claims {claim}%, {SOURCES[source][0]} has {value}%"


@pytest.mark.parametrize("name", ["README.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))])
def test_figures_about_a_measured_set_stand_on_its_page(name: str) -> None:
    for sentence in re.split(r"(?<=[.;:])\s|\n\n|\n- |\n\|", re.sub(r"```.*?```", "", page(name), flags=re.S)):
        for pattern, source in SETS.items():
            if re.search(pattern, sentence) and name != source:
                known = re.findall(r"([\d.]*\d)%", page(source))
                strange = [x for x in re.findall(N, sentence) if not any(agrees(x, v) for v in known)]
                assert not strange, f"{name}: {strange} in {sentence.strip()!r} are not on {source}"


@pytest.mark.parametrize("loop", WATCHED)
def test_the_table_of_watched_loops_is_what_was_recorded(loop: str) -> None:
    rows = [r for r in page("compare_run.md").splitlines() if r.startswith("| ") and loop in r.split("|")[1]]
    seen = json.loads((ROOT / "data" / "h200_watch" / f"{WATCHED[loop]}.json").read_text())
    measured, predicted = seen["step_ms"]["p50"], seen["predicted"]["step_ms"]["p50"]
    shown = [f"{measured:.2f} ms", f"{predicted:.2f} ms", f"{100 * (measured / predicted - 1):+.1f}%"]
    assert len(rows) == 1 and [c.strip() for c in rows[0].split("|")[2:5]] == shown


def test_other_digits_are_noticed() -> None:
    assert agrees("7.7", "7.7") and agrees("55", "54.8") and not agrees("7.6", "7.7") and not agrees("0.3", "0.034")
