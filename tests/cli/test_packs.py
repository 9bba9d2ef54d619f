"""`--pack`: with several ranks, in whatif, and packs and hosts that are damaged, of another version or another GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.app import app
from presage.costs.kernel_files import VERSION, write_arrays
from presage.costs.learned_files import LEARNED, pack_gpu
from presage.errors import PresageError
from presage.files.arrays import read_npz
from presage.files.reading import DATA
from presage_fit.learn import learn_pack

pytest.importorskip("torch", reason="capturing needs torch: pip install 'presage[torch]'")

ROOT = Path(__file__).parents[2]
TRACE = DATA / "dlrm_mlperf_b2048.json.gz"
STEP = f"{ROOT}/examples/gpt.py:build --arg layers=1 --arg batch=2 --draws 2"
pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learned from an H200's trace over the models of an H100."""
    return learn_pack([TRACE], tmp_path_factory.mktemp("packs") / "pack", like="h100_sxm").out


def answer(words: str) -> dict[str, object]:
    found = CliRunner().invoke(app, [*words.split(), "--json", "-"])
    assert found.exit_code == 0, found.exception
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def refused(words: str) -> str:
    """The error of a command, which is one sentence."""
    found = CliRunner().invoke(app, words.split())
    assert isinstance(found.exception, PresageError) and found.exception.exit_code == 2
    text = str(found.exception)
    assert "\n" not in text and len(text) < 300
    return text


OTHER_WAYS = "--gpu {0}", "--pack {0} --platform dgx-h200", "--pack {0} --gpu h200"


@pytest.mark.parametrize("way", ["--pack {0}", *(pytest.param(w, marks=pytest.mark.slow) for w in OTHER_WAYS)])
def test_ranks_get_the_kernels_of_a_pack(pack: Path, way: str) -> None:
    one, plain, with_pack = (
        answer(f"predict {STEP} {place}")
        for place in (f"--pack {pack}", "--ranks 8 --platform dgx-h200", f"--ranks 8 {way.format(pack)}")
    )
    assert any("kernels are corrected by 127 calls" in note for note in with_pack["notes"])  # type: ignore[attr-defined]
    assert with_pack["gpu"] == plain["gpu"] == "NVIDIA H200 SXM 141 GB"
    products = [x["breakdown"]["matrix multiply"]["ms"] for x in (one, plain, with_pack)]  # type: ignore[index]
    assert products[2] == pytest.approx(products[0], rel=0.01) and products[2] != pytest.approx(products[1], rel=0.01)


def test_whatif_with_a_pack(pack: Path) -> None:
    given = answer(f"whatif {STEP} --pack {pack} --apply cuda_graph")
    plain = answer(f"whatif {STEP} --apply cuda_graph")
    assert given["base"]["gpu_active_ms"] != plain["base"]["gpu_active_ms"]  # type: ignore[index]
    assert given["base"]["gpu_active_ms"] == answer(f"predict {STEP} --pack {pack}")["gpu_active_ms"]  # type: ignore[index]


def test_the_gpu_of_a_pack_is_its_own_and_not_the_one_it_is_like(pack: Path) -> None:
    assert pack_gpu(pack) == "h200"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu a100", "is of NVIDIA H200, not of NVIDIA A100 SXM 80 GB: leave NVIDIA A100 SXM 80 GB out, or give a"),
        ("--ranks 8 --platform dgx-h100", "is of NVIDIA H200, not of NVIDIA H100 SXM 80 GB"),
        ("--ranks 8 --gpu a100", "is of NVIDIA H200, not of NVIDIA A100 SXM 80 GB"),
    ],
)
def test_a_pack_of_another_gpu_is_refused(pack: Path, words: str, said: str) -> None:
    assert said in refused(f"predict {STEP} --pack {pack} {words}")


@pytest.mark.parametrize("command", ["predict", "predict --ranks 8", "whatif --apply cuda_graph"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("gone", "no such folder; a pack is the folder that presage calibrate --out wrote"),
        ("empty", "no header.json in it"),
        ("cut", "learned.npz"),
        ("text", "learned.npz"),
        ("version", f"version {VERSION + 1}, this presage reads {VERSION}"),
        ("base", "was learned over kernel models of another version of presage: learn it again"),
    ],
)
def test_a_damaged_pack_is_refused(pack: Path, tmp_path: Path, command: str, damage: str, said: str) -> None:
    folder = tmp_path / "pack"
    damaged(pack, folder, damage)
    name, _, options = command.partition(" ")
    assert said in refused(f"{name} {STEP} {options} --pack {folder}")


def damaged(pack: Path, folder: Path, damage: str) -> None:
    if damage == "gone":
        return
    folder.mkdir()
    if damage == "cut":
        (folder / LEARNED).write_bytes((pack / LEARNED).read_bytes()[:500])
    elif damage == "text":
        (folder / LEARNED).write_text("calls")
    elif damage in ("version", "base"):
        arrays = read_npz(pack / LEARNED)
        about = json.loads(arrays.pop("about").tobytes())
        write_arrays(
            folder / LEARNED, arrays, about | ({"version": VERSION + 1} if damage == "version" else {"base": ""})
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 1", "is no file of a host"),
        ("[[", "not valid TOML"),
        ("", "is no file of a host"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "predict --ranks 8", "whatif --apply cuda_graph"])
def test_a_damaged_host_is_refused(tmp_path: Path, command: str, text: str, said: str) -> None:
    path = tmp_path / "host.toml"
    path.write_text(text)
    name, _, options = command.partition(" ")
    assert said in refused(f"{name} {STEP} {options} --host {path}")
