"""`python -m presage.calibrate`, until the next release: use `python -m presage_fit.calibrate`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("presage_fit.calibrate", run_name="__main__", alter_sys=True)
