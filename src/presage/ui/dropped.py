"""Files that people open on the page: jobs and models become plans, traces are explained as `presage trace` does.

What is in a file is data: it is read within limits from a private copy that is gone afterwards, and nothing in it is
run, and no file that it names is opened.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from presage.configs.hugging_face import read_config
from presage.configs.megatron import read_arguments
from presage.configs.schema import merge_sections
from presage.configs.torchtitan import read_titan
from presage.errors import InputError
from presage.files.reading import ByteReader, open_bytes, read_json, read_text
from presage.hardware.facts import load_toml
from presage.search.job_toml import job_toml
from presage.text import size
from presage.ui.knobs import KEPT, KNOBS, InvalidPlan
from presage.ui.plans import Plan, job_of_table, parse_text, plan_of, plan_of_text, text_of

if TYPE_CHECKING:
    from presage.report.answer import Answer

MOST_FILES = 64 << 20  # bytes of all files that are opened at once, as they are sent
MOST_INSIDE = 256 << 20  # bytes of a trace, unpacked: some seconds of reading
MOST_SETTINGS = 256 << 10  # bytes of a job, a model's config, a script
PIECE = 8 << 20
ROWS = 10  # of each table of a trace
TITAN = {"parallelism", "experimental", "activation_checkpoint", "lr_scheduler", "job", "metrics"}  # its own sections
CONFIG = {"model_type", "architectures", "text_config"}
READING = threading.Lock()  # one trace at a time: reading keeps a core busy
File = tuple[str, bytes]


def open_files(files: Sequence[File], text: str) -> dict[str, Any]:
    """What the page shows for files: values of controls for a job or a model, a card for traces of one run.

    `text` is the plan that a model, or arguments without a cluster, are put into.
    """
    if not files or sum(len(data) for _, data in files) > MOST_FILES:
        raise InvalidPlan(f"the page opens files of up to {size(MOST_FILES)}: use presage trace or presage job")
    with TemporaryDirectory() as folder:
        paths = [_kept(Path(folder), i, name, data) for i, (name, data) in enumerate(files)]
        try:
            return _opened(paths, text)
        except (InputError, InvalidPlan) as e:
            raise InvalidPlan(_without_folders(str(e), paths)) from e


def _kept(folder: Path, number: int, name: str, data: bytes) -> Path:
    """A private copy, each in a folder of its own."""
    own = folder / str(number)
    own.mkdir()
    path = own / (re.sub(r"[^\w.+-]+", "_", Path(name.replace("\\", "/")).name)[-80:].lstrip(".") or "file")
    path.write_bytes(data)
    return path


def _without_folders(sentence: str, paths: Sequence[Path]) -> str:
    for path in paths:
        sentence = sentence.replace(f"{path.parent}/", "")
    return sentence


def _opened(paths: Sequence[Path], text: str) -> dict[str, Any]:
    kinds = {file_kind(path) for path in paths}
    if kinds == {"trace"}:
        return _card(paths, _trace_answer)
    if len(paths) > 1:
        raise InvalidPlan("several files are opened only if all are traces of one run: open this one alone")
    path, (kind,) = paths[0], kinds
    if kind == "graph":
        return _card(paths, _graph_answer)
    if kind == "config":
        return _plan(path, *_config_plan(path, text))
    if kind in ("arguments", "titan"):
        return _plan(path, *_script_plan(path, text, read_titan if kind == "titan" else read_arguments))
    return _plan(path, plan_of_text(read_text(path, MOST_SETTINGS)), ())


def file_kind(path: Path) -> str:
    """trace, graph (an execution trace), config (Hugging Face), arguments (Megatron), titan (TorchTitan) or job."""
    from presage.traces import trace_set

    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".py", ".ipynb")):
        raise InvalidPlan(f"{path.name} is code, which the page does not run: use presage predict {path.name}:FUNCTION")
    if name.endswith(".toml"):
        return "titan" if TITAN & set(load_toml(path)) else "job"
    with open_bytes(path) as stream:
        first = stream.read(4096).lstrip()[:1]
    if first not in (b"{", b"[") and not name.endswith(".et"):
        return "arguments"
    found = trace_set.kind(path)
    said = _settings(path)
    if isinstance(said, list) and all(isinstance(x, str | int | float) for x in said):
        return "arguments"
    if isinstance(said, dict) and "traceEvents" not in said and not isinstance(said.get("nodes"), list):
        return "config" if CONFIG & set(said) else "graph" if found == "chakra" else "arguments"
    if found == "unknown":
        raise InvalidPlan(f"{path.name} is no trace of PyTorch's profiler, no execution trace and no model's config")
    return "trace" if found == "kineto" else "graph"


def _settings(path: Path) -> Any:
    """The contents of a small JSON file; None of any other."""
    try:
        return read_json(path, MOST_SETTINGS)
    except InputError:
        return None


# ---- plans


def _plan(path: Path, plan: Plan, notes: Sequence[str]) -> dict[str, Any]:
    from presage.ui.question import question_of

    told = ". ".join([f"{path.name} is opened", *notes])
    return {"knobs_set": [plan.knobs[k.name] for k in KNOBS], "rest": dict(plan.rest), "asked": question_of(plan.run),
            "told": told[:600]}  # fmt: skip


def _config_plan(path: Path, text: str) -> tuple[Plan, Sequence[str]]:
    """The plan that is shown, with this model."""
    words, notes = read_config(path)
    now = plan_of_text(text)
    plan = plan_of({**now.knobs, "model": KEPT}, {**now.rest, "model": words, "name": words.get("name") or path.name})
    text_of(plan)
    return plan, notes


def _script_plan(path: Path, text: str, read: Any) -> tuple[Plan, Sequence[str]]:
    """A framework's own settings, on the cluster of the plan that is shown."""
    sections, notes = read(path)
    if not sections.get("model"):
        raise InvalidPlan(f"{path.name} names no model: give its arguments (--num-layers, --hidden-size, ...)")
    now = parse_text(text)
    usual = {"training": {"sequence": now["training"]["sequence"]}, "cluster": now.get("cluster", {})}
    usual["parallel"] = {} if "dp" in sections.get("parallel", {}) else {"gpus": now["parallel"]["gpus"]}
    job = job_of_table(merge_sections(usual, {**sections, "name": path.name.split(".")[0]}))
    return plan_of_text(job_toml(job, usual["cluster"])), notes


# ---- traces


def _card(paths: Sequence[Path], answer_of: Any) -> dict[str, Any]:
    """The answer of `presage trace` as elements of the page, its first chart, and its report as a file."""
    from presage.report.html import render_page
    from presage.ui.answers import plain_chart
    from presage.ui.shown import answer_card

    if not READING.acquire(blocking=False):
        raise InvalidPlan("another trace is being read: try again in a moment")
    try:
        _check_size(paths)
        answer: Answer = answer_of(paths)
        name = paths[0].name if len(paths) == 1 else f"{len(paths)} traces"
        chart = next((s.figure for s in answer.sections if s.chart is not None), None)
        report = None if chart is None else render_page(answer).decode()
        head, tables = answer_card(answer)
        return {"card": head, "tables": tables, "title": name, "figure": chart and plain_chart(chart), "report": report,
                "told": ""}  # fmt: skip
    finally:
        READING.release()


def _check_size(paths: Sequence[Path]) -> None:
    for path in paths:
        with ByteReader(path) as stream:
            while stream.read(PIECE):
                if stream.taken > MOST_INSIDE:
                    most = f"{path.name} holds more than {size(MOST_INSIDE)}, the most that the page reads"
                    raise InvalidPlan(f"{most}: use presage trace {path.name}")


def _trace_answer(paths: Sequence[Path]) -> Answer:
    from presage.report.trace_answer import trace_answer
    from presage.traces.findings import TraceFindings
    from presage.traces.replay import replay_of
    from presage.traces.trace_set import read_run

    replay = replay_of(read_run(paths, partial=True, need_gpu=False))
    return trace_answer(TraceFindings([replay], 0, ROWS), page=True)


def _graph_answer(paths: Sequence[Path]) -> Answer:
    from presage.report.graph_answer import execution_graph_answer
    from presage.traces.trace_set import read_graph

    found = execution_graph_answer(read_graph(paths[0]), Path(paths[0].name), ROWS)
    return replace(found, subject="An execution trace has no times: record a Kineto trace for those.")
