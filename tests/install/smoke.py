"""What an installed presage must do, with nothing but itself and what it needs: run by the Python it is installed in.

    python tests/install/smoke.py FOLDER [VERSION]

In FOLDER, which is empty, and not in a clone: so that only what is installed answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

OWN = "examples/jobs/own_model.toml"
PRESAGE = str(Path(sys.executable).with_name("presage"))


def main(folder: Path, version: str | None) -> None:
    os.chdir(folder)
    installed = Path(sysconfig.get_paths()["purelib"]) / "presage"
    assert (installed / "py.typed").is_file(), "py.typed is not in the package"
    assert version is None or said("--version").strip() == version
    assert "presage trace demo" in said("--help")
    said("examples", "examples")
    job = answer("job", OWN, "--draws", "20", "--json", "-")  # too few to compile anything for
    assert job["step_ms"]["p50"] > 100
    assert answer("trace", "demo", "--json", "-")
    assert "With the edits" in said("replay", "demo", "--scale", "kernel=.*:0.5")
    assert "H200" in said("gpus") and "DGX" in said("platforms")
    assert "pip install 'presage[torch]'" in refused("predict", "examples/gpt.py:build")
    assert "pip install 'presage[report]'" in refused("job", OWN, "--report", "out.html")
    assert "pip install 'presage[ui]'" in refused("ui", "--no-open")
    assert "pip install 'presage[ray]'" in refused(
        "plan", "examples/jobs/own_model.toml", "--gpus", "64", "--ray", "auto"
    )
    assert_python()
    print("smoke tests passed")


def assert_python() -> None:
    import presage as ps

    assert ps.predict_job(OWN).seconds > 0
    assert set(ps.__all__) <= set(dir(ps)) and all(getattr(ps, name) is not None for name in ps.__all__)
    assert ps.__version__


def answer(*args: str) -> object:
    return json.loads(said(*args))


def said(*args: str) -> str:
    done = subprocess.run([PRESAGE, *args], capture_output=True, text=True)
    assert done.returncode == 0, f"presage {' '.join(args)}: {done.stderr}"
    return done.stdout


def refused(*args: str) -> str:
    """What a command says that cannot do it: one sentence, exit code 2."""
    done = subprocess.run([PRESAGE, *args], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, f"presage {' '.join(args)}: {done.stderr}"
    return done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else None)
