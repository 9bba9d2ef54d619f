"""What overlap costs: the law's shape, its fit on an H200, and what public traces and reports say."""

import importlib.util
import math
import statistics
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.overlap import OverlapLaw, channels, contention, kind_of, law, start_wait, waves
from presage.errors import PresageError
from presage.graph.families import FAMILIES
from presage.hardware import gpu
from presage.hardware.gpu import gpus
from presage.traces import kineto

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "h200_overlap"
KINDS = st.sampled_from(["products", "attention", "streams", "scattered"])


@cache
def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def measured() -> list:
    return tool("fit_overlap").pairs(tool("fit_overlap").read(DATA / "overlap.jsonl.gz"))


SITUATION = {
    "name": st.sampled_from([g.key for g in gpus()]),
    "kind": KINDS,
    "rate": st.floats(0, 1e12),
    "count": st.integers(0, 64),
    "share": st.floats(0, 1),
    "rounds": st.sampled_from([1.0, 2.0, 5.0, 20.0, math.inf]),
}


def told(name: str, kind: str, rate: float, count: int, share: float, rounds: float):
    return contention(
        gpu(name), bytes_per_second=rate, channels=count, computes=kind == "products", memory_share=share, waves=rounds,
        kind=kind,  # type: ignore[arg-type]
    )  # fmt: skip


@given(**SITUATION, more_rate=st.floats(0, 1e12), more=st.integers(0, 32))
def test_more_traffic_or_channels_never_speed_a_kernel_up(name, kind, rate, count, share, rounds, more_rate, more):
    here = told(name, kind, rate, count, share, rounds)
    assert 1 <= here.compute < 30 and 1 <= here.collective < 10
    busier = told(name, kind, rate + more_rate, count + more, share, rounds)
    assert busier.compute >= here.compute - 1e-9


@given(**SITUATION, more_rate=st.floats(0, 1e12))
def test_a_faster_collective_is_slowed_no_less(name, kind, rate, count, share, rounds, more_rate):
    here = told(name, kind, rate, count, share, rounds)
    assert told(name, kind, rate + more_rate, count, share, rounds).collective >= here.collective - 1e-9


@given(**SITUATION)
def test_the_law_has_no_jumps(name, kind, rate, count, share, rounds):
    here = told(name, kind, rate, count, share, rounds)
    near = told(name, kind, rate * 1.001 + 1e3, count, min(1.0, share + 1e-4), rounds)
    assert near.compute == pytest.approx(here.compute, rel=0.02)
    assert near.collective == pytest.approx(here.collective, rel=0.02)


def test_nothing_beside_costs_nothing():
    for kind in ("products", "attention", "streams", "scattered"):
        found = told("h200", kind, 0.0, 0, 0.5, 1.0)
        assert (found.compute, found.collective) == (1.0, 1.0)


def test_pairs_kept_out_of_the_fit():
    out = [p for p in measured() if p.kept_out]
    found = tool("fit_overlap").score(law(), out)
    assert found["n"] >= 600
    assert found["mape"] < 0.07 and found["p90"] < 0.15 and abs(found["bias"]) < 0.02
    assert found["mape"] < 0.35 * found["mape_if_ignored"]
    assert found["collective_mape"] < 0.04
    naive = statistics.mean(abs(1 / (1 - p.channels / 132) / p.compute - 1) for p in out)
    assert found["mape"] < 0.5 * naive


def test_the_file_is_what_the_tool_makes():
    fit = tool("fit_overlap")
    inside = [p for p in measured() if not p.kept_out]
    again = fit.search(law(), lambda tried: fit.miss(tried, inside), rounds=2)
    assert fit.miss(again, inside) > 0.99 * fit.miss(law(), inside), "another law fits better: run tools/fit_overlap.py"
    worse = OverlapLaw(**{**{k: getattr(law(), k) for k in law().__slots__}, "tail": 0.0})
    assert fit.miss(worse, inside) > 1.5 * fit.miss(law(), inside)


def test_a_second_run_says_the_same():
    fit = tool("fit_overlap")
    facts = [r for r in fit.read(DATA / "overlap.jsonl.gz") if "fact" in r]
    found = fit.apart(measured(), fit.pairs([*facts, *fit.read(DATA / "again.jsonl.gz")]))
    assert found["n"] > 1500 and found["mean"] < 0.01


def test_a_collective_waits_for_the_running_kernel():
    assert 0.2e-3 < start_wait(1e-3, "streams") < 0.5e-3
    assert start_wait(1e-3, "streams", high_priority=True) < 0.6 * start_wait(1e-3, "streams")
    assert start_wait(1e-3, "products", high_priority=True) == pytest.approx(start_wait(1e-3, "products"), rel=0.15)


def test_a_product_of_one_wave_nearly_doubles_as_reported():
    """NVIDIA developer forum 337991: 132 blocks on an H100's 132 multiprocessors beside an all-gather of 24 blocks: the
    share of the peak falls from about 80% to 47%, so 1.7 times as long."""
    h100 = gpu("h100_sxm")
    rounds = waves(h100, 1408 * 3072)
    assert rounds == 1
    found = contention(
        h100, bytes_per_second=350e9, channels=channels(h100), computes=True, memory_share=0.2, waves=rounds
    )
    assert found.compute == pytest.approx(80 / 47, rel=0.1)


def test_products_beside_all_to_all_in_traces(shared: Path):
    """8 channels of a V100's 80 multiprocessors: long products lose what is taken, elementwise kernels nothing."""
    traces, v100 = tool("overlap_traces"), gpu("v100_16gb")
    found: dict[str, list[float]] = {"matrix multiply": [], "elementwise": []}
    for path in sorted((shared / "traces" / "torchrec_dlrm_4xv100").glob("long_a2a_optimizer_*/rank_[01].json.gz")):
        for pair in traces.pairs(kineto.read(path), traces.grids(path)):
            found.setdefault(pair.family, []).append(pair.ratio)
    assert len(found["matrix multiply"]) >= 12 and len(found["elementwise"]) >= 10
    spoken = contention(v100, bytes_per_second=0, channels=8, computes=True, memory_share=0.2)
    assert statistics.median(found["matrix multiply"]) == pytest.approx(spoken.compute, abs=0.05)
    full = contention(v100, bytes_per_second=0, channels=8, computes=False, memory_share=0.88)
    assert statistics.median(found["elementwise"]) == pytest.approx(full.compute, abs=0.05)


def test_every_family_and_every_gpu_is_covered():
    assert {kind_of(f) for f in FAMILIES} == {"products", "attention", "streams", "scattered"}
    for known in gpus():
        assert 1 <= channels(known) <= 64 and channels(known, "nvls") <= channels(known)
    from dataclasses import replace

    with pytest.raises(PresageError, match="no channel count"):
        channels(replace(gpu("h200"), architecture="Unheard"))
