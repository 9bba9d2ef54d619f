"""Frameworks are facts with sources."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from presage.configs import frameworks as home
from presage.configs.frameworks import Framework, framework, frameworks, overlap_of
from presage.configs.job_file import job_from_sections, read_transformer_job
from presage.errors import PresageError
from presage.hardware import gpu
from presage.search.job_toml import job_toml

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b"}, "training": {"sequence": 4096}, "parallel": {"gpus": 8},
    "cluster": {"platform": "dgx-h100"},
}  # fmt: skip
FILES = sorted((Path(home.__file__).parent / "frameworks").glob("*.toml"))
OF_ONE_CODE = {
    "logit_bytes",
    "extra_bytes",
    "update_bytes",
    "forward_us",
    "backward_us",
}  # counted in it, no fact of a framework


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_each_says_all_switches_and_where_they_are_from(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    made = framework(path.stem)
    assert made.key == path.stem and made.source and table["date"]
    said = {"bucket_bytes" if k == "bucket_MB" else k for k in table}
    left = set(Framework.__dataclass_fields__) - said - {"key", "overlap"} - OF_ONE_CODE
    assert left == set(), f"left to a default: {left}"


def test_every_switch_can_be_said_in_a_job_file(tmp_path: Path) -> None:
    """And written out: each with another value than its own, it comes back from the file of the job."""
    usual = framework("megatron-core")
    kept = {"key", "name", "source", "overlap"}
    names = [name for name in Framework.__dataclass_fields__ if name not in kept]
    others = {name: other(name, getattr(usual, name)) for name in names}
    table = {name: value for name, value in others.items() if name != "bucket_bytes"} | {"bucket_MB": 123}
    job = job_from_sections({**JOB, "framework": {"name": "megatron-core", **table}})[0]
    assert {name: getattr(job.framework, name) for name in names} == others
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job, JOB["cluster"]))
    assert read_transformer_job(path).framework == job.framework


def other(name: str, value: object) -> object:
    """Another value of a switch."""
    if isinstance(value, bool):
        return not value
    words = {"attention": "unfused", "host": "torch", "dispatcher": "deepep", "graphs": ("attn",)}
    return {**words, "bucket_bytes": 123e6}.get(name, 1)


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
        ("megatron", {}, "unknown framework 'megatron': .* did you mean 'megatron-core'"),
        ("nemo", {"atention": 1}, "no switch 'atention': did you mean 'attention'"),
        ("nemo", {"attention": "flash9"}, "attention: is 'flash9': choose from unfused"),
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
    with pytest.raises(PresageError, match=r"own\.toml: compield: is unknown: did you mean 'compiled'"):
        framework(str(own))


def test_all_are_listed() -> None:
    assert set(frameworks()) == {f.stem for f in FILES}
