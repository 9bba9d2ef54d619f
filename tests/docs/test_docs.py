"""Every command and every piece of Python shown in the docs is run, and its output compared."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from shown import PAGES, Command, Snippet, commands, inline, lines, place, played, run, snippets  # noqa: E402

from presage.report.answer import Answer  # noqa: E402
from presage.report.terminal import print_answer  # noqa: E402
from stand_ins import put  # noqa: E402

# Shown, but not run here: the reason stands beside each. Options of presage's commands are checked all the same.
INSTALLS, SETS_UP = "installs packages from outside", "does what this suite is run by, in minutes"
SERVES = "goes on until it is stopped: tests/ui starts it and looks at its pages"
GPU, OTHER = "needs a GPU", "names files of the reader's: only its options are checked"
WRITTEN = "hours or minutes; writes files that are committed and tested for themselves"
ET = "takes minutes; test_accuracy_et.py scores one step"
SPREAD = "minutes, or another machine: test_scale.py does smaller ones in every place"
NOT_RUN = {
    "make demo": SETS_UP,
    "make test": SETS_UP,
    "presage predict train.py:build --gpu h100 --fail-if 'not fits or p95 > 40ms'": "the reader's own step",
    "presage job job.toml --fail-if 'mfu < 45% or memory_left_bytes < 4GiB'": "the reader's own job",
    "pip install .": INSTALLS,
    "pip install '.[torch,report,ui]'": INSTALLS,
    "presage --install-completion": "changes files of the reader's shell",
    "presage --show-completion": "depends on the shell that asks: test_terminal.py does it",
    "make fuzz": "does for twenty minutes what tests/fuzz does in seconds",
    "python tools/fuzz.py --minutes 60 --reader 'Kineto trace'": "an hour; tests/fuzz does it in seconds",
    "python tools/fuzz.py --limits": "minutes and gigabytes; tests/fuzz does a part",
    "presage ui": SERVES,
    "presage ui examples/jobs/llama3.1-405b.toml --port 0": SERVES,
    "presage calibrate --out PACK": GPU,
    "python -m presage_fit.calibrate --out PACK": GPU,
    "presage calibrate --out h200/ --minutes 8": GPU,
    "presage measure train.py:build --arg batch=8": GPU,
    "presage calibrate --host my_host.toml": "measures this machine: test_host_file.py does it",
    "presage predict train.py:build --host my_host.toml": OTHER,
    "presage predict train.py:build --host host.toml": OTHER,
    "presage predict train.py:build --ranks 8 --strategy fsdp --pack out/learned": OTHER,
    "presage whatif train.py --pack out/learned --suggest": OTHER,
    "presage accuracy workloads workloads/field.py data/h200_field/measured.json --host data/h200_field/host.toml": (
        "needs torchvision, torch_geometric and torchaudio; minutes"
    ),
    "presage predict YOUR_FILE.py:FUNCTION": OTHER,
    "presage predict train.py -- --batch_size 12": OTHER,
    "presage predict -m package.train -- --config small.yaml": OTHER,
    "presage job YOUR_JOB.toml": OTHER,
    "presage trace YOUR_TRACE.json.gz": OTHER,
    "presage predict train.py:build --gpu PACK": OTHER,
    "presage pack h200/": OTHER,
    "presage fit --collectives all_reduce.log --platform dgx-h100 --out mine.toml": OTHER,
    "presage job job.toml --platform mine.toml": OTHER,
    "presage predict train.py --pack out/learned": OTHER,
    "presage pack h200/ h200_again/ --merge-into h200_both/": OTHER,
    "presage graph train.py:build --arg batch=8": OTHER,
    "presage indices day_0_sparse_multi_hot.npz --batch 65536 --json tables.json": OTHER,
    "presage trace run_a.json.gz run_b.json.gz --overheads host.toml": OTHER,
    "presage place JOB.toml --speeds gpus.csv [--hot 1.3] [--out placement.csv]": OTHER,
    "presage plan JOB.toml --gpus N": OTHER,
    "presage run JOB.toml --tokens 15T --deadline 60d": OTHER,
    "presage fit faults.csv --nodes 400 --out failures.toml": "test_faults.py does it",
    "presage run job.toml --steps 500000 --failures failures.toml --policy compare": OTHER,
    "presage replay rank_*.json.gz --scale 'kernel=gemm:0.5' --remove 'call=cudaMalloc|cudaFree' "
    "--drop-rank-delay 2": OTHER,
    "presage accuracy ranks workloads/public.py ../shared/runs/public_runs.csv": "test_accuracy_ranks.py does it",
    "presage accuracy et ../shared/h200/workloads.py ../shared/h200/et ../shared/h200/measured.json": ET,
    "presage accuracy et workloads/library.py data/h200_traces data/h200_traces/measured.json": ET,
    "presage accuracy stragglers trace-AR.csv.gz trace-ST.csv.gz": "test_accuracy_stragglers.py does it",
    "presage accuracy stragglers FOLDER --json - --out rows.csv": "test_accuracy_stragglers.py does it",
    "python examples/gloo.py --ranks 2 --slow-rank 1 --delay-ms 200 --out out/late": "test_gloo.py does it",
    "python examples/gloo.py --ranks 2 --out out/even": "test_gloo.py does it",
    "presage plan examples/jobs/llama3.1-405b.toml --gpus 16384 --ray auto": SPREAD,
    "presage job examples/jobs/llama3.1-405b.toml --draws 1000000 --ray HOST:6379": SPREAD,
    "presage run examples/jobs/llama3.1-405b.toml --tokens 15T --draws 100000 --workers 2": SPREAD,
    "presage accuracy runs ../shared/runs/public_runs.csv --workers 2": SPREAD,
    "python docs/make_headline.py": WRITTEN,
    "python docs/make_scaling.py": WRITTEN,
    "python docs/make_studies.py": WRITTEN,
    "python tools/fit_host.py workloads/varied.py data/h200_varied src/presage/data/h200/host.toml": WRITTEN,
}
# Run by `make test-slow`: 5 to 20 s each; tests/cli, tests/prediction and tests/report try the same on small jobs.
SLOW = {
    "presage job examples/jobs/llama3.1-405b.toml --draws 10000",
    "presage sensitivity examples/jobs/llama3.1-405b.toml",
    "presage sensitivity examples/jobs/llama3.1-405b.toml --draws 2000 -v",
    "presage study scale examples/jobs/llama3.1-405b.toml",
    "presage study compute examples/jobs/deepseek-v3.toml",
    "presage study domain examples/jobs/deepseek-v3.toml",
    "presage study power examples/jobs/llama3.1-405b.toml --draws 4000",
    "presage place examples/jobs/llama3.1-405b.toml --speeds random:0.02:0.002:1.15 --hot 1.3 -v",
    "presage run examples/jobs/llama3.1-405b.toml --tokens 15T --deadline 60d --price 2.5",
    "presage run examples/jobs/llama3.1-405b.toml --tokens 15T --deadline 60d --price 2.5 -v",
    "presage run examples/jobs/llama3.1-405b.toml --steps 50000 --failures stepfun --policy compare --draws 300 "
    "--no-model-error",
    "presage sensitivity fsdp.toml --draws 2000 -v",
    "presage sensitivity fsdp.toml --noise collectives.toml --draws 2000 -v",
    "presage study noise examples/jobs/own_model.toml --draws 4000",
    "presage study slow-node examples/jobs/llama3.1-405b.toml --draws 2000",
    "presage study hot-rack examples/jobs/llama3.1-405b.toml --rack 64 --uplink 2 --draws 2000",
    "presage shard demo --ranks 4 -v",
    "presage shard demo --ranks 4",
    "presage whatif examples/gpt.py:build --arg batch=1 --arg layers=4 --suggest",
}
# What a page's Python takes for granted.
JOB = 'import presage as ps\njob = ps.read_transformer_job("job.toml")'
BEFORE = {
    "README.md": "my_own_edit = lambda graph: graph",
    "collectives.md": "import numpy as np\nsent = np.ones((16, 16)) * 1e6",
    "memory_jobs.md": JOB,
    "sensitivity.md": JOB + '\nnoise = ps.read_noise("noise.toml").noise',
    "whatif.md": "mine = lambda graph: graph",
}
ALL = [command for page in PAGES for command in commands(page)]
RUN: dict[tuple[str, Any], list[Command]] = {}  # the same command of several pages is run once
for command in ALL:
    if command.text not in NOT_RUN:
        RUN.setdefault((command.text, command.files), []).append(command)
TWINS = {text for text, _ in RUN} & {text.removesuffix(" -v") for text, _ in RUN if text.endswith(" -v")}
WITH_PYTHON = [page for page in PAGES if snippets(page)]


class Printed:
    """What commands print, and the folder they were run in; those that differ by -v alone are run once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.done: dict[Any, tuple[str, str, Path]] = {}

    def of(self, command: Command) -> tuple[str, Path]:
        text = command.text.removesuffix(" -v")
        text = text if text in TWINS else command.text
        key = text, tuple(f for f in command.files if f[0] in text)
        if key not in self.done:
            folder = place(self.factory.mktemp("shown") / "root", command.files)
            self.done[key] = (*(brief_and_verbose if text in TWINS else alike)(text, folder), folder)
        brief, verbose, folder = self.done[key]
        return (brief if text == command.text else verbose), folder


def alike(text: str, folder: Path) -> tuple[str, str]:
    return (printed := run(text, folder)), printed


def brief_and_verbose(text: str, folder: Path) -> tuple[str, str]:
    """What a command prints without and with -v, by printing its one answer both ways."""
    mark = "<<answer>>"

    def twice(answer: Answer, out: Console, main: Console, verbose: bool) -> None:
        assert not verbose
        for way in (False, True):
            sys.stdout.write(mark)
            print_answer(answer, out, main, way)
        sys.stdout.write(mark)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("presage.report.terminal.print_answer", twice)
        before, brief, verbose, after = run(text, folder).split(mark)
    return before + brief + after, before + verbose + after


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    return Printed(tmp_path_factory)


def timed(text: str, value: Any) -> Any:
    """A parameter of a test, which is slow where its command is."""
    return pytest.param(value, id=text, marks=pytest.mark.slow if text in SLOW else ())


@pytest.mark.parametrize("shown", [timed(text, shown) for (text, _), shown in RUN.items()])
def test_the_output_shown_is_the_output(shown: list[Command], printed: Printed) -> None:
    assert shown[0].line.startswith("presage "), f"{shown[0].page}: run it here, or say in NOT_RUN why not"
    found, folder = printed.of(shown[0])
    for written in re.findall(r"--(?:report|out|trace|json) ([\w./]+)", shown[0].text):
        assert (folder / written).stat().st_size
    for command in shown:
        assert command.output is not None, (
            f"{command.page}: show what `{command.line}` prints, or say in NOT_RUN why not"
        )
        assert command.shown(found) == lines(command.output), (
            f"{command.page} is out of date: run `python docs/refresh.py {command.page}`"
        )


@pytest.mark.parametrize("source", WITH_PYTHON, ids=lambda p: p.name)
def test_python_shown_runs(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before, shown = BEFORE.get(source.name, ""), snippets(source)
    if all(snippet.output is None for snippet in shown):
        request.getfixturevalue("few_draws")
    folder = put(place(tmp_path / "root"), source.read_text() + before)
    printed = played([Snippet(source.name, before, None), *shown], folder, {})[1:]
    for snippet, text in zip(shown, printed, strict=True):
        if snippet.output is not None:
            assert lines(text) == lines(snippet.output), f"out of date: run `python docs/refresh.py {source.name}`"


@pytest.mark.parametrize("source", PAGES, ids=lambda p: p.name)
def test_files_shown_can_be_read(source: Path) -> None:
    for language, body in re.findall(r"^```(toml|json)[^\n]*\n(.*?)^```$", source.read_text(), re.M | re.S):
        tomllib.loads(body) if language == "toml" else json.loads(body)


def test_the_job_shown_is_the_example() -> None:
    body = re.search(r"^```toml\n(.*?)^```$", (ROOT / "docs" / "jobs.md").read_text(), re.M | re.S)
    example = (ROOT / "examples" / "jobs" / "llama3.1-405b.toml").read_text()
    assert body is not None and tomllib.loads(body[1]) == tomllib.loads(example)


def test_no_command_is_listed_that_no_page_shows() -> None:
    assert set(NOT_RUN) | SLOW <= {command.text for command in ALL}


@pytest.mark.parametrize(
    "text", sorted({c.text for c in ALL if c.text in SLOW | set(NOT_RUN) and c.text.startswith("presage ")})
)
def test_what_is_not_run_has_options_that_there_are(text: str) -> None:
    assert not strange(text)


@pytest.mark.parametrize("source", PAGES, ids=lambda p: p.name)
def test_commands_in_sentences_have_options_that_there_are(source: Path) -> None:
    assert [text for text in inline(source) if strange(text)] == []


@cache
def group() -> Any:
    from presage.cli.app import app

    return typer.main.get_command(app)


def strange(text: str) -> list[str]:
    """What presage would not know of a command: its name, or options."""
    words = shlex.split(re.sub(r"[\[\]]", " ", text.replace("...", " ").partition(" | ")[0]))[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is the script's own
    at, options = group(), options_of(group())
    while words and (words[0] in getattr(at, "commands", ()) or words[0] in options):
        word = words.pop(0)
        if word in getattr(at, "commands", ()):
            at = at.get_command(typer.Context(at), word)  # those of other packages are loaded here
        options |= options_of(at)
    if at is group():
        return [w for w in words if w not in options | {"COMMAND"}][:1]
    if at.context_settings.get("ignore_unknown_options"):
        return []
    return [w for w in words if w.startswith("--") and w.partition("=")[0] not in options]


def options_of(command: Any) -> set[str]:
    return {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {
        "-h",
        "--help",
        "--debug",
    }


def test_a_strange_option_is_found() -> None:
    assert strange("presage plan JOB.toml --nonsense 3") == ["--nonsense"]
    assert strange("presage plot x") == ["plot"]
    assert strange("presage --quiet plan JOB.toml --loud") == ["--loud"]
    assert not strange("presage study scale JOB.toml --draws 4000")
    assert strange("presage predict train.py --loud -- --batch_size 12") == ["--loud"]
