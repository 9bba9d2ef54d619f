"""Job files: what is in them, what follows where it is left out, and what is said to mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.configs.check import OPTIMIZERS
from presage.configs.frameworks import HOSTS
from presage.configs.job import PRECISIONS, Job, Recompute
from presage.configs.job_file import job_from_sections, read_job_file, read_transformer_job
from presage.configs.models import preset
from presage.configs.schema import SECTIONS
from presage.embeddings.dlrm_job import DlrmJob, read_any_job
from presage.errors import InputError, PresageError
from presage.parallel.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "jobs").glob("[!g]*.toml"))
LEAST = """
[model]
preset = "llama3-8b"
[training]
sequence = 8192
[cluster]
platform = "dgx-h100"
"""


def read(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return read_transformer_job(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=[p.stem for p in EXAMPLES])
def test_the_examples_are_jobs(path: Path) -> None:
    assert read_transformer_job(path).tokens > 0


def test_a_large_job_is_what_its_file_says() -> None:
    job = read_transformer_job(ROOT / "examples" / "jobs" / "llama3.1-405b.toml")
    assert (job.dp, job.microbatches, job.platform.key) == (128, 16, "dgx-h100")
    assert job.parallel.sequence_parallel and job.parallel.schedule == "interleaved" and job.overlap.tensor
    assert [len(set(s)) for s in job.stage_layers()] == [2] + [1] * 6 + [2]  # the ends have a chunk with a layer less
    assert job.framework.key == "nemo" and job.framework.attention == "flash3"


def test_defaults_where_little_is_said(tmp_path: Path) -> None:
    job = read(tmp_path, LEAST)
    assert (job.gpus, job.dp, job.global_batch, job.precision, job.optimizer) == (1, 1, 1, "bf16", "adam")
    assert job.name == "job" and job.recompute == Recompute() and job.model == preset("llama3-8b")


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ('"full"', Recompute("full")),
        ('"every-4"', Recompute("full", share=0.25)),
        ('"selective"', Recompute("selective")),
        ('"selective:mlp+moe_act"', Recompute("selective", ("mlp", "moe_act"))),
        ('{mode = "selective", modules = ["op"], share = 0.5}', Recompute("selective", ("op",), 0.5)),
    ],
)
def test_recomputation_in_words(tmp_path: Path, words: str, made: Recompute) -> None:
    assert read(tmp_path, LEAST.replace("= 8192", f"= 8192\nrecompute = {words}")).recompute == made


def test_replicas_and_groups_are_told_in_either_way(tmp_path: Path) -> None:
    base = LEAST + "[parallel]\nfsdp = true\n"
    assert read(tmp_path, base + "gpus = 64\nreplicate = 8").parallel.shard == 8
    assert read(tmp_path, base + "dp = 64\nshard = 16\nreplicate = 4").gpus == 64
    for wrong, says in (
        ("gpus = 64\nreplicate = 7", "dp x cp = shard x replicate: 64 is not 9 x 7"),
        ("gpus = 64\nshard = 8\nreplicate = 4", "dp x cp = shard x replicate: 64 is not 8 x 4"),
        ("gpus = 64\ndp = 32", "gpus = tp x pp x cp x dp: 64 is not 1 x 1 x 1 x 32 = 32"),
    ):
        with pytest.raises(InputError, match=says):
            read(tmp_path, base + wrong)


def test_samples_are_told_in_either_way(tmp_path: Path) -> None:
    counted = LEAST.replace("= 8192", "= 8192\nmicro_batch = 2\nmicrobatches = 3") + "[parallel]\ngpus = 4"
    assert read(tmp_path, counted).global_batch == 24
    with pytest.raises(InputError, match="25 is not 2 x 4 x 3 = 24"):
        read(tmp_path, counted.replace("microbatches", "global_batch = 25\nmicrobatches"))


def test_sequence_parallelism_goes_with_the_framework(tmp_path: Path) -> None:
    base = LEAST + "[parallel]\ngpus = 8\ntp = 8\n"
    assert read(tmp_path, base).parallel.sequence_parallel
    assert not read(tmp_path, 'framework = "megatron-2021"\n' + base).parallel.sequence_parallel
    assert not read(tmp_path, base + "sequence_parallel = false").parallel.sequence_parallel


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    own = LEAST.replace('platform = "dgx-h100"', 'gpu = "a100_80gb"\nper_node = 4\nnetwork_Gbps = 400\nfabric = "roce"')
    where = read(tmp_path, own).platform
    assert where.gpu.key == "a100_80gb" and where.domain == 4
    assert where.links[-1].bandwidth == pytest.approx(400e9 / 8 / 4)
    with pytest.raises(InputError, match="not both"):
        read(tmp_path, LEAST + 'gpu = "h100_sxm"')


def test_switches_of_a_framework(tmp_path: Path) -> None:
    own = read(
        tmp_path,
        LEAST + '[framework]\nname = "torchtitan"\nreduce_bytes = 2\nbucket_MB = 25\n[overlap]\ngradients = false',
    )
    assert own.framework.key == "torchtitan" and own.framework.reduce_bytes == 2
    assert own.framework.bucket_bytes == 25e6 and not own.overlap.gradients and own.overlap.parameters


def test_overrides_go_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(LEAST)
    job = read_transformer_job(path, {"parallel": {"gpus": 16, "tp": 2}, "training": {"precision": "fp8"}})
    assert (job.gpus, job.dp, job.precision, job.sequence) == (16, 8, "fp8", 8192)
    loose = read_transformer_job(path, {"parallel": {"gpus": 15, "tp": 2}}, checked=False)
    assert loose.gpus == 15


def test_a_job_from_tables() -> None:
    table = {"model": {"preset": "gpt2"}, "training": {"sequence": 1024}, "cluster": {"platform": "dgx-a100"}}
    assert job_from_sections(table)[0].model.name == "gpt2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LEAST.replace("[training]", "[trainin]"), "trainin: is unknown: did you mean 'training'?"),
        (LEAST.replace("sequence", "seqence"), "training.seqence: is unknown: did you mean 'sequence'?"),
        (LEAST + "[parallel]\nmicro_batch = 2", "parallel.micro_batch: is unknown: it belongs in [training]"),
        (LEAST + "[parallel]\nxyz = 2", "parallel.xyz: is unknown: choose from gpus, tp, sequence_parallel"),
        (LEAST + "[model.experts]\ntopk = 2", "model.experts.topk: is unknown: did you mean 'top_k'?"),
        (LEAST + "[model.experts]\ntop_k = 2", "experts"),
        (LEAST.replace("8192", '"8k"'), "training.sequence: is '8k': it should be a whole number"),
        (LEAST.replace("llama3-8b", "llama3-9b"), "no model 'llama3-9b': did you mean llama3-8b"),
        (LEAST.replace("dgx-h100", "dgx-h101"), "no platform 'dgx-h101'"),
        (LEAST.replace("sequence = 8192", ""), "training.sequence: is missing"),
        (LEAST.replace('platform = "dgx-h100"', ""), "cluster: say what it runs on"),
        (LEAST.replace('preset = "llama3-8b"', "layers = 3"), "model.hidden: is missing"),
        (
            LEAST.replace("llama3-8b", 'llama3-8b"\nactivation = "swish'),
            "model.activation: is 'swish': choose from swiglu",
        ),
        ('framework = "tensorflow"\n' + LEAST, "unknown framework 'tensorflow'"),
        (LEAST.replace("= 8192", '= 8192\nrecompute = "every-other"'), "training.recompute: is 'every-other'"),
        (LEAST.replace("= 8192", '= 8192\nrecompute = "half"'), "recompute is 'half'"),
        (LEAST + "[parallel]\ngpus = 100\ntp = 8\npp = 4", "100 is no multiple of 8 x 4 x 1 = 32; try 96 or 128"),
        (LEAST + "[parallel]\ngpus = 12\npp = 3", "32 is no multiple of 3 x 1 = 3; give layers_as = [11, 11, 10]"),
        (LEAST + "[parallel]\ngpus = 17\npp = 17", "or ends_as_layers = true (32 + 2 is one)"),
        ('arguments = "train.sh"\n' + LEAST, "train.sh: cannot be read"),
        ('titan = "a.toml"\narguments = "b.sh"\n' + LEAST, "give arguments or titan, not both"),
        ("model = 3", "model: is 3: it should be a table"),
        ("[model", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        read(tmp_path, text)


VALUE = st.sampled_from([-1, 0, 1, 3, 8, 10**9, 0.5, True, "", "x", [1], {}, {"a": 1}])
KEYS = [
    ("name",),
    ("framework",),
    *((*s.split("."), k) for s, kind in SECTIONS.items() for k in kind.__struct_fields__),
]


@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUE), min_size=1, max_size=3))
def test_no_value_is_answered_with_a_traceback(changes: list[tuple[tuple[str, ...], object]]) -> None:
    table: dict[str, object] = {
        "model": {"preset": "mixtral-8x7b"}, "training": {"sequence": 4096}, "cluster": {"platform": "dgx-h100"}
    }  # fmt: skip
    for key, value in changes:
        here = table
        for part in key[:-1]:
            inner = here.get(part)
            here[part] = here = dict(inner) if isinstance(inner, dict) else {}
        here[key[-1]] = value
    try:
        job = job_from_sections(table)[0]
    except PresageError:
        return
    assert isinstance(job, Job)


def test_any_kind_of_job_is_read() -> None:
    assert isinstance(read_any_job(ROOT / "examples" / "dlrm" / "criteo.toml"), DlrmJob)
    assert isinstance(read_any_job(EXAMPLES[0]), Job)


def test_notes_come_with_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(LEAST + "[parallel]\ngpus = 16\ntp = 16")
    assert any("beyond the 8 GPUs of a node" in n for n in read_job_file(path).notes)


def test_every_key_is_in_the_documentation() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("jobs.md", "post_training.md"))
    keys = [(s, k) for s, kind in SECTIONS.items() for k in kind.__struct_fields__]
    missing = [f"{s}.{k}" for s, k in keys if f"`{k}`" not in page and f"[{s}.{k}]" not in page]
    assert missing == []
    assert [name for name in (*OPTIMIZERS, *PRECISIONS, *SCHEDULES, *HOSTS) if f"`{name}`" not in page] == []
