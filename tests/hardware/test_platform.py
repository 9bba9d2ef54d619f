"""Platforms: files are checked, figures have sources, links make sense."""

import json
from pathlib import Path

import pytest

from commands import runner
from presage.cli import hardware as command
from presage.errors import InputError, PresageError
from presage.hardware import gpu, platform, platforms
from presage.hardware.facts import shipped_files
from presage.hardware.platform import read_platform

GOOD = next(p for p in shipped_files("platforms") if p.stem == "dgx-h100").read_text()
run = runner(command.platforms_command)


def test_known_platforms_are_whole() -> None:
    found = {p.key: p for p in platforms()}
    wanted = "dgx-a100 dgx-h100 dgx-h200 dgx-b200 gb200-nvl72 mi300x-ib mi300x-roce p4de p5 h100-roce dgx-1-v100"
    assert {*wanted.split(), "4xgv100", "4xh100", "4xv100", "4xa100", "8xl4"} <= set(found)
    for p in found.values():
        assert platform(p.key) == p and hash(p) == hash(platform(p.key)) and p.domain == p.links[0].ranks
        for link in p.links:
            assert link.facts is not None and set(link.facts.sources) == set(link.facts.figures)
            assert link.bandwidth > 0 and 0 < link.latency < 1e-3
            assert all(source.text and source.date for source in link.facts.sources.values())


def test_a_platform_takes_its_link_from_its_gpu() -> None:
    h100 = platform("dgx-h100")
    assert h100.gpu == gpu("h100_sxm") and h100.links[0].bandwidth == gpu("h100_sxm").link == pytest.approx(450e9)
    assert h100.links[1].bandwidth == pytest.approx(50e9) and h100.links[0].in_network and not h100.links[1].in_network
    assert platform("gb200-nvl72").domain == 72 and platform("4xgv100").domain == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ranks = 8", "ranks = 1", "ranks: 1 is out of range \\[2, 1e\\+07\\]"),
        ("ranks = 8", "ranks = 8.5", "ranks: is 8.5, not a whole number"),
        ("ranks = 8", "ranks = 8\nspeed = 3", "speed: is unknown"),
        ("ranks = 8", "", "ranks: is missing"),
        ("bandwidth_GBps = 50", "bandwidth_GBps = 500000", "bandwidth_GBps: 500000 is out of range"),
        ("bandwidth_GBps = 50", "", "give one of bandwidth"),
        ("bandwidth_GBps = 50", "bandwidth_GBps = 460", "of infiniband is more than of nvlink within it"),
        ("ranks = 1048576", "ranks = 8", "of infiniband should be more than that of nvlink within it"),
        ("ranks = 1048576", "ranks = 20", "of infiniband should be a multiple of that of nvlink within it"),
        (
            'bandwidth = "gpu link"',
            'bandwidth = "gpu wire"',
            "bandwidth: is 'gpu wire': choose from gpu link, gpu",
        ),
        ('gpu = "h100_sxm"', 'gpu = "l4"', "is 'gpu link', which l4 has none of"),
        ('gpu = "h100_sxm"', 'gpu = "h900"', "no gpu 'h900'"),
        ('topology = "switch"', 'topology = "star"', "topology: is 'star': choose from switch, mesh"),
        ('in_network = "nvls"', 'in_network = "yes"', "in_network: is 'yes': choose from none, nvls, sharp"),
        ('fabric = "nvlink4"', "", "fabric: is missing"),
        ("[[links]]", "[[wires]]", "no \\[\\[links\\]\\] in it"),
        ('name = "NVIDIA', 'cooling = "air"\nname = "NVIDIA', "cooling: is unknown"),
        ('date = "2022"', 'date = "soon"', "date: is 'soon'"),
        ("latency_us = 0.6", 'latency_us = "low"', "latency_us: is 'low', not a number"),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(PresageError, match=said):
        read_platform(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace("bandwidth_GBps = 50", "bandwidth_GBps = 25"))
    mine = platform(str(path))
    assert mine.key == "mine" and mine.links[1].bandwidth == pytest.approx(25e9)
    assert json.loads(run(path, "--json", "-"))["platforms"][0]["key"] == "mine"
    with pytest.raises(InputError, match="cannot be read"):
        platform(str(tmp_path / "none.toml"))
    with pytest.raises(PresageError, match=r"no platform 'dgx-h900': did you mean dgx-h.00"):
        platform("dgx-h900")


def test_the_command_lists_and_shows() -> None:
    listed = run()
    assert all(p.key in listed for p in platforms())
    shown = run("dgx-h100")
    assert "nvlink4, switch, reduces" in shown and "measured" in shown and "composed" in shown
    value = json.loads(run("dgx-h100", "--json", "-"))["platforms"][0]
    assert value["links"][0]["figures"]["ranks"]["value"] == 8 and value["links"][1]["bandwidth"] == pytest.approx(50e9)
    one = next(c for c in value["collectives"] if c["op"] == "all_reduce" and c["ranks"] == 8)
    assert one["from"] == "measured" and one["busbw"][-1] == pytest.approx(478e9, rel=0.05)
    assert "collectives" not in json.loads(run("--json", "-"))["platforms"][0]
