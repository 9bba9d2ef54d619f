"""What MLPerf's step logs say, where presage keeps it: the systems behind `prior_steps`, the priors of `series`.

python docs/make_steps.py ../shared
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from presage.noise.logs import StepLog, read_logs
from presage.noise.prior_steps import DATA as SYSTEMS
from presage.noise.prior_steps import EVENTS, architecture_of, machine_of
from presage.noise.series import SeriesFit, fit, learn
from presage.noise.series.prior import SeriesPrior
from presage.noise.series.shipped import DATA as PRIORS
from presage.noise.series.shipped import MEANS, STEPS, prior_table

SOURCE = "mlcommons/training_results_v5.0, commit 0fdc28f01325, Apache-2.0"
HEAD = f"""# What the series model finds in each system that logged single steps, three runs each: docs/make_steps.py.
# Shares are of the step; jitter_seconds is the width of residuals; stalls are those that do not recur.
# Source: {SOURCE}; Llama 3.1 405B.
"""


def system_text(runs: Sequence[StepLog], found: SeriesFit) -> str:
    meta = runs[0].meta
    stalls = found.stalls.seconds
    values: dict[str, str | float] = {
        "name": str(meta["system"]),
        "machine": machine_of(str(meta["submitter"]), str(meta["system"])),
        "architecture": architecture_of(str(meta["accelerator"])),
        "nodes": int(meta["nodes"]),
        "step_seconds": round(found.level, 3),
        "jitter_seconds": round(float(np.exp(np.log(found.bulk.widths).mean())) * found.level, 4),
        "drift": round(found.belief().noise.common.drift, 4),
        "run_sd": round(float(np.std(found.shared.levels, ddof=1)), 5),
        "stalls": int(found.stalls.counts.sum()),
        "node_hours": round(sum(x.total for x in runs) / 3600 * meta["nodes"]),
        "stall_seconds": round(float(np.median(stalls)), 2) if len(stalls) else 0.0,
    }
    values |= {key: round(found.events[name].excess, 4) for name, key in EVENTS}
    return "\n[[system]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())


def written_priors(fits: Mapping[str, Sequence[SeriesFit]]) -> str:
    priors: dict[str, SeriesPrior] = {kind: learn(found) for kind, found in fits.items()}
    table = {kind: prior_table(p) for kind, p in priors.items()}
    return json.dumps({"source": SOURCE, **table}, separators=(",", ":")).replace('],"', '],\n"') + "\n"


def main() -> None:
    groups = list(read_logs([Path(sys.argv[1]) / "steps" / "mlperf_v5.0.json.gz"]).groups().values())
    fits = [fit(g, SeriesPrior()) for g in groups]
    single = [(g, f) for g, f in zip(groups, fits, strict=True) if g[0].single]
    SYSTEMS.write_text(HEAD + "".join(system_text(g, f) for g, f in single))
    means = [f for g, f in zip(groups, fits, strict=True) if not g[0].single]
    PRIORS.write_text(written_priors({STEPS: [f for _, f in single], MEANS: means}))


if __name__ == "__main__":
    main()
