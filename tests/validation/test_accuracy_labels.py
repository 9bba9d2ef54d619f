"""Whole models on GPUs that were never calibrated: op lists, what sets a pass's pace, labels that cannot be read."""

import ast
import csv
import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call
from presage.costs.corrections import transfer_streaming
from presage.costs.families import FAMILIES
from presage.costs.families.gemm import gemm_call
from presage.costs.kernel_files import load
from presage.costs.rates import Rates, power_relief, reached_fp32
from presage.errors import InputError
from presage.hardware import gpu
from presage_validation.label_models import NETS, LabelCase, tape
from presage_validation.label_ops import Tape, dense
from presage_validation.labels import ALLOCATION, PEER, Label, Pass, allocation, predict, read_labels, score_labels

ENTRY = {"model": "gpt2_large", "mode": "train", "seq_len": 1024, "batch": 1, "option": None, "num_layer": 36,
         "e2e_latency": 600.0, "fw_latency": 200.0, "bwall_latency": 400.0}  # fmt: skip
LINEAR = re.compile(r"(query|key|value|dense|_proj|fc1|fc2|lm_head|decoder|classifier|relationship|_wi|_wo|_[qkvo])$")


def written(folder: Path, **cases: Any) -> Path:
    path = folder / "labels.json"
    path.write_text(json.dumps({"Tesla_V100-PCIE-32GB": cases}))
    return path


# ---- op lists


def products(ran: Tape) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for call, n in ran.forward:
        if call.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            p = gemm_call(call)
            found[p.batch, p.m, p.n, p.k] += n
    return found


def listed(rows: list[dict[str, str]]) -> Counter[tuple[int, ...]]:
    """Products of a list of ops that has one layer."""
    found: Counter[tuple[int, ...]] = Counter()
    for r in rows:
        sizes = ast.literal_eval(r["input_shapes"])
        if "matmul" in r["target"] or "bmm" in r["target"]:
            (*batch, m, k), right = sizes[0], sizes[1]
            found[int(dense(*batch).elements), m, right[-1], k] += 1
        elif "addmm" in r["target"]:
            found[1, sizes[1][0], sizes[2][1], sizes[1][1]] += 1
        elif r["op"] == "call_module" and LINEAR.search(r["name"]) and "embed" not in r["name"]:
            out = ast.literal_eval(r["output_shape"])
            found[1, dense(*out).elements // out[-1], out[-1], sizes[0][-1]] += 1
    return found


def test_products_are_those_of_the_lists_of_ops(shared: Path) -> None:
    folder = shared / "kernels" / "neusight"
    by_case: dict[tuple[str, str], list[dict[str, str]]] = {}
    with gzip.open(folder / "labels_ops.csv.gz", "rt") as f:
        for row in csv.DictReader(f):
            by_case.setdefault((row["gpu"], row["case"]), []).append(row)
    labels = json.loads((folder / "labels.json").read_text())
    seen = set()
    for (device, name), rows in by_case.items():
        entry = labels[device][name]
        if entry["model"].startswith("switch"):  # its list is of another loop over the experts
            continue
        case = LabelCase(NETS[entry["model"]], entry["batch"], entry["seq_len"], entry["mode"] == "train", 1)
        assert products(tape(case)) == listed(rows), (device, name)
        seen.add(entry["model"])
    assert seen == {"bert_large", "gpt2_large", "gpt3_xl", "gpt3_27", "opt_13"}


@pytest.mark.parametrize("name", list(NETS))
def test_work_grows_with_layers_batch_and_training(name: str) -> None:
    net = NETS[name]
    small = LabelCase(net, 1, 64, False, 2)

    def flops(case: LabelCase) -> float:
        ran = tape(case)
        return sum(n * 2.0 * b * m * k * w for (b, m, w, k), n in products(ran).items())

    assert flops(replace(small, layers=4)) > flops(small)
    assert flops(replace(small, batch=2)) > 1.9 * flops(small)
    both = tape(replace(small, train=True))
    assert both.backward
    assert not tape(small).backward
    assert tape(replace(small, fused=True)).launches < tape(small).launches or net.kind == "switch"


def test_a_backward_product_has_the_flops_of_its_forward() -> None:
    ran = Tape(train=True)
    ran.linear(512, 1024, 4096)
    ran.bmm(8, 64, 32, 128)
    back = [gemm_call(c) for c, _ in ran.backward if c.name in ("aten::mm", "aten::bmm")]
    assert [2 * p.batch * p.m * p.n * p.k for p in back] == [2 * 512 * 1024 * 4096] * 2 + [2 * 8 * 64 * 32 * 128] * 2


# ---- what sets the pace


def test_small_tensors_share_blocks_of_memory() -> None:
    ran = Tape(train=True, times=4)
    ran.keep(5e6, 1e6)  # 20 MB: one of its own; 4 MB: five to a block
    assert ran.allocations == pytest.approx(4 * (1 + 4e6 / 20e6))
    still = Tape(train=False)
    still.keep(5e6)
    assert still.allocations == 0


def test_a_way_forward_waits_for_kernels_or_for_memory() -> None:
    one = Pass(0.1, 0.2, 0.0, 0.01, 100)
    assert one.seconds(1e-4) == pytest.approx(0.3)
    assert one.seconds(5e-3) == pytest.approx(0.71)


def test_allocations_of_a_machine_come_from_its_other_cases() -> None:
    case = LabelCase(NETS["bert"], 1, 128, True, 12)
    label = Label(gpu("l4"), "a", "bert", case, 0.5, 0.21)
    bound = (label, Pass(0.1, 0.2, 0.0, 0.01, 400))
    free = (replace(label, forward=0.4), Pass(0.4, 0.2, 0.0, 0.01, 400))
    assert allocation([bound, free]) == pytest.approx(0.2 / 400)
    assert allocation([free]) == ALLOCATION
    assert allocation([]) == ALLOCATION


def test_no_label_changes_what_is_predicted(tmp_path: Path) -> None:
    path = written(tmp_path, a=ENTRY, b={**ENTRY, "e2e_latency": 1200.0, "fw_latency": 700.0})
    rows = [r for r in score_labels(path).rows if r.metric == "train"]
    assert rows[0].predicted == rows[1].predicted
    assert rows[1].measured == 2 * rows[0].measured


def test_memory_that_was_given_back_is_wiped_before_it_is_had_again() -> None:
    case = LabelCase(NETS["gpt2_large"], 4, 1024, True, 36)
    ran, small, large = tape(case), gpu("mi210"), replace(gpu("mi210"), memory=160 << 30)
    assert ran.held == pytest.approx(2 * 4 * 774e6, rel=0.1)  # GPT-2 large's parameters, and their gradients
    assert predict(case, large).wiped == 0.0 < predict(case, small).wiped < ran.given_back
    assert predict(case, replace(small, architecture="Hopper", peak=gpu("h100_sxm").peak)).wiped == 0.0
    assert predict(replace(case, train=False), small).wiped == 0.0
    one = Pass(0.1, 0.2, 0.0, 0.01, 100, wiped=30e9)
    assert one.seconds(1e-4) == pytest.approx(0.3)
    assert one.seconds(1e-4, 30e9) == pytest.approx(1.2)


def test_the_rate_of_wiping_is_from_other_architectures(tmp_path: Path) -> None:
    """A longer pass on the MI210 makes the A100's longer, and not the MI250's or its own."""
    wide = {**ENTRY, "batch": 4}
    full = {**wide, "model": "gpt3_27", "seq_len": 2048, "batch": 1, "num_layer": 32, "e2e_latency": 3e3}

    def predicted(forward: float) -> list[float]:
        mi = {**wide, "e2e_latency": 5e3, "fw_latency": forward}
        devices = {"AMD_Instinct_MI210": mi, "AMD_Instinct_MI250": mi, "NVIDIA_A100_80GB_PCIe": full}
        (tmp_path / "labels.json").write_text(json.dumps({name: {"a": entry} for name, entry in devices.items()}))
        return [r.predicted for r in score_labels(tmp_path).rows if r.metric == "train"]

    short, long = predicted(1100.0), predicted(2200.0)
    assert short[:2] == long[:2] and long[2] > 1.2 * short[2]


# ---- files


def test_cases_that_cannot_be_predicted_are_named(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "ranks": {**ENTRY, "option": "tp4"},
        "model": {**ENTRY, "model": "llama"},
        "mode": {**ENTRY, "mode": "both"},
        "batch": {**ENTRY, "batch": 0},
        "half": {**ENTRY, "seq_len": 1.5},
        "time": {**ENTRY, "e2e_latency": -1},
        "lacks": {"model": "bert", "mode": "inf"},
        "none": None,
        "text": {**ENTRY, "batch": "many"},
    }
    path = written(tmp_path, good={**ENTRY, "unknown": 1, "num_layer": None}, **odd)
    labels, skipped = read_labels(path)
    assert [x.name for x in labels] == ["good"]
    assert labels[0].case.layers == 36
    assert [s.row.split()[-1] for s in skipped] == list(odd)
    assert all(s.reason for s in skipped)
    (tmp_path / "gpus.json").write_text(json.dumps({"Voodoo_2": {"a": ENTRY}}))
    assert "no facts of this GPU: Voodoo_2" in read_labels(tmp_path / "gpus.json")[1][0].reason


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{"])
def test_a_file_that_has_no_labels_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(InputError, match=r"labels\.json"):
        score_labels(tmp_path)


def test_the_command_scores_a_file_and_a_folder(tmp_path: Path) -> None:
    path = written(tmp_path, a=ENTRY)
    for kind, given in (("labels", tmp_path), ("kernels", path)):
        done = CliRunner().invoke(app, ["accuracy", kind, str(given), "--json", "-"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["kind"] == "labels"
        assert found["metrics"]["train"]["n"] == 1
        assert set(found["groups"]) == {"v100_pcie_32gb", "gpt2_large"}


# ---- physics


def test_more_power_is_never_slower() -> None:
    card = gpu("l4")
    shares = [reached_fp32(replace(card, power_limit=w)) for w in (40, 72, 100, 200, 400)]
    assert shares == sorted(shares)
    assert shares[-1] == 0.8
    assert shares[1] < 0.5
    assert reached_fp32(gpu("h200")) == 0.8  # the calibrated law stays as it was


def test_kernels_that_leave_power_over_ease_products() -> None:
    card = gpu("l4")
    factors = [power_relief(card, 1.0, others) for others in (0.0, 0.3, 1.0, 3.0)]
    assert factors[0] == pytest.approx(1.0)
    assert factors == sorted(factors, reverse=True)
    assert power_relief(gpu("h200"), 1.0, 1.0) == 1.0


def test_float32_products_of_other_generations_have_corrections_of_their_own() -> None:
    assert load("h100_sxm").single is None
    assert load("h200").single is None
    models = load("l4")
    plain = replace(models, single=None)
    x, w = dense(4096, 1024), dense(1024, 1024)
    one, half = (Call("aten::mm", tuple(replace(t, dtype=d) for t in (x, w))) for d in ("float32", "bfloat16"))
    assert call_times(models, [half]) == call_times(plain, [half])
    assert call_times(models, [one]) != call_times(plain, [one])


def test_a_gpu_like_the_calibrated_one_streams_like_it() -> None:
    models, call = load("h200"), Call("aten::add", (dense(1 << 20), dense(1 << 20), 1))
    family, law = FAMILIES["pointwise"], FAMILIES["pointwise"].law(call, Rates.of(gpu("h200")))
    warm, cold = transfer_streaming(family, models.trees["pointwise"], [call], [law], gpu("h200"), gpu("h200"))
    own = call_times(models, [call])[0]
    assert warm[0] == pytest.approx(own.warm, rel=1e-9)
    assert max(cold[0], own.warm) == pytest.approx(own.cold, rel=1e-9)
    fewer = replace(gpu("h200"), sms=33)
    slow = call_times(replace(models, gpu=fewer, source={**models.source}), [call])[0]
    assert slow.warm >= own.warm


# ---- the claim


@pytest.mark.slow
def test_errors_stay_where_they_are(shared: Path) -> None:
    """Below NeuSight's own, each."""
    found = score_labels(shared / "kernels" / "neusight").metrics()
    assert found["inference"].mape < 0.065 < PEER["inference"]
    assert found["fusion"].mape < 0.08 < PEER["fusion"]
    assert found["train"].mape < 0.09 < PEER["train"]
    assert found["train_machine"].mape < 0.06


def test_long_passes_take_longer_on_slower_gpus() -> None:
    case = LabelCase(NETS["gpt2_large"], 4, 1024, True, 36)
    times = [predict(case, gpu(name)).seconds() for name in ("h100_sxm", "a100_pcie_80gb", "v100_pcie_32gb", "l4")]
    assert times == sorted(times)
