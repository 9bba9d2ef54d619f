"""Hardware facts: files are checked, names are found, and what depends on the GPU takes its numbers from them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graph_sketches import Sketch
from presage.cli.app import app
from presage.errors import InputError, PresageError
from presage.hardware import gpu, gpus, host, hosts
from presage.hardware.facts import shipped_files
from presage.hardware.gpu import read_gpu
from presage.memory.step_memory import memory_profile
from presage.memory.workspace import library_bytes

GOOD = next(p for p in shipped_files("gpus") if p.stem == "h200").read_text()


def test_known_gpus_are_whole_and_told_apart() -> None:
    found = gpus()
    assert {"h200", "h100_sxm", "h100_pcie", "a100_40gb", "a100_80gb", "a10", "l4", "l40s", "t4", "b200", "mi300x"} <= {
        g.key for g in found
    }
    names = [n.lower() for g in found for n in g.driver_names]
    assert len(set(names)) == len(names)
    for g in found:
        assert gpu(g.key) == g and all(gpu(n.upper()) == g for n in g.driver_names)
        assert set(g.facts.sources) == set(g.facts.figures) and hash(g) == hash(gpu(g.key))
        assert 0.8 * 2 * 64 <= g.peak["fp32"] / g.sms / g.boost_clock <= 1.1 * 2 * 256  # multiply-adds a clock
        assert 1 < g.peak["fp16"] / g.memory_bandwidth < 1000  # FLOPs a byte


def test_the_h200_is_as_measured() -> None:
    g = gpu("NVIDIA H200")
    assert (g.sms, g.memory, g.l2, g.power_limit) == (132, 150109880320, 60 << 20, 700)
    assert g.memory_bandwidth == pytest.approx(4.8e12) and g.peak["bf16"] == pytest.approx(989.5e12)
    assert g.link == pytest.approx(450e9) and g.boost_clock == pytest.approx(1.98e9)
    assert g.facts.sources["l2_MiB"].date == "2026-11-15"


def test_scratch_memory_takes_its_numbers_from_the_gpu() -> None:
    h200, a100 = gpu("h200"), gpu("a100_80gb")
    assert (h200.sms, h200.threads_per_sm) == (132, 2048)
    assert (h200.cublas_workspace, h200.cublaslt_workspace) == (32 << 20, 1 << 20)
    assert library_bytes(a100) == {"cublas": 8519680, "cublaslt": 1 << 20, "cudnn dropout": 24 * 2048 * 108}
    s = Sketch()
    s.op("mm", [s.tensor(64, 64), s.tensor(64, 64)], [s.new(64, 64)])
    assert (
        memory_profile(s.graph()).peak_allocated - memory_profile(s.graph(), chip=a100).peak_allocated
        == (32 << 20) - 8519680
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("sms = 132", "sms = 0", "sms: 0 is out of range [1, 1000]"),
        ("sms = 132", "sms = 132.5", "sms: is 132.5, not a whole number"),
        ("sms = 132", 'sms = "132"', "sms: is '132', not a number"),
        ("sms = 132", "sms = true", "sms: is True, not a number"),
        ("sms = 132", "sms = 132\ncores = 4", "cores: is unknown: choose from sms, "),
        ("sms = 132\n", "", "sms: is missing"),
        ("bandwidth_GBps = 4800", "bandwidth_GBps = 4.8", "memory_bandwidth_GBps: 4.8 is out of range"),
        ("bandwidth_GBps = 4800", "bandwidth_GBps = nan", "memory_bandwidth_GBps: is nan: it should be a finite"),
        ("peak_bf16_TFLOPS = 989.5", "peak_bf16_TFLOPS = 500", "should not be more than peak_bf16_TFLOPS"),
        ("l2_MiB = 60", "l2_MiB = 60\nbase_clock_MHz = 2000", "base_clock_MHz: should not be more than boost"),
        ("pcie_both_ways_GBps = 128", "pcie_both_ways_GBps = 128\nl2_MiB = 50", "l2_MiB: is given twice"),
        ('date = "2024-11"', 'date = "last year"', "date: is 'last year'; should be text like 2024"),
        ('date = "2024-11"', "", "date: is None"),
        ("[[figures]]", "[[numbers]]", "figures: no [[figures]] in it"),
        ('architecture = "Hopper"', 'architecture = ""', "architecture: should be a str, and not empty"),
        ('architecture = "Hopper"', "", "architecture: is missing"),
        ('architecture = "Hopper"', 'architecture = "Hopper"\ncolour = "green"', "colour: is unknown"),
        ('driver_names = ["NVIDIA H200"]', "driver_names = [1]", "driver_names: should be a list of texts"),
        ('name = "', 'name = ', "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_with_its_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as e:
        read_gpu(path)
    assert said in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_source_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line for line in GOOD.splitlines() if not line.startswith("source")))
    with pytest.raises(InputError, match="source: every"):
        read_gpu(path)


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(PresageError, match=r"no gpu 'zzz': choose from a10, .*t4, .* the path of a \.toml file"):
        gpu("zzz")
    with pytest.raises(PresageError, match=r"no gpu 'h300': did you mean .*h200"):
        gpu("h300")
    with pytest.raises(InputError, match=r"absent\.toml: cannot be read: there is no such file"):
        gpu(str(tmp_path / "absent.toml"))
    (tmp_path / "mine.toml").write_text(GOOD.replace("sms = 132", "sms = 99"))
    assert gpu(str(tmp_path / "mine.toml")).sms == 99
    assert host("h200_host").cpus == 16 and hosts()
    with pytest.raises(PresageError, match="no host 'mine': choose from h200_host"):
        host("mine")


def test_the_command() -> None:
    shown = CliRunner().invoke(app, ["gpus"])
    assert shown.exit_code == 0
    assert ["b200", "NVIDIA", "B200"] in [line.split()[:3] for line in shown.stdout.splitlines()]
    assert "NVIDIA L40S datasheet" not in shown.stdout
    assert "NVIDIA L40S datasheet" in CliRunner().invoke(app, ["gpus", "-v"]).stdout
    one = CliRunner().invoke(app, ["gpus", "h200"]).stdout
    assert ["sustained_copy_GBps", "4243"] in [line.split()[:2] for line in one.splitlines()]
    value = json.loads(CliRunner().invoke(app, ["gpus", "Tesla T4", "--json", "-"]).stdout)
    (t4,) = value["gpus"]
    assert t4["key"] == "t4" and t4["figures"]["power_limit_W"]["value"] == 70
    assert t4["figures"]["sms"]["date"] == "2018"
