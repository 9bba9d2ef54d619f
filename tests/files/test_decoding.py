"""Records from plain values, in threads."""

from __future__ import annotations

import subprocess
import sys

TOGETHER = """
import sys, threading
sys.setswitchinterval(1e-5)
from presage.configs.schema import JobConfig
from presage.files.decoding import convert_record
barrier, made = threading.Barrier(24), []

def convert():
    barrier.wait()
    made.append(convert_record({"model": {"hidden": 64, "experts": {"experts": 8, "top_k": 2}}}, JobConfig))

threads = [threading.Thread(target=convert) for _ in range(24)]
for t in threads: t.start()
for t in threads: t.join()
print(len(made), {m.model.experts.top_k for m in made})
"""


def test_threads_that_first_convert_to_a_type_at_once_all_get_it() -> None:
    for _ in range(3):  # without a lock about seven in ten crash
        done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, timeout=60)
        assert done.stdout == "24 {2}\n", (done.returncode, done.stderr)
