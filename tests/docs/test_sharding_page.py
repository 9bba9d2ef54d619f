"""The table of recommendation runs in docs/sharding.md is what the command gives."""

from __future__ import annotations

import sys
from pathlib import Path

from presage_validation.dlrm import score_dlrm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from make_sharding import PAGE, shown, table  # noqa: E402


def test_the_table_is_that_of_the_command(shared: Path) -> None:
    rows = score_dlrm(shared / "runs" / "public_runs.csv").rows
    assert shown(PAGE.read_text()) == table(rows), "run docs/make_sharding.py"
