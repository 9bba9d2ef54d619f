"""Traces that teach others: the split, and two steps of an H200 begun from an H100; what is carried over to GPUs."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call, Shape
from presage.costs.kernel_files import load
from presage_validation.kernel_tables import read_table
from presage_validation.learn import DRAWS, choices, law_alone, score_learning

CASES = ("dlrm_default_b2048", "dlrm_default_b512_l32")


def test_the_split() -> None:
    assert choices(4, 1) == [(0,), (1,), (2,), (3,)]
    assert choices(3, 3) == [], "nothing would be left to predict"
    drawn = choices(25, 6)
    assert len(drawn) == DRAWS and drawn == choices(25, 6)
    assert all(len(set(c)) == 6 for c in drawn) and set(chain(*drawn)) == set(range(25))


def test_a_step_from_another(shared: Path, tmp_path: Path) -> None:
    for case in CASES:
        shutil.copy(shared / "h200" / "traces" / f"{case}.json.gz", tmp_path)
    shutil.copy(shared / "traces" / "hta" / "simple_add_kineto.json.gz", tmp_path)
    result = score_learning([tmp_path])
    scores = result.metrics()
    assert scores["models_0"].mape > 0.15, "an H100 has less bandwidth"
    assert scores["models_1"].mape < 0.06
    assert result.rates["pairs_better_than_models_runs"] == 1.0
    assert [s.reason for s in result.skipped] == [
        "was recorded without shapes: record it with torch.profiler.profile(record_shapes=True)"
    ]


def test_amd_products_follow_the_law_alone() -> None:
    x = Shape((4096, 4096), (4096, 1), "float32")
    (found,) = call_times(load("mi210"), [Call("aten::mm", (x, x))])
    assert found.warm == pytest.approx(found.law.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v100_pcie_32gb", "p100_pcie"])
def test_convolutions_on_gpus_that_were_not_fitted(shared: Path, name: str) -> None:
    """The bar of 20%, on every eighth shape of their table; nothing of these GPUs was fitted."""
    table = read_table(shared / "kernels" / "neusight" / "train_conv.csv.gz")
    shapes = [s for s in table.shapes if s.gpu.key == name][::8]
    measured = np.array([s.seconds for s in shapes])

    def error(models: object) -> float:
        times = np.array([t.warm for t in call_times(models, [s.call for s in shapes])])  # type: ignore[arg-type]
        return float(np.exp(np.log(np.maximum(np.abs(times / measured - 1), 4e-4)).mean()))

    own = load(name)
    assert error(own) < 0.2 < error(law_alone(own))
