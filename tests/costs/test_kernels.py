"""Kernel times of a step: laws, the cache, the power limit, and fallbacks that are told."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.cache import Cache
from presage.costs.calibrated_kernels import CallTime, call_times
from presage.costs.call import Call, Shape
from presage.costs.families import BY_OP, FAMILIES
from presage.costs.families.copy import strided
from presage.costs.families.rnn import rnn
from presage.costs.kernel_files import load, save
from presage.costs.kernel_model import OpTime, Power, slowdown
from presage.errors import PresageError
from presage.graph.graph import Graph, Op, Ref, Storage, Tensor
from presage_fit.cache_power import fit_cache, fit_power
from presage_fit.kernel_models import from_leaf

PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack"
MEGA = 2.0**20


def matrix(rows: int, columns: int, dtype: str = "bfloat16") -> Shape:
    return Shape((rows, columns), (columns, 1), dtype)


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> Call:
    return Call("aten::mm", (matrix(m, k, dtype), matrix(k, n, dtype)))


def step(*names: str, elements: int = 1 << 22) -> Graph:
    """A chain of ops, each on the last one's output."""
    tensors = tuple(Tensor(i, i, (elements,), (1,), "float32") for i in range(len(names) + 1))
    storages = tuple(Storage(i, 4 * elements, "activation") for i in range(len(tensors)))
    ops = tuple(Op(n, "", (Ref(i),), (i + 1,), "forward", "main") for i, n in enumerate(names))
    return Graph(ops, tensors, storages, ())


def test_a_large_product_runs_near_the_peak_and_grows_with_its_size() -> None:
    models = load("h200")
    sizes = [1024, 2048, 4096, 8192]
    times = [t.warm for t in call_times(models, [product(n, n, n) for n in sizes])]
    assert times == sorted(times)
    rate = 2 * 8192**3 / times[-1]
    assert 650e12 < rate < 900e12  # 790 TFLOP/s in a short burst were measured


SWEEPS = dict.fromkeys(("scan", "resample", "fft", "grouped"), "various")  # which have no sweep of their own


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "factorize"])  # which no sweep has measured
def test_every_family_is_fitted_on_the_features_it_has(name: str) -> None:
    """The shipped file is of this code: fit it again after a change of features."""
    models, family = load("h200"), FAMILIES[name]
    with gzip.open(PACK / f"{SWEEPS.get(name, name)}.jsonl.gz", "rb") as f:
        rows = [msgspec.json.decode(line) for line, _ in zip(f, range(200), strict=False)]
    leaves = [(op, r["p"]) for r in rows for op in r.get("ops", []) if op["op"] in family.ops]
    calls = [from_leaf(SimpleNamespace(**leaf), params) for leaf, params in leaves]
    call = next(c for c in calls if c.tensors and c.inputs[0])
    found = family.features(call, family.law(call, models.rates))
    assert len(found) + 1 == models.trees[name].features == models.counts[name].features


@pytest.mark.parametrize(
    ("op", "sizes", "milliseconds"),
    [
        ("linalg_qr", (512, 512), 1.84),
        ("linalg_qr", (4096, 4096), 31.3),
        ("linalg_cholesky_ex", (2048, 2048), 1.95),
        ("linalg_cholesky_ex", (64, 2048, 2048), 22.2),
    ],
)
def test_factorizations_take_what_was_published_of_hopper_gpus(
    op: str, sizes: tuple[int, ...], milliseconds: float
) -> None:
    strides = tuple(sizes[-1] ** (len(sizes) - 1 - k) for k in range(len(sizes)))
    [time] = call_times(load("h200"), [Call(f"aten::{op}", (Shape(sizes, strides, "float32"),))])
    assert time.warm * 1e3 == pytest.approx(milliseconds, rel=0.3)


def test_a_gpu_of_the_same_architecture_is_held_to_its_own_power_limit() -> None:
    """An H100 NVL is an H200's chip under 400 W; other architectures keep the energies of theirs out of it."""
    measured, lower = load("h200").power, load("h100_nvl").power
    assert (lower.limit, lower.per_flop) == (400.0, measured.per_flop)
    assert lower.base < measured.base
    assert load("l40").power == measured


def table(name: str) -> Any:
    return msgspec.json.decode((PACK / f"{name}.json").read_bytes())


@given(st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_a_colder_cache_is_never_faster(a: float, b: float, latent: bool) -> None:
    time = CallTime(1.0, 1.5, 1, None, latent)  # type: ignore[arg-type]
    low, high = sorted((a, b))
    assert 1.0 <= time.at(low) <= time.at(high) <= 1.5


def test_the_cache_keeps_what_was_just_written() -> None:
    cache = fit_cache(table("cache"))
    assert cache.cold(0, 2 * MEGA) == 0
    assert cache.cold(100 * MEGA, 2 * MEGA) == 1
    assert 10 * MEGA < cache.lost < 60 * MEGA  # the L2 cache has 60 MiB


def test_small_tensors_stay_in_the_cache_and_large_ones_do_not() -> None:
    models = load("h200")
    chain = ("aten::neg", "aten::exp", "aten::neg")
    small, large = (models.op_times(step(*chain, elements=n))[-1].seconds for n in (1 << 20, 1 << 28))
    assert large / small > 2**8 * 0.8  # a large tensor's bytes are dearer than a small one's


def test_the_power_limit_slows_tensor_cores_only_where_the_step_is_hot() -> None:
    power = fit_power(table("power"))

    def step(hot: float, other: float) -> list[OpTime]:
        gemm = OpTime(0.1, 1, "matrix multiply", "model", watts=hot, tensor_cores=True)
        return [gemm, OpTime(0.1, 1, "elementwise", "model", watts=other)]

    assert slowdown(power, step(500.0, 500.0)) == 1.0
    factor = slowdown(power, step(1000.0, 600.0))
    assert 1.0 < factor < 1.2
    assert slowdown(power, step(1000.0, 600.0), idle=0.1) < factor  # waiting for the host cools


def test_the_power_of_known_loads() -> None:
    """W as measured for sustained loads that the fit does not look at."""
    power = fit_power(table("power"))
    loads = {r["load"]: r for r in table("power")["loads"] if not r["copies"] and not r["pause"]}
    for name, works in (("add", False), ("lookup", False)):
        load = loads[name]
        assert power.demand(load["ms"] * 1e-3, 0, "fp32", load["bytes"], works) == pytest.approx(load["watts"], rel=0.2)
    assert power.demand(1.39e-3, 2 * 8192**3, "bf16", 4e8) > 1.1 * power.limit  # a large product exceeds it
    small = Power(700, 200, 1e-10, {"fp32": 1e-11}, 0.5)
    assert small.demand(1.0, 1e13, "fp32", 1e12) == pytest.approx(400)


def test_an_op_without_a_model_is_told_and_not_free() -> None:
    models = load("h200")
    found = models.op_times(step("aten::neg", "aten::acosh", "custom::scan"))
    assert [t.source for t in found] == ["model", "likeness", "roofline"]
    assert min(t.seconds for t in found) > 4e-6


def test_arguments_a_model_cannot_read_get_a_roofline() -> None:
    """A pooling without a window makes no sense to its model."""
    (found,) = load("h200").op_times(step("aten::max_pool2d_with_indices"))
    assert found.source == "roofline"
    assert found.seconds > 4e-6
    with pytest.raises(PresageError, match="aten::mm"):
        call_times(load("h200"), [Call("aten::mm", (matrix(2, 2),))])


def test_views_cost_nothing() -> None:
    graph = step("aten::neg", "aten::view")
    ops = (graph.ops[0], msgspec.structs.replace(graph.ops[1], kernels=False))
    found = load("h200").op_times(Graph(ops, graph.tensors, graph.storages, ()))
    assert (found[1].seconds, found[1].launches, found[1].source) == (0.0, 0, "none")


def test_models_come_back_from_their_file(tmp_path: Path) -> None:
    models = load("h200")
    save(models, tmp_path / "kernels.npz")
    again = load(tmp_path)
    calls = [product(512, 512, 512), Call("aten::gelu", (matrix(4096, 4096),))]
    assert [t.warm for t in call_times(again, calls)] == [t.warm for t in call_times(models, calls)]
    assert (again.cache, again.power) == (models.cache, models.power)


def test_a_gpu_that_was_never_calibrated_gets_its_own_law_and_says_so() -> None:
    h200, a100 = load("h200"), load("a100_80gb")
    assert not h200.transferred
    assert "H200" in a100.transferred
    (fast,), (slow,) = (call_times(m, [product(8192, 8192, 8192)]) for m in (h200, a100))
    assert 2 < slow.warm / fast.warm < 5  # 312 against 989 TFLOP/s


def test_ops_belong_to_one_family() -> None:
    assert sum(len(f.ops) for f in FAMILIES.values()) == len(BY_OP)


def test_cache_bounds() -> None:
    cache = Cache(10 * MEGA, 40 * MEGA, 2.0)
    shares = [cache.cold(d * MEGA, MEGA) for d in range(0, 60, 5)]
    assert shares == sorted(shares)
    assert replace(cache, lost=20 * MEGA).cold(15 * MEGA, MEGA) > cache.cold(15 * MEGA, MEGA)


def test_a_folder_that_is_called_as_a_known_gpu_is_said_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h200").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("h200").gpu.key == "h200"
    with pytest.raises(PresageError):
        load("./h200")


def test_joining_channels_last_images_takes_as_long_as_joining_their_rows() -> None:
    def joined(strides: tuple[int, ...], sizes: tuple[int, ...], dim: int) -> list[Call]:
        piece = Shape(sizes, strides, "float16")
        return strided(Call("aten::cat", ((piece, piece), dim)))

    last = joined((64 * 320 * 320, 1, 320 * 64, 64), (8, 64, 320, 320), 1)
    assert last == joined((320 * 320 * 64, 320 * 64, 64, 1), (8, 320, 320, 64), 3)
    assert joined((64, 1), (8, 64), 1)[0].name == "aten::cat"
    assert joined((1, 8), (8, 64), 1)[0].name == "aten::copy_", "other layouts run a strided copy"


def recurrent(x: tuple[int, ...], alive: tuple[int, ...] = ()) -> Call:
    """An LSTM of 256 units, both ways, over a batch of 32; `alive`: packed sequences at each step."""
    hidden = Shape((2, 32, 256), (8192, 256, 1), "float32")
    inputs = (
        matrix(*x, "float32") if len(x) == 2 else Shape(x, (x[1] * x[2], x[2], 1), "float32"),
        (),
        4,
        None,
        hidden,
    )
    return Call("aten::_cudnn_rnn", (*inputs, hidden, 2, 256, 0, 1, False, 0.0, True, True, alive))


def test_packed_sequences_take_the_steps_of_the_longest() -> None:
    whole, packed, shorter = (
        recurrent((80, 32, 512)),
        recurrent((2560, 512), (32,) * 80),
        recurrent((1280, 512), (16,) * 80),
    )
    assert rnn(packed) == rnn(whole) and rnn(shorter).steps == 80 and rnn(shorter).batch == 16
    assert rnn(recurrent((2560, 512))) == rnn(whole)  # a trace does not tell them: all as long
    assert BY_OP["aten::_cudnn_rnn"].law(packed, load("h200").rates) == BY_OP["aten::_cudnn_rnn"].law(
        whole, load("h200").rates
    )
