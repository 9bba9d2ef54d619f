"""Frameworks are facts with sources."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from presage.errors import PresageError
from presage.hardware import gpu
from presage.jobs import frameworks as home
from presage.jobs.framework import Framework
from presage.jobs.frameworks import framework, frameworks, overlap_of

FILES = sorted((Path(home.__file__).parent / "frameworks").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_each_says_all_switches_and_where_they_are_from(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    made = framework(path.stem)
    assert made.key == path.stem and made.source and table["date"]
    said = {"bucket_bytes" if k == "bucket_MB" else k for k in table}
    left = set(Framework.__dataclass_fields__) - said - {"key", "overlap"}
    assert left == set(), f"left to a default: {left}"


def test_attention_goes_with_the_gpu() -> None:
    kinds = [framework("megatron-core", gpu(g)).attention for g in ("a100_80gb", "h100_sxm", "b200", "mi300x")]
    assert kinds == ["flash2", "flash3", "flash3", "flash2"]
    assert framework("torchtitan", gpu("h100_sxm")).attention == "flash2"


def test_software_of_2021_overlaps_nothing() -> None:
    old = overlap_of("megatron-2021")
    assert not (old.tensor or old.gradients or old.parameters or old.pipeline)
    assert overlap_of("nemo").tensor and overlap_of("megatron-core").gradients


def test_overrides_and_mistakes(tmp_path: Path) -> None:
    assert framework("nemo", host="graph").host == "graph"
    for name, changes, says in (
        ("megatron", {}, "no framework 'megatron': .* did you mean 'megatron-core'"),
        ("nemo", {"atention": 1}, "no switch 'atention': did you mean 'attention'"),
        ("nemo", {"attention": "flash9"}, "attention: is 'flash9': there is unfused"),
        ("nemo", {"gradient_bytes": 3}, "gradient_bytes: is 3: it can be 1, 2 or 4"),
    ):
        with pytest.raises(PresageError, match=says):
            framework(name, **changes)
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "Ours"\nsource = "us"\ndate = "2025"\ncompiled = true\nbucket_MB = 10\n[overlap]\ntensor = true\n'
    )
    made = framework(str(own))
    assert made.compiled and made.bucket_bytes == 10e6 and made.overlap.tensor and made.key == "own"
    own.write_text("compield = true")
    with pytest.raises(PresageError, match=r"own\.toml: compield: is not known here: did you mean 'compiled'"):
        framework(str(own))


def test_all_are_listed() -> None:
    assert set(frameworks()) == {f.stem for f in FILES}
