"""Mistakes that users make with noise, runs, placements and studies: one sentence, exit code 2, never a traceback."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from presage.cli.app import app
from presage.errors import PresageError
from presage_validation import fleet

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
JOB = str(JOBS / "hugging_face.toml")
EXPERTS = str(JOBS / "deepseek-v3.toml")
FILES = {
    "empty.csv": b"",
    "empty.toml": b"",
    "header.csv": b"gpu,time\n",
    "other.csv": b"a,b\n1,2\n",
    "two.csv": b"gpu,time\na,1\nb,2\n",
    "numberless.csv": b"gpu,time\na,nan\nb,-1\nc,x\n",
    "binary.csv": bytes(range(256)) * 8,
    "binary.toml": bytes(range(128, 256)),
    "cut.csv.gz": b"\x1f\x8b\x08garbage",
    "cut.json": b'{"a":',
    "series.json": b'{"series": 3}',
    "short.json": b'{"series": [1, {"ms": [1, 2]}, {"ms": "x"}]}',
    "flat.json": json.dumps({"series": [{"ms": [1.0] * 50, "start": 0, "end": 1}], "smi": [1, 2]}).encode(),
    "text.toml": b'[spread.products]\nrank = "much"\n',
    "nan.toml": b"[spread.products]\nrank = nan\n",
    "huge.toml": b"[spread.products]\nrank = 1e300\n",
    "below.toml": b"[common]\nsd = -0.1\n",
    "share.toml": b"[slow]\nshare = 3\n",
    "class.toml": b"[spread.gemm]\nrank = 0.1\n",
    "moves.toml": b"[network]\nfactors = [1, 2]\nmoves = [[1]]\n",
    "failures.toml": b"[failures]\nrate = 1\n",
    "words.txt": b"abc\n",
    "minus.txt": b"-5\n",
    "nan.txt": b"nan\n",
}
NOISES = ("empty", "binary", "text", "nan", "huge", "below", "share", "class", "moves", "missing")
TABLES = ("empty.csv", "header.csv", "other.csv", "two.csv", "numberless.csv", "binary.csv", "cut.csv.gz", "cut.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / "folder").mkdir()
    rng = np.random.default_rng(0)
    rows = [f"gpu{i},node{i // 8},{x:.5f}" for i, x in enumerate(np.exp(0.02 * rng.standard_normal(128)))]
    (path / "gpus.csv").write_text("\n".join(["gpu,node,time", *rows]) + "\n")
    series = {"name": "a", "ms": (1 + 0.01 * rng.standard_normal(200)).tolist()}
    (path / "good.json").write_text(json.dumps({"series": [series]}))
    (path / "noise.toml").write_text(
        "[spread.products]\nrank = { value = 0.02, low = 0.01, high = 0.03 }\nown = 0.01\n"
    )
    return path


def ran(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, command.split())


MISTAKES = [
    *(f"job {JOB} --draws 100 --noise {n}.toml" for n in NOISES),
    *(f"job {JOB} --draws 100 --lengths {f}" for f in ("words.txt", "minus.txt", "nan.txt", "empty.csv", "folder")),
    *(f"job {JOB} --draws 100 {o}" for o in ("--noise folder", "--lengths binary.csv", "--lengths missing")),
    *(f"job {JOB} {o}" for o in ("--draws -5", "--draws 99999999999", "--draws 100 --seed -1", "--json folder")),
    *(f"job {EXPERTS} --draws 100 --expert-skew {x}" for x in ("-1", "nan", "inf", "1e9")),
    f"job {JOBS / 'llama3.1-405b.toml'} --expert-skew 0.3",
    *(f"fit {f}" for f in (*TABLES, "folder", "missing", "text.toml", "empty.toml", JOB)),
    *(f"fit gpus.csv {o}" for o in ("--class gemm", "--communication gemm", "--column gpu", "--column gpu=card")),
    *(f"fit gpus.csv --gpu h100_sxm --gpus 8 {o}" for o in ("--step-seconds inf", "--conditions lab", "--out folder")),
    *(f"place {JOB} --speeds {f}" for f in (*TABLES, "folder", "missing")),
    *(f"place {JOB} --speeds random:{x}" for x in ("", "x", "-1", "nan", "0.1:0.1", "0.1:0.1:inf", "0.1:0.1:1e300")),
    *(f"place {JOB} --hot {x}" for x in ("nan", "-1", "x", "1.2@nowhere", "inf")),
    *(f"place {JOB} {o}" for o in ("--draws 99999999999", "--randoms 999999999999", "--spares 99999999999")),
    *(f"place {JOB} {o}" for o in ("--column x", "--noise huge.toml", "--evict -1")),
    f"run {JOB}",
    f"run {JOB} --steps 10 --tokens 1T",
    f"run {JOB} --tokens 1e30",
    *(f"run {JOB} --steps 100 --deadline {d}" for d in ("x", "-5d", "nan", "2020-01-01", "2027-13-45")),
    *(f"run {JOB} --steps 100 --failures {f}" for f in ("failures.toml", "empty.toml", "missing.toml", "x", "folder")),
    *(f"run {JOB} --steps 100 --rate {x}" for x in ("nan", "-1", "inf")),
    *(f"run {JOB} --steps 100 --interval {x}" for x in ("0", "x", "-5")),
    *(f"run {JOB} --steps 100 {o}" for o in ("--spares 99999999999999999999", "--draws 99999999999", "--background 3")),
    *(f"run {JOB} --steps 100 {o}" for o in ("--step-seconds inf", "--price nan", "--noise huge.toml", "--gpus 7")),
    *(f"sensitivity {JOB} {o}" for o in ("--noise huge.toml", "--draws 1", "--gpus 7", "--set x", "--noise folder")),
    "sensitivity missing.toml",
    *(f"study scale {JOB} --gpus {x}" for x in ("x", "0", "-8", "nan", "1e300", "128.5", ",")),
    *(f"study compute {JOB} --times {x}" for x in ("0", "nan", "inf")),
    *(f"study domain {JOB} --domains {x}" for x in ("1", "0", "2.5")),
    *(f"study power {JOB} --no-placing {o}" for o in ("--caps 0", "--caps 2", "--caps 1e-300", "--spread inf")),
    f"study scale {JOB} --noise missing",
    f"study nothing {JOB}",
    *(f"plan {JOB} --gpus 128 --keep tp=2,pp=4,cp=1 --objective {o}" for o in ("p99", "p95 --noise huge.toml")),
    *(f"accuracy {k} {f}" for k in ("stragglers", "fleet", "temporal") for f in (*TABLES, "folder", "missing")),
    *(f"accuracy steps {f}" for f in ("empty.csv", "other.csv", "binary.csv", "cut.csv.gz", "cut.json", "missing")),
    *(f"accuracy temporal {f}.json" for f in ("series", "short", "flat")),
    "accuracy temporal good.json good.json",
    "accuracy nothing gpus.csv",
]


@pytest.mark.parametrize("command", MISTAKES, ids=[m.replace(str(JOBS) + "/", "") for m in MISTAKES])
def test_a_mistake_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    found = ran(command, folder, monkeypatch)
    assert found.stdout == ""
    if isinstance(found.exception, SystemExit):  # an option's own check
        assert found.exit_code == 2 and "Error" in found.stderr
        return
    assert isinstance(found.exception, PresageError), found.exception
    said = str(found.exception)
    assert found.exception.exit_code == 2 and said and "\n" not in said


def strictly(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "command",
    [
        f"job {JOB} --draws 200",
        f"job {EXPERTS} --draws 200 --expert-skew 0.3 --noise noise.toml",
        f"place {JOB} --speeds gpus.csv --draws 100 --randoms 2 --hot 1.3 --evict 0 --noise noise.toml",
        f"run {JOB} --steps 1000 --draws 20 --deadline 60d",
        f"sensitivity {JOB} --draws 100 --noise noise.toml",
        f"study scale {JOB} --gpus 128 --draws 100 --noise noise.toml",
        f"study compute {JOB} --times 1,2 --draws 100 --noise noise.toml",
        f"study domain {JOB} --draws 100 --noise noise.toml",
        f"study power {JOB} --caps 1 --no-placing --draws 100 --noise noise.toml",
        f"plan {JOB} --gpus 128 --keep tp=2,pp=4,cp=1,ep=8,micro_batch=1 --limit 20 --objective p95 --noise noise.toml",
        "fit gpus.csv noise.toml --gpu h100_sxm --gpus 128",
        "accuracy fleet gpus.csv",
        "accuracy temporal good.json",
    ],
    ids=lambda c: c.split(" --")[0].replace(str(JOBS) + "/", ""),
)
def test_json_is_all_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(fleet, "score_fleets", partial(fleet.score_fleets, sets=10))
    found = ran(f"{command} --json -", folder, monkeypatch)
    assert found.exit_code == 0, found.exception
    assert json.loads(found.stdout, parse_constant=strictly)
