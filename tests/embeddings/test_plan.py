"""Sharding plans: what they cost, how they are found, and how far from the best they can be."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.costs.lookups.table import HEAVY, draw_task
from presage.embeddings import Reuse, Table
from presage.embeddings.sharding_cost import ShardCosts, lower_bound, sharding_cost
from presage.embeddings.sharding_heuristics import HEURISTICS, heuristic_plan, table_costs
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, ShardingProblem, TablePlacement
from presage.embeddings.sharding_search import Budget, improve, search
from presage.embeddings.sharding_state import ShardingState, ShardMove
from presage.embeddings.table_files import plan_json, read_plan, read_tables, save_plan
from presage.errors import InputError, PresageError
from presage.hardware import platform

GIB = 1024.0**3
H200 = platform("dgx-h200")


def _tables(count: int, seed: int = 0) -> tuple[Table, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        Table(
            f"t{i}",
            int(10 ** rng.uniform(3, 6.5)),
            int(rng.choice([32, 64, 128])),
            float(rng.integers(1, 40)),
            Reuse(alpha=float(rng.uniform(0.4, 1.3))),
        )
        for i in range(count)
    )


def _problem(count: int = 24, ranks: int = 4, seed: int = 0, **more: float) -> ShardingProblem:
    return ShardingProblem(_tables(count, seed), 4096 * ranks, ranks, H200, **more)  # type: ignore[arg-type]


# ---- what a plan costs


@pytest.mark.parametrize(("ranks", "place"), [(8, "dgx-h100"), (16, "dgx-h100"), (4, "4xa100")])
def test_the_exchange_is_the_uneven_all_to_all_of_the_bytes_between_ranks(ranks: int, place: str) -> None:
    prices = ShardCosts(ShardingProblem(_tables(8), 1024 * ranks, ranks, platform(place)))
    held = np.random.default_rng(1).uniform(1e5, 1e8, ranks)
    matrix = np.repeat(held[:, None] / ranks, ranks, axis=1)
    expected = prices.collectives.all_to_all_v(matrix, prices.group)
    assert float(prices.exchange(held.max())) == pytest.approx(expected, rel=1e-6)


def test_ranks_may_be_renumbered() -> None:
    prices = ShardCosts(_problem())
    of = np.random.default_rng(2).integers(0, 4, 24)
    turned = np.array([2, 0, 3, 1])[of]
    a, b = (sharding_cost(ShardingPlan.table_wise(4, x.tolist()), prices) for x in (of, turned))
    assert a.seconds == pytest.approx(b.seconds, rel=1e-9)


def test_a_step_has_every_way_of_cutting_in_it() -> None:
    prices = ShardCosts(_problem(4))
    whole = [TablePlacement(TABLE, (r,)) for r in range(4)]
    plain = sharding_cost(ShardingPlan(4, tuple(whole)), prices)
    rows = sharding_cost(ShardingPlan(4, (TablePlacement(ROW), *whole[1:])), prices)
    held = sharding_cost(ShardingPlan(4, (TablePlacement(DATA), *whole[1:])), prices)
    assert plain.phases["replicas"] == rows.phases["replicas"] == 0 < held.phases["replicas"]
    assert rows.load.indices.min() > 0  # every rank gets its share of the lookups
    assert held.load.output[0] == 0  # what all ranks hold is not sent
    halves = sharding_cost(ShardingPlan(4, (TablePlacement(COLUMN, (0, 1)), *whole[1:])), prices)
    assert halves.load.output[1] > plain.load.output[1]
    assert halves.load.output.sum() == pytest.approx(plain.load.output.sum())


def test_the_model_of_embeddings_sets_lookups_and_updates() -> None:
    problem = _problem(6, ranks=2)
    prices = ShardCosts(problem)
    found = sharding_cost(ShardingPlan.table_wise(2, [0, 0, 0, 1, 1, 1]), prices)
    first = prices.model.forward(problem.tables[:3], problem.batch)
    second = prices.model.backward(problem.tables[3:], problem.batch)
    assert found.load.forward[0] == pytest.approx(first, rel=1e-9)
    assert found.load.backward[1] == pytest.approx(second, rel=1e-9)


# ---- the search


def test_the_search_finds_the_best_of_all_placements_of_a_small_problem() -> None:
    problem = _problem(6, ranks=3, seed=5)
    prices = ShardCosts(problem)
    every = (ShardingPlan.table_wise(3, of) for of in itertools.product(range(3), repeat=6) if of[0] == 0)
    best = min(sharding_cost(plan, prices).seconds for plan in every)
    assert search(problem, prices=prices, whole=True).cost.seconds <= best * (1 + 1e-9)


def test_sums_kept_while_parts_move_are_those_of_the_plan() -> None:
    prices = ShardCosts(_problem())
    here, rng = ShardingState(heuristic_plan("naive", prices) or ShardingPlan(4, ()), prices), np.random.default_rng(3)
    for _ in range(20):
        here.try_change(ShardMove(0.0, int(rng.integers(24)), rank=int(rng.integers(4))), np.inf)
    assert here.seconds() == pytest.approx(sharding_cost(here.to_plan(), prices).seconds, rel=1e-9)
    before, soft = here.to_plan(), here.soft()
    assert not here.try_change(ShardMove(0.0, 0, rank=int(here.rank[0] + 1) % 4), -1.0)
    assert (here.to_plan(), here.soft()) == (before, soft)


def test_a_table_held_otherwise_is_priced_as_the_whole_plan_would_be() -> None:
    prices = ShardCosts(_problem())
    here = ShardingState(heuristic_plan("naive", prices) or ShardingPlan(4, ()), prices)
    for placed in (
        TablePlacement(ROW),
        TablePlacement(DATA),
        TablePlacement(COLUMN, (1, 3)),
        TablePlacement(TABLE, (2,)),
    ):
        table = next(t for t in range(24) if prices.problem.tables[t].dim == 128)
        tables = [*here.plan.tables[:table], placed, *here.plan.tables[table + 1 :]]
        expected = sharding_cost(ShardingPlan(4, tuple(tables)), prices).seconds
        assert here.seconds_with(table, placed) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_local_search_never_makes_a_plan_worse() -> None:
    prices = ShardCosts(_problem(40, ranks=8))
    for name in HEURISTICS:
        plan = heuristic_plan(name, prices)
        assert plan is not None
        better = improve(plan, prices, Budget(100, lambda: False), np.random.default_rng(0))
        assert sharding_cost(better, prices).seconds <= sharding_cost(plan, prices).seconds


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = (search(_problem(), seed=7, kicks=5) for _ in range(2))
    assert first.complete
    assert first.plan == second.plan


@pytest.mark.slow
def test_what_is_found_beats_every_heuristic_and_not_the_bound() -> None:
    for k in range(3):
        found = search(_problem(40, ranks=8, seed=k), kicks=5)
        assert all(a.cost is None or a.cost.seconds >= found.cost.seconds for a in found.alternatives)
        assert found.bound <= found.cost.seconds


@pytest.mark.slow
def test_no_placement_is_below_the_bound() -> None:
    prices, rng = ShardCosts(_problem(30, ranks=4)), np.random.default_rng(0)
    for _ in range(200):
        plan = ShardingPlan.table_wise(4, rng.integers(0, rng.integers(1, 5), 30).tolist())
        assert lower_bound(plan, prices) <= sharding_cost(plan, prices).seconds


def test_a_table_that_would_hold_up_all_is_cut() -> None:
    heavy = Table("heavy", 2_000_000, 256, 150.0, Reuse(alpha=0.8))
    problem = ShardingProblem((heavy, *_tables(6)), 65536, 8, H200)
    found, whole = search(problem), search(problem, whole=True)
    assert found.plan.tables[0].sharding != TABLE
    assert found.cost.seconds < 0.8 * whole.cost.seconds


def test_a_table_too_large_for_a_rank_is_cut_and_the_plan_fits() -> None:
    large = Table("large", 20_000_000, 128, 2.0, Reuse(alpha=1.0))
    problem = ShardingProblem((large, *_tables(6)), 8192, 4, H200, 5 * GIB)
    found = search(problem)
    assert found.plan.tables[0].sharding in (COLUMN, ROW)
    assert found.cost.over == 0
    assert float(found.cost.load.memory.max()) <= 5 * GIB


def test_tables_that_fit_nowhere_are_told_by_how_much() -> None:
    problem = ShardingProblem(tuple(replace(t, rows=20_000_000) for t in _tables(8)), 8192, 2, H200, 2 * GIB)
    with pytest.raises(PresageError, match=r"8 tables need [\d.]+ GiB .* 2 ranks have 4 GiB.*--memory"):
        search(problem)


# ---- heuristics and random tasks


def test_heuristics_go_by_what_they_say() -> None:
    tables = (Table("a", 1000, 64, 2.0), Table("b", 10, 32, 50.0))
    assert table_costs("size_greedy", tables).tolist() == [64_000, 320]
    assert table_costs("lookup_greedy", tables).tolist() == [128, 1600]
    assert table_costs("size_lookup_greedy", tables).tolist() == [384, 1600]
    assert table_costs("dim_greedy", tables).tolist() == [64, 32]
    prices = ShardCosts(_problem(9, ranks=4))
    naive, chunk = heuristic_plan("naive", prices), heuristic_plan("naive_chunk", prices)
    assert naive is not None
    assert chunk is not None
    assert [p.ranks[0] for p in naive.tables] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [p.ranks[0] for p in chunk.tables] == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert heuristic_plan("size_greedy", ShardCosts(_problem(9, ranks=4, memory=0.01 * GIB))) is None


def test_random_tasks_are_drawn_as_the_research_draws_them() -> None:
    for k in range(20):
        tables = draw_task(4, 100 * GIB, np.random.default_rng(k), heavy=k % 2 == 0)
        assert 36 <= len(tables) < 67
        assert len({t.name for t in tables}) == len(tables)
        assert all(t.pooling >= HEAVY for t in tables) or k % 2
        assert {t.dim for t in tables} <= {32, 64, 128, 256}
        assert sum(t.weight_bytes for t in tables) <= 0.8 * 4 * 100 * GIB
    with pytest.raises(PresageError, match="no draw of tables fits"):
        draw_task(4, 1e3, np.random.default_rng(0))


# ---- files and the command


def _write(path: Path, tables: tuple[Table, ...], **more: object) -> Path:
    rows = [
        {"name": t.name, "rows": t.rows, "dim": t.dim, "pooling": t.pooling, "alpha": t.reuse.alpha} for t in tables
    ]
    path.write_text(json.dumps({"tables": rows, **more}))
    return path


def test_tables_and_plans_come_back_from_their_files(tmp_path: Path) -> None:
    path = _write(tmp_path / "tables.json", _tables(5), batch=4096)
    assert read_tables(path) == (_tables(5), 4096)
    plan = ShardingPlan(
        2,
        (
            TablePlacement(TABLE, (1,)),
            TablePlacement(ROW),
            TablePlacement(DATA),
            TablePlacement(COLUMN, (0, 1)),
            TablePlacement(TABLE, (0,)),
        ),
    )
    save_plan(plan, _tables(5), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", _tables(5)) == plan
    assert plan_json(plan, _tables(5))["tables"]["t3"] == {"sharding": "column_wise", "ranks": [0, 1]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "is not valid JSON"),
        ("{}", "no list of tables"),
        ('{"tables": [{"name": "a", "dim": 4, "pooling": 1}]}', r"tables\[0\].rows: is missing"),
        ('{"tables": [{"rows": 0, "dim": 4, "pooling": 1}]}', r"tables\[0\]: table 0: rows and dim"),
        ('{"tables": [{"name": "1", "rows": 5, "dim": 4, "pooling": 1}, {"rows": 5, "dim": 4, "pooling": 1}]}',
         "two tables are called '1'"),
        ('{"batch": "x", "tables": [{"rows": 5, "dim": 4, "pooling": 1}]}', "batch: is 'x'"),
    ],
)  # fmt: skip
def test_bad_tables_are_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_tables(path)


def test_the_command_prints_the_plan_and_writes_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "tables.json", _tables(12), batch=8192)
    plan = tmp_path / "plan.json"
    run = CliRunner().invoke(app, ["shard", str(path), "--ranks", "4", "--out", str(plan), "--json", "-"])
    assert run.exit_code == 0, run.output
    value = json.loads(run.stdout)
    assert len(value["load"]) == 4
    assert {a["name"] for a in value["alternatives"]} == set(HEURISTICS)
    assert all(a["worse"] >= 0 for a in value["alternatives"])
    assert value["bound_ms"] <= value["step_ms"] == pytest.approx(sum(value["phases_ms"].values()))
    assert len(read_plan(plan, _tables(12)).tables) == 12
    shown = CliRunner().invoke(app, ["shard", str(path), "--ranks", "4"])
    assert "/step for embeddings" in shown.output
    assert "size_lookup_greedy" in shown.output


def test_the_command_needs_a_batch(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["shard", str(_write(tmp_path / "t.json", _tables(3))), "--ranks", "2"])
    assert isinstance(run.exception, PresageError)
    assert "give --batch" in str(run.exception)


@pytest.mark.parametrize("ranks", [1, 2, 24])
def test_a_few_tiny_tables_find_a_place_on_any_number_of_ranks(ranks: int) -> None:
    tables = (Table("none", 1000, 64, 0.0), Table("few", 10, 4, 1.0), Table("one", 1, 8, 1.0))
    found = search(ShardingProblem(tables, 64, ranks, H200), kicks=3)
    assert len(found.plan.tables) == 3
    assert 0 < found.bound <= found.cost.seconds
