"""Absurd numbers: whatever a file or an option says, a finite answer or one sentence; never a traceback, never nan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typer.testing import CliRunner

from presage.configs.check import problems
from presage.configs.frameworks import framework
from presage.configs.job_file import read_transformer_job
from presage.configs.schema import JobConfig, parse_overrides
from presage.embeddings.dlrm_job import read_job
from presage.embeddings.table_files import tables_of
from presage.errors import PresageError
from presage.files.finite import check_finite, finite
from presage.hardware.gpu import read_gpu
from presage.hardware.platform import read_platform
from presage.noise.files import read_noise
from presage.prediction.jobs.job_prediction import predict_job

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "jobs" / "deepseek-v3.toml"  # experts and latent attention: the most keys
NUMBERS = ("0", "-1", "3", "1000000000000", "1" + "0" * 40, "nan", "inf", "1e308", "1e-320")
LONGEST = 1200  # letters of a sentence: the longest lists the models there are
NOT_FINITE = re.compile(r"(?<![\w.])-?(nan|inf)(?!\w)", re.IGNORECASE)


def keys(kind: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    """Every key of a job file that is, or may be, a number."""
    for field in msgspec.structs.fields(kind):
        inside = [
            t for t in (field.type, *get_args(field.type)) if isinstance(t, type) and issubclass(t, msgspec.Struct)
        ]
        if inside:
            yield from keys(inside[0], f"{before}{field.name}.")
        if {int, float} & {field.type, *get_args(field.type)}:
            yield before + field.name


def not_finite(value: Any, at: str = "") -> list[str]:
    """Where numbers are none."""
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in not_finite(v, f"{at}.{k}")]
    if isinstance(value, list | tuple):
        return [x for i, v in enumerate(value) for x in not_finite(v, f"{at}[{i}]")]
    return [at] if isinstance(value, float) and not math.isfinite(value) else []


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_every_key_of_a_job_with_every_absurd_number() -> None:
    told, answered = 0, 0
    drawn: set[str] = set()  # for a key's first number that is answered, draws being what takes the time
    for key in keys(JobConfig):
        for number in NUMBERS:
            said = parse_overrides([f"{key}={number}"], {})
            try:
                found = replace(predict_job(JOB, said), drawn=key not in drawn).to_json(1e9)
            except PresageError as e:
                told += 1
                assert "\n" not in str(e) and len(str(e)) < LONGEST, (key, number, str(e))
                continue
            answered += 1
            drawn.add(key)
            assert not not_finite(found), (key, number, not_finite(found))
            assert found["step_ms"]["mean"] > 0
    assert told > 250 and answered > 20, "numbers are refused, but not all of them"


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": {"gpus": 10**9}},
        {"parallel": {"tp": 10**9}},
        {"parallel": {"pp": 10**6, "layers_as": []}},
        {"model": {"layers": 10**9}, "parallel": {"layers_as": []}},
        {"model": {"hidden": 10**18}},
        {"training": {"microbatches": 10**12, "global_batch": None}},
        {"training": {"sequence": 0}},
        {"model": {"experts": {"experts": 10**9}}},
    ],
)
def test_jobs_nobody_has_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PresageError, match=r"<=|>=|no multiple"):
        read_transformer_job(JOB, change)


def test_problems_never_raise_on_a_job_that_cannot_be() -> None:
    job = read_transformer_job(JOB, {"model": {"heads": 10**15}, "parallel": {"tp": 10**15}}, checked=False)
    assert any("heads <= 100,000" in p for p in problems(job))


# ---- files of facts


def numbers_in(text: str) -> list[re.Match[str]]:
    return list(re.finditer(r"(?m)^(\w+) = (-?[\d.]+(?:e-?\d+)?)(?=\s*(?:#.*)?$)", text))


GPU = ROOT / "src/presage/hardware/gpus/h200.toml"
PLATFORM = ROOT / "src/presage/hardware/platforms/dgx-h200.toml"
SOFTWARE = ROOT / "src/presage/configs/frameworks/megatron-core.toml"
READERS = {GPU: read_gpu, PLATFORM: read_platform, SOFTWARE: lambda path: framework(str(path))}


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.stem)
def test_every_figure_of_a_fact_file_with_every_absurd_number(path: Path, tmp_path: Path) -> None:
    text, copy = path.read_text(), tmp_path / path.name
    found = numbers_in(text)
    assert found, "the file has figures"
    for match in found:
        for number in ("-1", "1000000000000000", "1" + "0" * 400, "nan", "inf", "1e308", "1e-320"):
            copy.write_text(text[: match.start(2)] + number + text[match.end(2) :])
            with pytest.raises(PresageError) as e:
                READERS[path](copy)
            assert str(copy) in str(e.value) and "\n" not in str(e.value)


NOISE = """
load = {lognormal = {median = 1.0, log_sd = 0.02}}
[spread.products]
rank = 0.02
step = 0.01
own = 0.01
[slow]
share = 0.01
factor = {lognormal = {median = 1.2, log_sd = 0.1}}
[common]
sd = 0.01
correlation = 0.6
"""


def test_every_number_of_a_noise_file_with_every_absurd_number(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    path.write_text(NOISE)
    read_noise(path)
    for match in re.finditer(r"= (\d[\d.]*)", NOISE):
        for number in ("nan", "inf", "-inf", "1e308", "-1e308", "1" + "0" * 400):
            path.write_text(NOISE[: match.start(1)] + number + NOISE[match.end(1) :])
            with pytest.raises(PresageError) as e:
                read_noise(path)
            assert "\n" not in str(e.value)


def test_every_number_of_a_recommendation_job_with_every_absurd_number(tmp_path: Path) -> None:
    folder = ROOT / "examples/dlrm"
    text = (folder / "mlperf_dcnv2.toml").read_text().replace("mlperf_tables", f"{folder}/mlperf_tables")
    path = tmp_path / "job.toml"
    path.write_text(text)
    read_job(path)
    for match in re.finditer(r"(?<=[=,] )\d+|(?<=\[)\d+", text):
        for number in ("-1", "1000000000000000", "1" + "0" * 40, "nan", "inf", "1e308", "0.5"):
            path.write_text(text[: match.start()] + number + text[match.end() :])
            with pytest.raises(PresageError) as e:
                read_job(path)
            assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)


@pytest.mark.parametrize("key", ["rows", "dim", "pooling"])
@pytest.mark.parametrize("number", [-1, 10**29, math.nan, math.inf, 1e308])
def test_tables_nobody_has_are_refused(key: str, number: float, tmp_path: Path) -> None:
    row = {"name": "a", "rows": 100, "dim": 8, "pooling": 1.0} | {key: number}
    with pytest.raises(PresageError):
        tables_of([row], tmp_path)


# ---- options


CALLS = {
    "job": ("--price", "--power", "--pue", "--tokens", "--gpus", "--draws", "--expert-skew"),
    "run": ("--storage-GBps", "--interval", "--rate", "--deadline", "--steps", "--draws", "--price", "--spares"),
    "plan": ("--gpus", "--keep", "--micro-batch", "--limit"),
    "shard": ("--ranks", "--batch", "--memory"),
    "place": ("--evict", "--spares"),
    "replay": ("--scale", "--drop-rank-delay"),
    "predict": ("--draws", "--steps"),
}
# Of the replay, words that a rule needs around its number.
WRAPPED = {"--scale": "kernel=.*:{}", "--keep": "tp={}", "--deadline": "{}d"}
OWN = str(ROOT / "examples/jobs/own_model.toml")
BASES = {
    "shard": ["demo", "--ranks", "4"], "replay": ["demo"], "predict": [str(ROOT / "examples/gpt.py:build")],
    "plan": [OWN, "--gpus", "64"], "run": [OWN, "--tokens", "1B"],
}  # fmt: skip


@pytest.mark.parametrize("command", CALLS)
def test_options_that_are_no_numbers(command: str) -> None:
    """Refused with a sentence that names the option or what it gave."""
    from presage.cli.app import app

    for option in CALLS[command]:
        for number in ("nan", "-inf", "1e999", "-1"):
            text = WRAPPED.get(option, "{}").format(number)
            found = CliRunner().invoke(app, [command, *BASES.get(command, [OWN]), option, text])
            said = str(found.exception) if isinstance(found.exception, PresageError) else found.output
            assert found.exit_code != 0, (option, text, found.output)
            assert isinstance(found.exception, PresageError | SystemExit), (option, text, found.exception)
            assert "Traceback" not in said and (option in said or number in said), (option, text, said)


def test_a_billion_of_anything_is_a_sentence(tmp_path: Path) -> None:
    from presage.cli.app import app

    out = str(tmp_path / "t.json")
    long = ["--set", "training.global_batch=896000000", "--trace", out]
    for call in (
        ["shard", "demo", "--ranks", "1000000000"],
        ["job", OWN, "--gpus", "1000000000"],
        ["predict", "x.py:build", "--steps", "1000000000"],
        ["job", str(JOB), *long],  # 224 million tasks
    ):
        found = CliRunner().invoke(app, call)
        assert found.exit_code != 0 and isinstance(found.exception, PresageError | SystemExit), call
    assert not Path(out).exists()


def test_no_table_says_nan() -> None:
    from presage.cli.app import app

    for change in (
        "model.vocab=1",
        "model.layers=1",
        "training.sequence=1",
        "model.hidden=64",
        "training.microbatches=1",
    ):
        found = CliRunner().invoke(app, ["job", OWN, "--set", change, "--tokens", "1", "--price", "1e-300"])
        assert not NOT_FINITE.search(found.output), found.output


def test_finite_names_what_is_not() -> None:
    assert finite(1e-320, "--x") == 1e-320
    for bad in (math.nan, math.inf, -1e300, 10**400):
        with pytest.raises(PresageError, match=r"^--x is "):
            finite(bad, "--x")
    with pytest.raises(PresageError, match=r"^f: a.b\[1\]: is inf"):
        check_finite("f", {"a": {"b": [1, math.inf]}})
