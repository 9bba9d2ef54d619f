"""--fail-if at the end of a command, --verbose, and files to be written that are checked before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from presage.cli.app import app
from presage.cli.options import current_output
from presage.errors import PresageError

pytestmark = pytest.mark.usefixtures("few_draws")

JOB = str(Path(__file__).resolve().parents[2] / "examples" / "jobs" / "hugging_face.toml")


def ran(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_a_condition_that_holds_is_exit_3_after_the_answer() -> None:
    found = ran("job", JOB, "--fail-if", "mfu > 1%")
    assert found.exit_code == 3 and "/step" in found.stdout
    assert found.stderr == "presage: --fail-if: mfu > 1%\n"


def test_a_condition_that_does_not_hold_changes_nothing() -> None:
    assert ran("job", JOB, "--fail-if", "mfu > 99%").stdout == ran("job", JOB).stdout
    assert current_output().fail_if is None


def test_a_condition_with_json_on_stdout_and_quiet() -> None:
    found = ran("job", JOB, "--fail-if", "fits", "--json", "-", "-q")
    assert found.exit_code == 3 and json.loads(found.stdout)["kind"] == "job"


def test_commands_of_other_packages_have_conditions(tmp_path: Path) -> None:
    table = tmp_path / "gpus.csv"
    table.write_text("gpu,time\n" + "".join(f"g{i},{1 + i % 7 / 100}\n" for i in range(64)))
    assert ran("fit", str(table), "--fail-if", "1 < 2").exit_code == 3


def test_a_bad_condition_is_noticed_before_the_work() -> None:
    with pytest.raises(PresageError, match="cannot be read"):
        raise ran("job", "no_such_file.toml", "--fail-if", "mfu >").exception or AssertionError
    with pytest.raises(PresageError, match="no mfuu in this answer's JSON: did you mean mfu"):
        raise ran("job", JOB, "--fail-if", "mfuu > 1").exception or AssertionError


@pytest.mark.parametrize(
    "option", ["job X --report", "job X --json", "job X --trace", "plan X --gpus 8 --out", "trace X --overheads"]
)
def test_a_missing_folder_is_noticed_before_the_work(option: str) -> None:
    found = ran(*option.split(), "no/such/folder/x")
    assert isinstance(found.exception, PresageError)
    assert "no/such/folder/x: cannot be written: no/such/folder: there is no such folder" in str(found.exception)


def test_verbose_prints_every_table() -> None:
    brief, long = ran("job", JOB).stdout, ran("job", JOB, "-v").stdout
    assert "Memory per GPU" in long and "Memory per GPU" not in brief
    assert "-v prints" in brief and "-v prints" not in long
    assert ran("-v", "job", JOB).stdout == long
