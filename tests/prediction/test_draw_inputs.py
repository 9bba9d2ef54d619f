"""Work that depends on the data goes through the cost model."""

from dataclasses import replace

import numpy as np
import pytest

from presage.configs.lengths import read_lengths
from presage.errors import InputError, PresageError
from presage.prediction.draws.data_dependence import experts_load, lengths_load, microbatch_load
from presage.prediction.jobs.job_prediction import predict_job
from presage.prediction.jobs.job_step import job_step

DENSE, EXPERTS = "examples/jobs/llama3.1-405b.toml", "examples/jobs/deepseek-v3.toml"
RNG = np.random.default_rng


def test_full_documents_are_the_job_as_written() -> None:
    job = predict_job(DENSE).job
    for packed in (True, False):
        assert np.allclose(lengths_load(job, np.array([float(job.sequence)]), packed, RNG(0)), 1.0)


def test_packed_short_documents_save_attention_only() -> None:
    found = predict_job(DENSE)
    load = lengths_load(found.job, np.array([1.0]), True, RNG(0))
    rest = 1 - found.breakdown["attention"] / (found.breakdown["attention"] + found.breakdown["products"])
    assert 0.9 * rest < load[0] < 1.0


def test_half_as_long_documents_take_what_the_cost_model_says() -> None:
    job = predict_job(DENSE).job
    half = job_step(replace(job, sequence=job.sequence // 2))
    whole = job_step(job)
    ratio = (half.forward + half.backward).sum(axis=1).max() / (whole.forward + whole.backward).sum(axis=1).max()
    assert np.allclose(lengths_load(job, np.array([job.sequence / 2]), False, RNG(0)), ratio)


def test_padded_lengths_spread_more_than_packed_ones() -> None:
    job = predict_job(DENSE).job
    lengths = RNG(1).lognormal(7.0, 1.0, 2_000)
    assert lengths_load(job, lengths, False, RNG(0)).std() > 5 * lengths_load(job, lengths, True, RNG(0)).std()


def test_popular_experts_cost_more_the_more_popular_they_are() -> None:
    job = predict_job(EXPERTS).job
    means = [experts_load(job, skew, RNG(0)).mean() for skew in (0.0, 0.3, 1.0)]
    assert 1.0 < means[0] < means[1] < means[2] < 4.0


def test_experts_of_a_dense_model_are_refused() -> None:
    with pytest.raises(PresageError, match="no experts"):
        microbatch_load(predict_job(DENSE).job, None, True, 0.3)


@pytest.mark.parametrize("text", ["", "length\n", "a,b\n1,2\n", "1\n-3\n", "1\nnan\n", "1\ntwo\n"])
def test_bad_lengths_are_told(tmp_path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"lengths\.csv"):
        read_lengths(path)


def test_lengths_are_read_from_lines_or_a_column(tmp_path) -> None:
    (tmp_path / "a").write_text("5\n7\n")
    (tmp_path / "b").write_text("name,length\nx,5\ny,7\n")
    assert read_lengths(tmp_path / "a").tolist() == read_lengths(tmp_path / "b").tolist() == [5, 7]
