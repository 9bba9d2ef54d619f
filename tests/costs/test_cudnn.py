"""cuDNN is asked for its engines without a GPU; without it, or where it fails, they are guessed, and that is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isnan, log
from pathlib import Path

import numpy as np
import pytest

from presage.costs import cudnn
from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call, Shape
from presage.costs.cudnn import engines, libraries, note, with_engines
from presage.costs.cudnn_child import strides
from presage.costs.families.conv import (
    AT_TOLD,
    ENGINE,
    FAMILY,
    FORWARD,
    OWN,
    SCALE,
    TILE_FEATURES,
    conv,
    tile_features,
)
from presage.costs.kernel_files import load
from presage.errors import PresageError
from presage.hardware import gpu
from presage_fit.kernel_models import SampleTable, fit_family

H200 = gpu("h200")
installed = pytest.mark.skipif(libraries() is None, reason="cuDNN is not installed: pip install 'presage[cudnn]'")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Another place to look for cuDNN, with nothing remembered."""
    libraries.cache_clear()
    monkeypatch.setattr(cudnn, "_KNOWN", {})
    yield monkeypatch
    libraries.cache_clear()


def forward(dtype: str, sizes: tuple[int, ...], weight: tuple[int, ...], tf32: bool = False, groups: int = 1) -> Call:
    def shape(n: tuple[int, ...]) -> Shape:
        return Shape(n, tuple(strides(n, False)), dtype)

    near = (1,) * (len(sizes) - 2)
    pad = tuple(k // 2 for k in weight[2:])
    return Call(FORWARD, (shape(sizes), shape(weight), pad, near, near, groups, False, False, tf32), tf32)


CALL = forward("bfloat16", (32, 256, 28, 28), (256, 256, 3, 3))


def test_layouts() -> None:
    assert strides((2, 3, 4, 5), False) == [60, 20, 5, 1]
    assert strides((2, 3, 4, 5), True) == [60, 1, 15, 3]


def test_what_is_told_is_the_last_features() -> None:
    law = FAMILY.law(CALL, SCALE)
    guessed = FAMILY.features(CALL, law)
    known = FAMILY.features(Call(CALL.name, CALL.inputs, CALL.tf32, {ENGINE: 62.0, "knob2": 5.0}), law)
    assert FAMILY.told == AT_TOLD
    assert guessed[AT_TOLD] == 0 and all(isnan(f) for f in guessed[AT_TOLD + 1 :])
    assert known[: AT_TOLD + 2] == [*guessed[:AT_TOLD], 1.0, 62.0] and known[AT_TOLD + 3] == 5.0


def test_the_tile_that_is_told_gives_waves_and_seconds() -> None:
    c = conv(CALL)  # a product of 32 x 28 x 28 = 25,088 rows, 256 columns and 9 x 256 to add up
    whole = FAMILY.law(CALL, SCALE).seconds
    wide, narrow = (tile_features(c, whole, {ENGINE: 62.0, "knob2": tile}) for tile in (0.0, 8.0))
    assert len(wide) == len(narrow) == TILE_FEATURES
    assert wide[0] == pytest.approx(log(128 * 128)) and wide[2] == pytest.approx(log(9 * 256 / 32))
    assert wide[4] == pytest.approx(log(196 * 2 / SCALE.sms)), "196 x 2 tiles of 128 x 128"
    assert narrow[4] == pytest.approx(log(392 * 8 / SCALE.sms)), "of 64 x 32"
    assert narrow[6] > wide[6] + 0.5, "small tiles load more often"
    halved = tile_features(c, whole, {ENGINE: 62.0, "knob2": 0.0, "knob17": 2.0})
    assert halved[2] == pytest.approx(wide[2] - log(2)) and halved[4] == pytest.approx(wide[4] + log(2))
    assert all(isnan(f) for f in tile_features(c, whole, {ENGINE: OWN})), "PyTorch's own kernels have none"
    assert not any(isnan(f) for f in tile_features(c, whole, {ENGINE: 25.0})), "a common one where none is told"


def test_nobody_is_asked_when_it_is_off(place: pytest.MonkeyPatch) -> None:
    place.setenv("PRESAGE_CUDNN", "off")
    assert libraries() is None
    assert engines([conv(CALL)], H200) == [None]
    assert with_engines([CALL], H200) == [CALL]
    said = note(0.5, H200)
    assert "PRESAGE_CUDNN=off" in said and "guessed" in said and "unset" in said
    place.setenv("PRESAGE_CUDNN", "/nowhere")
    libraries.cache_clear()
    assert "cuDNN is not there (PRESAGE_CUDNN=/nowhere)" in note(0.5, H200)
    place.setattr(cudnn, "find_spec", lambda _: None)
    place.delenv("PRESAGE_CUDNN")
    libraries.cache_clear()
    assert "not installed" in note(0.5, H200) and "presage[cudnn]" in note(0.5, H200)
    assert not note(0.01, H200), "where convolutions are nothing"
    (time,) = call_times(load("h200"), [CALL])
    assert 2e-5 < time.warm < 2e-4


def test_libraries_that_cannot_be_loaded_cost_nothing_but_accuracy(place: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("libcudnn.so.9", "libcublasLt.so.13"):
        (tmp_path / name).write_text("no library")
    place.setenv("PRESAGE_CUDNN", str(tmp_path))
    assert engines([conv(CALL)] * 2, H200) == [None, None]
    assert "plans nothing here" in note(0.5, H200)


def test_other_kinds_of_gpus_are_not_asked_for() -> None:
    assert engines([conv(CALL)], gpu("a100")) == [None]
    assert not note(0.5, gpu("a100"))


@installed
def test_cudnn_says_its_engine_without_a_gpu() -> None:
    halves, tf32, full = CALL, *(forward("float32", (32, 256, 28, 28), (256, 256, 3, 3), t) for t in (True, False))
    found = engines([conv(c) for c in (halves, tf32, full)], H200)
    assert [e and e.number for e in found] == [62, 67, 70], "without TF32 none on tensor cores"
    assert engines([conv(halves)], gpu("h100_sxm")) == found[:1], "with as many SMs"


@installed
def test_the_workspace_is_that_of_a_gpu() -> None:
    # from data/h200_pack/conv_library.jsonl.gz: what PyTorch's allocator was asked for, rounded up to 512 bytes
    call = forward("float32", (2, 64, 732, 732), (64, 64, 3, 3), True)
    (e,) = engines([conv(call)], H200)
    assert e is not None and abs(549453824 - e.workspace) < 0.002 * e.workspace


@installed
def test_a_call_is_told_with_its_engine() -> None:
    own = forward("bfloat16", (8, 64, 56, 56), (64, 1, 3, 3), groups=64)
    native = Call("aten::_conv_depthwise2d", (*own.inputs[:2], (3, 3), None, (1, 1), (1, 1), (1, 1)))
    other = Call("aten::mm", CALL.inputs[:1])
    a, b, c = with_engines([CALL, native, other], H200)
    assert a.facts[ENGINE] == 62 and a.inputs == CALL.inputs
    assert b.facts == {ENGINE: OWN}, "PyTorch's own depthwise kernels"
    assert c is other
    assert "was asked" in note(0.3, H200)


def test_models_of_an_earlier_presage_are_refused_in_a_sentence() -> None:
    models = load("h200")
    older = replace(models.trees["conv"], features=models.trees["conv"].features + 1)
    with pytest.raises(PresageError, match="of an earlier presage: remove the pack's"):
        call_times(replace(models, trees={**models.trees, "conv": older}), [CALL])


def test_trees_fitted_without_cudnn_serve_calls_of_which_it_tells() -> None:
    family, law = replace(FAMILY, rounds=3, uneven=False), FAMILY.law(CALL, SCALE)
    guessed = np.array([[*FAMILY.features(CALL, law), 0.0]], np.float32)
    known = np.array([[*FAMILY.features(replace(CALL, facts={ENGINE: 62.0}), law), 0.0]], np.float32)
    alone = SampleTable(np.repeat(guessed, 40, 0), np.full(40, 1.0), np.full(40, 3.0), np.arange(40))
    trees = fit_family(family, alone)
    assert trees.predict(known) == trees.predict(guessed) == pytest.approx(np.log(3.0), rel=0.01)
    both = SampleTable(
        np.concatenate([alone.x, np.repeat(known, 40, 0)]), np.ones(80), np.repeat([3.0, 5.0], 40), np.arange(80)
    )
    trees = fit_family(family, both)
    assert trees.predict(guessed) == pytest.approx(np.log(3.0), rel=0.01)
    assert trees.predict(known) == pytest.approx(np.log(5.0), rel=0.01)
