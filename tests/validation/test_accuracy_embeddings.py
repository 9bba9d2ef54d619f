"""The claims on embeddings and placements: bars met, nothing scored was fitted, few groups, bad rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import runner
from presage.errors import InputError, PresageError
from presage_validation import command as command
from presage_validation import embeddings
from presage_validation.embeddings import read_groups, score_embeddings, split
from presage_validation.sharding import score_sharding

run = runner(command.command)


@pytest.fixture(scope="module")
def groups_file(shared: Path) -> Path:
    return shared / "h200/tbe_groups.json"


@pytest.fixture(scope="module")
def scored(groups_file: Path):  # type: ignore[no-untyped-def]
    return score_embeddings(groups_file)


@pytest.fixture(scope="module")
def sharded(shared: Path):  # type: ignore[no-untyped-def]
    return score_sharding(shared / "h200/tbe_sharding.json")


def value_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_groups_left_out_are_within_the_bars(scored) -> None:  # type: ignore[no-untyped-def]
    found = scored.metrics()
    assert not scored.skipped and found["forward"].n == found["backward"].n == 176
    assert found["forward"].geomean < 0.04 and found["forward"].p90 < 0.135  # the bars are 5% and 15%
    assert found["backward"].geomean < 0.03 and found["backward"].p90 < 0.105
    assert found["forward"].mape < found["forward_law"].mape and found["backward"].mape < found["backward_law"].mape


@pytest.mark.slow
def test_knowing_the_data_is_what_helps(scored) -> None:  # type: ignore[no-untyped-def]
    found = scored.metrics()
    for phase in ("forward", "backward"):
        assert found[f"{phase}_no_reuse"].mape > found[f"{phase}_uniform"].mape > 2.5 * found[phase].mape
        assert found[f"{phase}_skew"].mape < 1.1 * found[phase].mape  # alpha tells as much as the histogram
        assert found[f"{phase}_repeated"].mape < found[f"{phase}_shipped"].mape < found[phase].mape
        assert found[f"{phase}_cold"].geomean < 0.04


@pytest.mark.slow
def test_notes_say_what_was_fitted(scored) -> None:  # type: ignore[no-untyped-def]
    assert "fitted on 175 of 351 groups" in scored.notes[0] and "seed 0" in scored.notes[0]
    assert "351 of the 351" in scored.notes[1] and scored.to_json()["n"] == 176


@pytest.mark.slow
def test_what_is_scored_is_not_fitted(groups_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored groups may say anything of their times: their predictions stay."""
    monkeypatch.setattr(embeddings, "ENOUGH", 40)
    monkeypatch.setattr(embeddings, "ABLATIONS", {"uniform": embeddings.ABLATIONS["uniform"]})
    value = value_of(groups_file)
    value["groups"] = value["groups"][::6]
    (tmp_path / "sound.json").write_text(json.dumps(value))
    names = {g.name for g in split(read_groups(tmp_path / "sound.json").groups)[1]}
    for g in value["groups"]:
        if f"group {g['id']}" in names:
            g |= dict.fromkeys(("fwd_ms", "bwd_ms", "fwd_cold_ms", "bwd_cold_ms", "check_ms"), 77.0)
    (tmp_path / "wild.json").write_text(json.dumps(value))
    sound, wild = (score_embeddings(tmp_path / f"{name}.json") for name in ("sound", "wild"))
    for metric in ("forward", "backward", "forward_uniform"):
        before, after = ([r.predicted for r in s.rows if r.metric == metric] for s in (sound, wild))
        assert before == after and len(before) == len(names) > 20
    measured = ([r.measured for r in s.rows if r.metric == "forward"] for s in (sound, wild))
    assert next(measured) != next(measured)


def test_few_groups_are_scored_as_shipped(groups_file: Path, tmp_path: Path) -> None:
    value = value_of(groups_file)
    for g in value["groups"]:
        g["seed"] += 1
        for key in ("check_ms", "fwd_cold_ms", "bwd_cold_ms", "kernels"):
            g.pop(key, None)
    few = {"groups": value["groups"][100:130]}
    few["groups"][0]["tables"][0]["L"] += 0.5
    for t in few["groups"][1]["tables"]:
        del t["hist"], t["distinct"], t["top"], t["lookups"]
    (tmp_path / "few.json").write_text(json.dumps(few))
    result = score_embeddings(tmp_path / "few.json")
    found = result.metrics()
    assert found["forward"].n == 30 and found["forward"].geomean < 0.05 and "forward_cold" not in found
    assert "as shipped" in result.notes[0] and "28 of the 30" in result.notes[1]


def test_groups_that_cannot_be_used_are_told(groups_file: Path, tmp_path: Path) -> None:
    value = value_of(groups_file)
    some = value["groups"][40:47]
    some[0]["opt"], some[1]["dtype"], some[2]["fwd_ms"], some[3]["tables"] = "adam", "int8", -1.0, []
    del some[4]["B"]
    some[5]["tables"] = [{"E": 10, "D": 16, "L": 2}]
    (tmp_path / "t.json").write_text(json.dumps({"groups": [*some, 7]}))
    result = score_embeddings(tmp_path / "t.json")
    assert result.metrics()["forward"].n == 1 and len(result.skipped) == 7
    for said, s in zip(
        ("'adam'", "'int8'", "not a time", "no tables", "no B", "neither"), result.skipped, strict=False
    ):
        assert said in s.reason


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text("words")
    (tmp_path / "other.json").write_text('{"rows": []}')
    for score in (score_embeddings, score_sharding):
        for name, said in (("words", "is not valid JSON"), ("other", "should be a list"), ("none", "cannot be read")):
            with pytest.raises(InputError, match=said):
                score(tmp_path / f"{name}.json")
    with pytest.raises(PresageError, match="takes one path"):
        run("sharding", tmp_path / "a.json", tmp_path / "b.json")


def test_picks_are_among_the_best(sharded) -> None:  # type: ignore[no-untyped-def]
    found = sharded.picks()
    ours = found["presage"]
    assert not sharded.skipped and ours.tasks == 12
    assert ours.within_5pct >= 0.9 and ours.within_10pct == 1.0 and ours.mean_regret < 0.02  # the bars: 90%, 2%
    assert ours.kendall_tau is not None and ours.kendall_tau > 0.87
    for name, other in found.items():
        if name not in ("presage", "law"):
            assert other.mean_regret > 2 * ours.mean_regret and other.within_5pct < ours.within_5pct, name
            assert other.kendall_tau is None or other.kendall_tau < ours.kendall_tau - 0.1
    assert len(sharded.ranks) == 2 * 1115


def test_placements_that_cannot_be_used_are_told(shared: Path, tmp_path: Path) -> None:
    value = value_of(shared / "h200/tbe_sharding.json")
    value["tasks"] = value["tasks"][:4]
    value["tasks"][0]["placements"][0]["assign"][0] = 99
    value["tasks"][1]["placements"] = value["tasks"][1]["placements"][:1]
    value["tasks"][2]["placements"][1]["fwd_ms"] = [1.0]
    (tmp_path / "t.json").write_text(json.dumps(value))
    result = score_sharding(tmp_path / "t.json")
    assert result.to_json()["n"] == 1 and len(result.skipped) == 3
    for said, s in zip(("assign is not", "fewer than two", "not one time a rank"), result.skipped, strict=True):
        assert said in s.reason


def test_the_commands(shared: Path, groups_file: Path, tmp_path: Path) -> None:
    value = value_of(groups_file)
    (tmp_path / "few.json").write_text(json.dumps(value | {"groups": value["groups"][:20]}))
    found = json.loads(run("embeddings", tmp_path / "few.json", "--json", "-", "--out", tmp_path / "rows.csv"))
    assert found["kind"] == "embeddings" and set(found["metrics"]) >= {"forward", "backward", "forward_uniform"}
    assert (tmp_path / "rows.csv").read_text().startswith("metric,group,name,predicted,measured,error\n")
    assert "as shipped" in run("embeddings", tmp_path / "few.json")
    path, value = tmp_path / "tasks.json", value_of(shared / "h200/tbe_sharding.json")
    path.write_text(json.dumps(value | {"tasks": value["tasks"][:2]}))
    found = json.loads(run("sharding", path, "--json", "-", "--out", tmp_path / "ranks.csv"))
    keys = {"tasks", "top1", "within_5pct", "within_10pct", "mean_regret", "kendall_tau"}
    assert set(found["metrics"]) == keys and set(found["baselines"]["torchrec"]) == keys
    assert (tmp_path / "ranks.csv").read_text().startswith("task,placement,rank,phase,predicted,measured,error\n")
    assert "always lpt_cache" in run("sharding", path)
