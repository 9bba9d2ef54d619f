import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured data, or a skip that says how to get the test to run."""
    path = Path(os.environ.get("PRESAGE_DATA", ROOT.parent / "shared"))
    if not (path / "traces").is_dir():
        pytest.skip(f"no measured data at {path}: set PRESAGE_DATA to the folder that holds traces/ and h200/")
    return path
