"""Fit data/post_training.toml on the `seen` rows of docs/published_rl.csv: `PYTHONPATH=src python tools/fit_rl.py`.

Host time of an iteration from rollouts on one rank, what several ranks add from those on four, the trainer's pace from
training and log-probabilities of the 8B runs. The 70B trainer is left out: the source is a report that its published
times could not be repeated. Prints the three figures; put them into the file.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from presage.prediction.post_training.software import software_costs
from presage_validation.post_training import LOG_PROBS, predict_row

TABLE = Path(__file__).resolve().parent.parent / "docs" / "published_rl.csv"


def main() -> None:
    late: dict[bool, list[float]] = {False: [], True: []}
    paces = []
    with TABLE.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["use"] == "seen"]
    for row in rows:
        p = predict_row(row, TABLE)
        missing = float(row["rollout_s"]) - p.breakdown["rollout"]
        iterations = sum(r.iterations for r in p.rollouts) / len(p.rollouts)
        late[p.rl.engine.tp > 1].append(missing / iterations * 1e3)
        if row["training_s"] and row["model"] == "llama3-8b":
            paces += [float(row["training_s"]) / p.breakdown["training"]]
            paces += [float(row["log_probs_s"]) / sum(p.breakdown[name] for name in LOG_PROBS)]
    now = software_costs()
    alone, several = (sum(x) / len(x) for x in (late[False], late[True]))
    print(f"base = {now.iteration * 1e3 + alone:.2f}")
    print(f"parallel = {now.ranks * 1e3 + several - alone:.2f}")
    print(f"pace = {now.trainer * math.exp(sum(map(math.log, paces)) / len(paces)):.3f}")


if __name__ == "__main__":
    main()
