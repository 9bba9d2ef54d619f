"""`presage fit`, priors and traces: what a file is, what it says, and what is kept from the prior."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.errors import InputError, PresageError
from presage.hardware import gpu
from presage.noise.distribution import LogNormal
from presage.noise.files import format_noise, read_noise
from presage.noise.model import COMPUTE, NetworkRegimes
from presage.noise.priors import CONDITIONS, prior
from presage.noise.work_classes import kernel_class
from presage.traces.trace_set import files_of, read_run
from presage_fit.noise import Facts, fit_files, kind_of
from presage_fit.trace_effects import fit_traces, two_way

run = CliRunner()


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "gpus.csv"
    times = 3 * np.exp(rng.normal(0, 0.02, 100))
    path.write_text("uuid,perf\n" + "".join(f"g{i},{t:.6f}\n" for i, t in enumerate(times)))
    return path


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path / "steps.csv"
    path.write_text("step,seconds\n" + "".join(f"{i},{5 + 0.02 * rng.standard_normal():.6f}\n" for i in range(300)))
    return path


def test_every_prior_says_where_it_is_from_and_is_a_file() -> None:
    for conditions in CONDITIONS:
        belief = prior("h100_sxm", 1024, 8, 5.0, conditions)
        format_noise(belief)
        numbers = belief.noise.numbers()
        for path in (
            p for p in numbers if p.startswith(("spread", "slow.share", "common.sd", "stalls.per")) and numbers[p]
        ):
            assert belief.intervals[path].low <= numbers[path] <= belief.intervals[path].high, path
            starts = [path, *(path.rsplit(".", n)[0] for n in (1, 2))]
            assert any(belief.sources.get(s) for s in starts), path
        drawn = belief.drawn(np.random.default_rng(0))
        assert drawn.of("products").rank > 0


def test_production_is_noisier_than_screened_and_unscreened_has_more_slow_gpus() -> None:
    screened, production, unscreened = (prior("h200", 1024, 8, 10.0, c).noise for c in CONDITIONS)
    assert production.of("products").rank > screened.of("products").rank
    assert production.common.run_sd > screened.common.run_sd
    assert screened.slow.share == 0 < production.slow.share < unscreened.slow.share
    assert screened.network == NetworkRegimes() != production.network


def test_a_prior_goes_by_the_gpu_and_the_size_of_the_job() -> None:
    small, large = (prior("h100_sxm", n, 8, 5.0).noise for n in (256, 16_384))
    assert large.slow.share * 16_384 == pytest.approx(small.slow.share * 256), "as many jobs have a slow GPU"
    assert prior("h100_sxm", 8, 8).noise.network == NetworkRegimes(), "one node has no network between nodes"
    assert prior("v100_32gb", 64).noise.of("products").rank == 0.016
    assert prior(gpu("a100_80gb"), 64).noise.of("products").rank == 0.023
    short, long = (prior("h100_sxm", 256, 8, s).noise for s in (1.0, 30.0))
    assert short.network.moves[0][1] < long.network.moves[0][1], "a longer step is likelier to meet congestion"
    assert short.common.jitter.sd / 1.0 > long.common.jitter.sd / 30.0
    with pytest.raises(PresageError, match="unknown conditions 'lab'"):
        prior("h100_sxm", 8, 8, None, "lab")
    with pytest.raises(PresageError, match="at least one GPU"):
        prior("h100_sxm", 0)


def test_rank_step_and_rest_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    held: dict[str, list[bool]] = {"rank": [], "step": [], "own": []}
    for _ in range(200):
        logs = (
            0.02 * rng.standard_normal((12, 1)) + 0.01 * rng.standard_normal(10) + 0.005 * rng.standard_normal((12, 10))
        )
        found = two_way(logs)
        for name, truth in (("rank", 0.02), ("step", 0.01), ("own", 0.005)):
            held[name].append(found[name].low <= truth <= found[name].high)
    assert all(0.84 <= np.mean(h) <= 0.96 for h in held.values()), {k: np.mean(h) for k, h in held.items()}
    still = two_way(np.zeros((4, 3)))
    assert all(c.value == c.low == c.high == 0 for c in still.values())


def test_kernels_have_classes() -> None:
    assert kernel_class("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn") == "products"
    assert kernel_class("nvjet_hsh_192x192_64x4_1x2_h_bz_coopB_TNT") == "products"
    assert kernel_class("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>") == "attention"
    assert kernel_class("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>") == "optimizer"
    assert kernel_class("void at::native::vectorized_elementwise_kernel<4, ...>") == "streams"


def test_traces_of_all_ranks_give_spreads(shared: Path) -> None:
    folder = shared / "traces" / "megatron_tp8_a100"
    found = fit_traces(read_run(sorted(folder.glob("kineto_*.json.gz"))), "tp")
    products = found.spread["products"]
    assert found.compared > 0.99
    assert 0.004 < products["rank"].value < 0.015, "GPUs of one node differ by about 1%"
    assert products["own"].value < 0.2 * products["rank"].value
    assert found.spread["streams"]["rank"].value < products["rank"].value, "memory-bound work varies less"
    assert 0.02 < found.spread["tp"]["own"].value < 0.15
    assert "step" not in products, "one step says nothing of steps"
    assert set(found.belief().noise.spread) == {"products", "streams", "tp"}
    with pytest.raises(InputError, match="is not a class: choose from"):
        fit_traces(read_run(sorted(folder.glob("kineto_*.json.gz"))), "nvlink")


def test_traces_with_several_steps_tell_of_steps(shared: Path) -> None:
    folder = shared / "traces" / "torchrec_dlrm_4xv100" / "long_a2a_optimizer_5"
    found = fit_traces(read_run(files_of([folder])))
    assert found.steps == 3
    assert set(found.spread["products"]) == {"rank", "step", "own"}
    assert 0 < found.spread["products"]["rank"].value < 0.05


def test_one_rank_is_not_enough() -> None:
    with pytest.raises(InputError, match="of one rank"):
        fit_traces(read_run(files_of(["demo"])))


def test_files_are_known_by_what_is_in_them(shared: Path, gpus: Path, steps: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(" iteration        1/     100 | elapsed time per iteration (ms): 512.3 | loss\n")
    assert kind_of(gpus) == "fleet"
    assert kind_of(steps) == kind_of(log) == "steps"
    assert kind_of(shared / "steps" / "mlperf_v5.0.json.gz") == "steps"
    assert kind_of(shared / "traces" / "bytedance_straggler" / "trace-AR.csv.gz") == "operations"
    assert kind_of(shared / "traces" / "megatron_tp8_a100") == "traces"
    assert kind_of(shared / "traces" / "megatron_tp8_a100" / "kineto_0.json.gz") == "traces"
    with pytest.raises(InputError, match="save it as CSV"):
        kind_of(tmp_path / "table.parquet")
    with pytest.raises(PresageError, match="nothing to fit"):
        fit_files([])


def test_several_files_fill_different_parts_and_the_prior_the_rest(gpus: Path, steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "noise.toml"
    asked = ["--gpu", "h100_sxm", "--gpus", "1024", "--out", str(out)]
    done = run.invoke(app, ["fit", str(gpus), str(steps), *asked], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "per-GPU times" in done.output
    assert "step times" in done.output
    assert "kept from the prior (production, 1,024 h100_sxm, 8 a node)" in done.output
    found = read_noise(out).noise
    assert found.of("products").rank == pytest.approx(0.02, rel=0.25)
    assert found.common.sd * 5 <= 0.025
    assert found.of("dp").own == 0.05, "the prior's"
    assert set(COMPUTE) <= set(found.spread)
    again = run.invoke(app, ["fit", str(out), "--json", "-"], catch_exceptions=False)
    assert json.loads(again.output)["numbers"]["spread.products.rank"]["value"] == found.of("products").rank


def test_without_gpus_nothing_is_assumed(gpus: Path) -> None:
    found = fit_files([gpus], kind="streams")
    assert found.prior is None
    assert set(found.belief.noise.spread) == {"streams"}
    assert isinstance(found.belief.noise.slow.factor, LogNormal)
    told = json.loads(run.invoke(app, ["fit", str(gpus), "--json", "-"], catch_exceptions=False).output)
    assert told["kept_from_prior"] == []
    assert told["parts"][0]["kind"] == "fleet"
    assert set(told["numbers"]["slow.share"]) == {"value", "low", "high"}


def test_traces_say_what_they_ran_on_where_it_is_known(shared: Path) -> None:
    folder = shared / "traces" / "megatron_tp8_a100"
    found = fit_files(sorted(folder.glob("kineto_*.json.gz")), collectives="tp")
    assert found.prior is not None
    assert "8 NVIDIA A100-SXM4-80GB" in found.prior
    assert "spread.tp.own" not in found.kept
    assert "spread.dp.own" in found.kept
    with pytest.raises(PresageError, match="unknown GPU 'abacus'"):
        fit_files([folder / "kineto_0.json.gz", folder / "kineto_1.json.gz"], Facts("abacus"))


def test_tables_of_operations_are_fitted(shared: Path) -> None:
    found = fit_files([shared / "traces" / "bytedance_straggler" / "trace-ST.csv.gz"], Facts("h100_sxm", 8))
    assert found.parts[0].kind == "operations"
    assert found.belief.noise.of("products").own > 0
    assert "network" not in found.kept, "one node"


def test_runs_of_several_jobs_need_a_name(shared: Path) -> None:
    logs = shared / "steps" / "mlperf_v5.0.json.gz"
    with pytest.raises(InputError, match="groups of runs: say which with --group"):
        fit_files([logs])
    with pytest.raises(InputError, match="no group 'nowhere'"):
        fit_files([logs], group="nowhere")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--class", "gemm"], "unknown class of work 'gemm'"),
        (["--column", "gpu"], "--column gpu: should be KEY=NAME"),
        (["--column", "gpu=card"], "card: is not a column"),
        (["--gpu", "h100_sxm", "--gpus", "8", "--conditions", "lab"], "unknown conditions 'lab'"),
    ],
)
def test_mistakes_get_a_sentence(gpus: Path, arguments: list[str], what: str) -> None:
    with pytest.raises(PresageError) as e:
        run.invoke(app, ["fit", str(gpus), *arguments], catch_exceptions=False)
    assert what in str(e.value)
