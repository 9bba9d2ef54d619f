"""Conventions of the command line: quiet, JSON alone, progress, completion, exit codes, errors, narrow screens."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from presage.cli import complete
from presage.cli.app import app
from presage.cli.faults import run_guarded
from presage.cli.options import current_output, output_options
from presage.cli.output import bar
from presage.errors import InputError, PresageError, near
from terminals import PRESAGE, on_a_terminal, plain, worked

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "examples" / "jobs" / "hugging_face.toml")


def said(*args: str) -> str:
    found = CliRunner().invoke(app, list(args))
    assert found.exit_code == 0, (found.exception, found.output)
    return found.stdout


# ---- --quiet and --json

ANSWERS = {  # command: lines of its answer
    "trace demo": 3,
    "replay demo --scale kernel=.*:0.5": 2,
    "replay --list": 5,
    "whatif --list": len(complete.EDITS),
    "gpus": len(complete.gpus("")),
    "gpus h200": 1,
    "platforms": len(complete.platforms("")),
    "platforms dgx-h100": 1,
    f"job {JOB}": 4,
    f"run {JOB} --steps 1000 --draws 20": 3,
    f"study compute {JOB} --times 1 --draws 100": 2,
    "shard demo --ranks 2 --seconds 0.1": 2,
}


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("command", ANSWERS, ids=lambda c: c.replace(JOB, "JOB"))
def test_quiet_is_the_answer_alone(command: str) -> None:
    found = said(*command.split(), "--quiet")
    assert len(found.splitlines()) == ANSWERS[command], found
    assert not current_output().quiet  # it ends with the command


def test_quiet_may_stand_before_the_command() -> None:
    assert said("--quiet", "gpus", "h200") == said("gpus", "h200", "-q") == "h200: NVIDIA H200 SXM 141 GB\n"


def test_quiet_leaves_what_was_asked_for(tmp_path: Path) -> None:
    said("gpus", "h200", "-q", "--json", str(tmp_path / "gpu.json"))
    assert json.loads((tmp_path / "gpu.json").read_text())["gpus"][0]["key"] == "h200"


@pytest.mark.parametrize("command", ["gpus", "platforms", "replay --list", "whatif --list", "trace demo", "examples"])
def test_json_is_all_there_is(command: str) -> None:
    assert json.loads(said(*command.split(), "--json", "-"))


def test_json_has_no_infinities_that_are_no_json() -> None:
    found = said("job", JOB, "--json", "-")
    assert "NaN" not in found and "Infinity" not in found


# ---- progress

COUNTING = """
import time
from presage.cli.options import output_options
from presage.cli.output import progress
with output_options({0}, {1}):
    print(sum(x + (time.sleep(0.03) or 0) for x in progress(range(1, 9), 'counting')))
"""


def drawn(quiet: bool = False, piped: bool = False) -> str:
    return plain(on_a_terminal([sys.executable, "-c", COUNTING.format(quiet, piped)])[1])


def test_a_bar_on_a_terminal() -> None:
    found = drawn()
    assert "counting" in found and "8/8" in found and "0:00" in found and "36" in found


@pytest.mark.parametrize("how", [{"quiet": True}, {"piped": True}])
def test_no_bar_for_who_wants_none(how: dict[str, bool]) -> None:
    assert drawn(**how).strip() == "36"


def test_the_time_left() -> None:
    from rich.progress import Progress

    from presage.report.terminal import _TimeColumn

    now = [0.0]
    shown = Progress(get_time=lambda: now[0])
    task = shown.add_task("work", total=100)
    for _ in range(10):
        now[0] += 1.0
        shown.advance(task, 1)
    assert _TimeColumn().render(shown.tasks[0]).plain == "0:10, 1:30 left"
    shown.update(task, completed=100)
    assert _TimeColumn().render(shown.tasks[0]).plain == "0:10"


def test_a_search_shows_its_bar_on_a_terminal_alone() -> None:
    command = [PRESAGE, "plan", JOB, "--gpus", "128", "--limit", "5"]
    command += ["--keep", "tp=2,cp=1,pp=4,ep=8,micro_batch=1"]
    code, found = on_a_terminal(command, 120)
    assert code == 0 and "plans/s" in found and "surveying" in found and "5." in found
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stderr == "" and "plans/s" not in piped.stdout


def test_nothing_is_drawn_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("work", 3) as tell:
        tell(1, 3, "a case", "a note")
    assert capsys.readouterr() == ("", "")


def test_a_pool_is_watched() -> None:
    from contextlib import nullcontext

    from presage.cli.output import _CountingPool, pool_progress
    from presage.pool import SERIAL

    with pool_progress("drawing", nullcontext(SERIAL)) as pool:
        assert list(pool.map(lambda x: x + 1, [1, 2])) == [2, 3]
    told: list[tuple[float, float | None]] = []
    seen = _CountingPool(SERIAL, lambda *how: told.append((how[0], how[1])))
    assert [*seen.map(str, [1, 2]), *seen.map(str, [3])] == ["1", "2", "3"]
    assert told == [(1, 2), (2, 2), (3, 3)]


def test_cases_are_told_with_their_place() -> None:
    from presage_validation.score import in_turn

    told: list[Any] = []
    assert list(in_turn(iter("ab"), told.append, str.upper)) == ["a", "b"]
    assert told == ["A", "B"] and [(t.done, t.total) for t in told] == [(0, 2), (1, 2)]


# ---- completion

SHELLS: dict[str, Callable[[str], dict[str, str]]] = {
    "bash": lambda line: {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
    "zsh": lambda line: {"_TYPER_COMPLETE_ARGS": line},
    "fish": lambda line: {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


def completed(shell: str, line: str) -> str:
    settings = os.environ | {"_PRESAGE_COMPLETE": f"complete_{shell}"} | SHELLS[shell](line)
    return subprocess.run([PRESAGE], env=settings, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_values(shell: str) -> None:
    found = completed(shell, "presage predict x --gpu h1")
    assert "h100_sxm" in found and "h200" not in found


def test_commands_are_completed() -> None:
    assert completed("bash", "presage sens").split() == ["sensitivity"]


@pytest.mark.parametrize(("shell", "word"), [("zsh", "compdef"), ("fish", "complete --command presage")])
def test_the_script_for_each_shell(shell: str, word: str) -> None:
    settings = os.environ | {"_PRESAGE_COMPLETE": f"source_{shell}"}
    found = subprocess.run([PRESAGE], env=settings, capture_output=True, text=True, check=True).stdout
    assert word in found and f"_PRESAGE_COMPLETE=complete_{shell}" in found


def test_bash_completes_by_its_script(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    home = os.environ | {"HOME": str(tmp_path), "PATH": f"{Path(PRESAGE).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", "presage --install-completion; true"], env=home, check=True, capture_output=True)
    script = next((tmp_path / ".bash_completions").glob("*"), None)
    assert script is not None and "presage" in (tmp_path / ".bashrc").read_text()
    line = "COMP_WORDS=(presage predict x --gpu b2); COMP_CWORD=4; _presage_completion presage; echo ${COMPREPLY[@]}"
    found = subprocess.run(["bash", "-c", f"source {script}; {line}"], env=home, capture_output=True, text=True)
    assert found.stdout == "b200\n"


def test_completion_is_quick() -> None:
    """A shell asks at every key: five times the work of loading typer at most, and nothing heavy is loaded."""
    code = (
        "import sys; sys.argv = ['presage']\nfrom presage.cli.app import main\ntry:\n    main()\nexcept SystemExit:\n"
    )
    code += "    print([m for m in ('numpy', 'numba', 'scipy', 'msgspec', 'torch') if m in sys.modules])"
    settings = os.environ | {"_PRESAGE_COMPLETE": "complete_bash"} | SHELLS["bash"]("presage whatif x --apply fu")
    found, took = worked([sys.executable, "-c", code], settings)
    assert found.splitlines() == ["fused_adam", "fused_chains", "fused_attention", "[]"]
    assert took < 5 * worked([sys.executable, "-c", "import typer.main"], settings)[1]


def test_words_that_are_completed_are_those_that_are_known() -> None:
    from presage.costs.lookups.lookup_model import OPTIMIZERS
    from presage.hardware import gpus, platforms
    from presage.noise.priors import CONDITIONS
    from presage.parallel.strategy import STRATEGIES
    from presage.prediction.jobs.job_flops import CONVENTIONS
    from presage.runs.sets import names
    from presage.search import OBJECTIVES
    from presage.whatif import OTHERS
    from presage.whatif.edits import EDITS
    from presage.whatif.replay_names import EDITS as OF_TRACES

    assert {*EDITS, *OTHERS} == {*complete.EDITS} and {*OF_TRACES} == {*complete.TRACE_EDITS}
    assert tuple(STRATEGIES) == complete.STRATEGIES and tuple(OBJECTIVES) == complete.OBJECTIVES
    assert tuple(CONDITIONS) == complete.CONDITIONS and tuple(CONVENTIONS) == complete.CONVENTIONS
    assert tuple(OPTIMIZERS) == complete.OPTIMIZERS and complete.failures("") == names()
    assert complete.gpus("") == sorted(g.key for g in gpus())
    assert complete.platforms("") == sorted(p.key for p in platforms())


def test_values_in_a_list_are_completed() -> None:
    assert complete.edits("bf16,gpu=b2") == ["bf16,gpu=b200"]
    assert complete.edits("bf16,fp") == ["bf16,fp8"]
    assert complete.one_of(("mean", "cost"))("c") == ["cost"]


# ---- exit codes

FAILURES = [
    (PresageError("say more"), 2, "presage: say more\n"),
    (InputError("a.toml", "is empty"), 2, "presage: a.toml: is empty\n"),
    (KeyboardInterrupt(), 130, "presage: interrupted\n"),
    (MemoryError(), 1, "presage: out of memory: try fewer"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "presage: the output could not be written: No space left"),
    (PermissionError(errno.EACCES, "Permission denied", "x.csv"), 2, "presage: x.csv: Permission denied\n"),
    (KeyError("lost\nkey"), 1, "presage: internal error, please report it with the output of --debug (KeyError"),
    (RecursionError("maximum recursion depth exceeded"), 1, "presage: internal error, please report it"),
]


@pytest.mark.parametrize(("error", "code", "text"), FAILURES, ids=lambda x: type(x).__name__)
def test_what_goes_wrong_is_one_line_and_a_code(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_guarded(fail, debug=False) == code
    found = capsys.readouterr()
    assert found.err.startswith(text) and found.err.count("\n") == 1 and found.out == ""
    assert run_guarded(fail, debug=True) == code
    assert "Traceback" in capsys.readouterr().err


def test_codes_of_commands() -> None:
    """As a shell sees them: a mistake, an answer, no room for it, no reader, nothing that fits."""
    assert CliRunner().invoke(app, ["plan", JOB, "--gpus", "1"]).exit_code == 1
    for args, code in (([], 0), (["gpus", "x.toml"], 2), (["job"], 2)):
        assert subprocess.run([PRESAGE, *args], capture_output=True, check=False).returncode == code, args
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            found = subprocess.run([PRESAGE, "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (found.returncode, found.stderr.count("\n")) == (1, 1) and "No space left" in found.stderr
    ours, theirs = os.pipe()
    os.close(ours)
    found = subprocess.run([PRESAGE, "gpus"], stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (found.returncode, found.stderr) == (1, "")


def test_an_interrupt_is_one_line() -> None:
    """Ctrl-C reaches all processes of a command, workers too."""
    command = [PRESAGE, "plan", str(ROOT / "examples/jobs/llama3.1-405b.toml"), "--gpus", "131072", "--workers", "2"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(1.5)
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "presage: interrupted\n")


def test_debug_shows_where() -> None:
    found = subprocess.run([PRESAGE, "gpus", "x.toml", "--debug"], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "Traceback" in found.stderr and "presage: x.toml" in found.stderr.splitlines()[-1]


# ---- mistakes on the command line

MISUSES = {
    "predcit x": "unknown command predcit: did you mean predict?",
    "train.py:build": "did you mean presage predict train.py:build?",
    "zzz": "unknown command zzz: choose from predict, whatif,",
    "help": "did you mean presage --help?",
    "my_job.toml": "did you mean presage job my_job.toml?",
    "rank0.json.gz": "did you mean presage trace rank0.json.gz?",
    "job x.toml --tokns 3": "presage job: unknown option --tokns: did you mean --tokens?",
    "job x.toml --strategy ddp": "unknown option --strategy; predict has it",
    "job": "missing argument JOB.toml|MODEL, as in: presage job examples/jobs/",
    "plan": "missing argument JOB.toml|MODEL, as in: presage plan",
    "plan x.toml --gpus": "requires an argument",
    "job x.toml --draws many": "presage job: --draws: it should be a valid integer",
    "job x.toml --draws -1": "--draws: it should be greater than or equal to 0",
    "job x.toml --scale 3": "unknown option --scale; replay has it",
    "gpus h200 h100": "unexpected extra argument",
    "study scal x": "did you mean scale?",
    "job llama3-8bb": "no such file, and no model of that name: did you mean llama3-8b",
    "job llama3-8b": "llama3-8b is a model: give the number of GPUs, e.g. llama3-8b --gpus 64 --gpu h100",
    "job llama3-8b --gpus 8 --gpu h100 --on p4d": "--platform p4d has NVIDIA A100",
    "predict x.py:f --gpu RTX-3070": "the path of a .toml file (docs/my_gpu.md)",
    "gpus h20o": "no gpu 'h20o': did you mean h20, h200 or gh200? `presage gpus` lists all",
    "platforms dgx-h10": "did you mean dgx-h100",
    "predict x.py:f --gpu h20o": "no gpu 'h20o'",
    "predict x.py:f --ranks 8 --strategy fdsp": "did you mean fsdp?",
    "predict x.py:f --ranks 8 --option bucket=3": "has no option 'bucket': choose from bucket_cap_mb",
    "whatif x.py:f --apply fused_adm": "did you mean fused_adam",
    "whatif x.py:f --suggest --gpus b20": "no gpu 'b20': did you mean b200",
    "job train.py": "is code, not a job file: use presage predict train.py, or presage job --from train.py",
    f"dlrm {JOB}": "is not a recommendation job: use presage job",
    f"job {JOB} --draws 10 --noise productoin": "did you mean production?",
    f"run {JOB} --steps 10 --failures llama": "did you mean llama3?",
    f"plan {JOB} --gpus 8 --objective costs": "did you mean cost?",
    "accuracy wrkloads x y": "did you mean workloads?",
    "replay": "give the traces: presage replay rank_*.json.gz, or presage replay demo",
}


@pytest.mark.parametrize("command", MISUSES, ids=lambda c: c.replace(JOB, "JOB"))
def test_a_mistake_is_met_with_the_next_step(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_guarded(lambda: app(command.split(), prog_name="presage", standalone_mode=False), debug=False)
    found = capsys.readouterr()
    assert code == 2 and found.out == ""
    assert MISUSES[command] in found.err and found.err.count("\n") == 1, found.err


def test_arguments_are_checked_before_the_step_is_built() -> None:
    from presage.usercode import check_arguments

    def build(device: str, width: int, batch: int = 8) -> None: ...

    check_arguments(build, ["width"])
    check_arguments(dict, ["anything"])
    with pytest.raises(
        PresageError, match="--arg bach: build has no such argument; it has width, batch: did you mean b"
    ):
        check_arguments(build, ["bach"])
    with pytest.raises(PresageError, match="build needs width: give --arg width=VALUE"):
        check_arguments(build, [])


def test_names_near_a_name() -> None:
    assert near("h20", ["h100", "h200", "b200"]) == ": did you mean h200?"
    assert near("dgx", ["dgx-a", "dgx-b", "p5"]) == ": did you mean dgx-a or dgx-b?"
    assert near("zzz", ["h100"]) == near("", ["h100"]) == ""


@pytest.mark.parametrize(
    ("gone", "args", "line"),
    [
        ("torch", ["predict", "examples/gpt.py:build"], "pip install 'presage[torch]'"),
        ("ray", ["plan", JOB, "--gpus", "128", "--ray", "auto"], "pip install 'presage[ray]'"),
        ("plotly", ["job", JOB, "--report", "x.html"], "pip install 'presage[report]'"),
        ("matplotlib", ["sensitivity", JOB, "--draws", "100", "--plot", "x.svg"], "pip install 'presage[plot]'"),
    ],
)
def test_a_missing_extra_is_named(gone: str, args: list[str], line: str) -> None:
    code = f"import sys; sys.modules['{gone}'] = None; sys.argv = ['presage', *{args}]\n"
    code += "from presage.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 2 and line in found.stderr and found.stderr.count("\n") == 1


# ---- screens


def test_figures_are_never_cut_on_a_narrow_screen() -> None:
    """Every figure of a wide screen is on a narrow one, in parts of the table where it must be."""
    wide, narrow = said("gpus"), plain(on_a_terminal([PRESAGE, "gpus"], 80)[1])
    row = next(line for line in wide.splitlines() if line.startswith("h200 ")).split()
    lines = [line.split()[1:] for line in narrow.splitlines() if line.startswith("h200 ")]
    assert len(lines) > 1 and max(map(len, narrow.splitlines())) <= 80
    assert [x for line in lines for x in line if line][: len(row) - 1] == row[1:]


def test_parts_of_a_table_name_their_rows() -> None:
    from rich.console import Console

    from presage.report.terminal import plain_table

    table = plain_table("Title", "op", "size", "a long header", "time", "from")
    for op, size in (("copy", "1"), ("copy", "2"), ("send", "1")):
        table.add_row(op, size, "1234567890", "12345678901234", "here")
    out = Console(width=30, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    out.print(table)
    lines = out.export_text().splitlines()
    assert max(map(len, lines)) <= 30 and lines[0].startswith("Title")
    assert sum(line.split()[:2] == ["copy", "2"] for line in lines) > 1
    assert "1234567890" in "".join(lines) and "12345678901234" in "".join(lines)


def test_no_colours_where_none_are_wanted() -> None:
    assert "\x1b[" in on_a_terminal([PRESAGE, "gpus", "h200"])[1]
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        found = on_a_terminal([PRESAGE, "gpus", "h200"], **variables)[1]
        assert "\x1b[3" not in found and "\x1b[9" not in found and "\x1b[38" not in found


def test_output_options_end_with_their_block() -> None:
    with output_options(quiet=True):
        assert current_output().quiet
        with output_options(quiet=False, json_on_stdout=True):
            assert current_output().quiet and current_output().json_on_stdout
    assert not current_output().quiet and not current_output().json_on_stdout
