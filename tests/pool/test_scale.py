"""Pools: processes and a real Ray cluster of this machine answer as one process does, to the byte, whatever dies."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from commands import runner
from presage.cli.job import command as job
from presage.cli.plan import command as plan
from presage.cli.run import command as run
from presage.errors import InputError, PresageError
from presage.pool import SERIAL, THREADS_2, Pool, open_pool, processes, ray_cluster
from presage.runs.simulate import CHUNK
from presage_validation.command import command as accuracy

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all of them
BIN = Path(sys.executable).parent
JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
COMMANDS: dict[str, Callable[..., None]] = {"plan": plan, "job": job, "run": run, "accuracy": accuracy}
KEPT = "cp=1,virtual=1,recompute=none,tp=4,tp=8,pp=1,ep=1,sharding=zero1,micro_batch=1"
ASKED: dict[str, tuple[str | Path, ...]] = {
    "plan": (JOBS / "own_model.toml", "--gpus", "64", "--keep", KEPT, "--objective", "p95"),
    "job": (JOBS / "torchtitan.toml", "--draws", "1000", "--seed", "3"),
    "run": (JOBS / "torchtitan.toml", "--steps", "20000", "--draws", str(CHUNK + 1000), "--rate", "4"),
}


def told(name: str, *args: str | Path) -> str:
    """The JSON of what is asked, without how long it took."""
    text = runner(COMMANDS[name])(*ASKED[name], *args, "--json", "-")
    return "\n".join(line for line in text.splitlines() if '"search_seconds"' not in line)


@pytest.fixture(scope="module", autouse=True)
def series(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An accuracy sweep of our own: ten series, and two that cannot be scored."""
    rng = np.random.default_rng(0)
    values = [{"name": f"kernel {i}", "ms": rng.lognormal(0, 0.02, 400).tolist()} for i in range(10)]
    path = tmp_path_factory.mktemp("scale") / "series.json"
    path.write_text(
        json.dumps({"series": [*values[:4], {"name": "short", "ms": [1.0]}, *values[4:], {"name": "none"}]})
    )
    ASKED["accuracy"] = ("temporal", path)


@pytest.fixture(scope="module")
def serial() -> Callable[[str], str]:
    """What one process says; asked once."""
    known: dict[str, str] = {}

    def said(name: str) -> str:
        known.setdefault(name, "")
        known[name] = known[name] or told(name)
        return known[name]

    return said


def children(of: int, all_of_them: bool = False) -> list[int]:
    """Processes that this one started; with those that they did."""
    parents = {
        int(p.name): said_of(p.name, "stat").rpartition(b")")[2].split()[1:2] for p in Path("/proc").glob("[0-9]*")
    }
    found, new = list[int](), [of]
    while new:
        new = [pid for pid, parent in parents.items() if parent and int(parent[0]) in new]
        found += new
        if not all_of_them:
            break
    return found


def said_of(pid: int | str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it is over
        return b""


# ---- processes


def squared(item: int) -> int:
    return item * item


def dies_once(folder: Path, item: int) -> int:
    """Kills the process it runs in when it first gets some of the items."""
    mark = folder / str(item)
    if item % 7 == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def dies(_: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fails(_: int) -> int:
    raise InputError("plans.csv", "this plan cannot be priced", "tp")


TRIED = ["plan", "run", *(pytest.param(name, marks=pytest.mark.slow) for name in ("job", "accuracy"))]


@pytest.mark.parametrize("name", TRIED)
def test_processes_say_what_one_says(name: str, serial: Callable[[str], str]) -> None:
    assert told(name, "--workers", "2") == serial(name)


@pytest.mark.parametrize("fresh", [False, True])
def test_results_come_in_the_order_of_items(fresh: bool) -> None:
    with processes(2, fresh) as pool:
        assert list(pool.map(squared, range(30))) == [i * i for i in range(30)]
        assert [*zip(range(3), pool.map(squared, range(30)), strict=False)] == [(0, 0), (1, 1), (2, 4)]
        assert list(pool.map(squared, [9])) == [81]  # nothing is left of what nobody asked for


def test_a_process_that_is_killed_loses_no_work(tmp_path: Path) -> None:
    with processes(2) as pool:
        assert list(pool.map(partial(dies_once, tmp_path), range(20))) == [i * i for i in range(20)]
    assert len(list(tmp_path.iterdir())) == 3  # they did die


def test_a_process_that_is_always_killed_is_told_of() -> None:
    with processes(2) as pool, pytest.raises(PresageError, match="6 times a worker process was killed"):
        list(pool.map(dies, [1]))


def test_errors_of_processes_are_the_errors_they_are_here() -> None:
    with processes(2) as pool, pytest.raises(InputError, match="tp: this plan cannot be priced"):
        list(pool.map(fails, [1]))


def test_nothing_runs_on_when_somebody_stops() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(KeyboardInterrupt), processes(2) as pool:
        next(pool.map(squared, range(100)))
        raise KeyboardInterrupt
    assert set(children(os.getpid())) <= before


def test_the_pool_asked_for_is_opened() -> None:
    with open_pool() as one, open_pool(here=THREADS_2) as two:
        assert one is SERIAL and two is THREADS_2
    with pytest.raises(PresageError, match="say one of them"), open_pool(2, "auto"):
        pass
    with pytest.raises(PresageError, match="accuracy dlrm cannot be spread over processes"):
        runner(accuracy)("dlrm", JOBS, "--workers", "2")


# ---- Ray

pytest.importorskip("ray", reason="Ray is not installed: pip install 'presage[ray]'")
import ray  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


class Killer:
    """Kills the first worker of the cluster that is seen at work, at once."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.over = Event()
        self.thread = Thread(target=self._look)

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.005):
            for pid in at_work(os.getpid()):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)
                return


def at_work(under: int) -> list[int]:
    """Workers that do a piece of work now: Ray writes its name in the process's."""
    return [pid for pid in children(under, all_of_them=True) if b"ray::call_pickled_in" in said_of(pid, "cmdline")]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", TRIED)
def test_a_cluster_says_what_one_process_says_though_a_worker_is_killed(
    name: str, serial: Callable[[str], str]
) -> None:
    with Killer() as killer:
        there = told(name, "--ray", "auto")
    assert there == serial(name)
    assert killer.killed


@pytest.mark.usefixtures("cluster")
def test_errors_of_the_cluster_are_the_errors_they_are_here() -> None:
    with ray_cluster("auto") as pool, pytest.raises(InputError, match="cannot be priced"):
        list(pool.map(fails, [1]))
    assert ray.is_initialized()  # a cluster that was there before stays


@pytest.mark.usefixtures("cluster")
def test_what_is_always_killed_is_lost_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.pool.raycluster.RETRIES", 1)
    with ray_cluster("auto") as pool, pytest.raises(PresageError, match="lost a part of the work for good"):
        list(pool.map(dies, [1]))


@pytest.mark.usefixtures("cluster")
def test_files_are_found_from_where_the_command_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.txt").write_text("7")
    with ray_cluster("auto") as pool:
        assert list(pool.map(Path.read_text, [Path("here.txt")])) == ["7"]


@pytest.mark.usefixtures("cluster")
def test_who_stops_asking_leaves_the_rest_undone(tmp_path: Path) -> None:
    def slow(item: int) -> int:
        (tmp_path / str(item)).touch()
        time.sleep(0.2)
        return item

    def first(pool: Pool) -> int:
        return next(pool.map(slow, range(1000)))

    with ray_cluster("auto") as pool:
        assert first(pool) == 0
    assert len(list(tmp_path.iterdir())) <= 8


def test_no_cluster_is_told() -> None:
    if ray.is_initialized():
        ray.shutdown()
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(PresageError, match=f"no Ray cluster at '{address}'"), ray_cluster(address):
            pass


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A cluster by itself, with a token of its own: where it is, and the process that all of it hangs on."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tempfile.mkdtemp()  # a short name, as sockets need
    port = address.rpartition(":")[2]
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus", "1", "--port", port, "--temp-dir", folder,
               "--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield address, process.pid
    gone(process.pid)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def gone(head: int) -> None:
    """All of a cluster at once, as when its machine is switched off."""
    for pid in [head, *children(head, all_of_them=True)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


@pytest.mark.slow
def test_a_cluster_that_goes_away_ends_the_work_soon_with_one_sentence(head: tuple[str, int]) -> None:
    address, pid = head
    wait_for(lambda: listens(address))
    asked = [BIN / "presage", "run", *ASKED["run"][:3], "--draws", "1000000", "--ray", address]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: at_work(pid))
        gone(pid)
        begun = time.monotonic()
        out, err = process.communicate(timeout=40)
    assert process.returncode == 2 and time.monotonic() - begun < 30
    assert not out and "Traceback" not in err
    assert (
        err.splitlines()[-1] == f"presage: the Ray cluster at '{address}' went away; start it anew, or leave --ray out"
    )
