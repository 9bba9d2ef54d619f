"""Tests capture on the oldest and the newest supported torch: `python tools/torch_versions.py [VERSION...]`.

Each version gets a virtual environment of its own, one at a time (torch is large). There the capture tests run and a
few steps are captured; the captured kernels are then compared with those of the first version, and differences listed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "torch"
ENDS = ("2.10.0", "2.15.0")
STEPS = ("examples/gpt.py:build",)
CASES = ("lstm_2l", "gqa_amp", "gqa_fp16_scaler", "unet_amp_cl", "two_tower_sparse", "routed", "conv3d")
CAPTURE = """
import sys
from pathlib import Path
from presage.capture import capture, load, load_cases
from presage.graph.save import write

folder, steps, cases = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
folder.mkdir(parents=True, exist_ok=True)
known = load_cases("workloads/varied.py")
for name, step in {**{s.rpartition("/")[2]: load(s) for s in steps}, **{c: known[c] for c in cases}}.items():
    write(capture(step, source=name), folder / f"{name.replace(':', '_')}.presage")
"""


def _run(version: str) -> int:
    """Install, test and capture with one version; returns the tests' exit status."""
    home = OUT / f"venv-{version}"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, f"torch=={version}", "transformers==5.17.0", "pytest", "hypothesis", "-e", "."], check=True)
    tests = subprocess.run([python, "-m", "pytest", "-q", "tests/capture"], cwd=ROOT, check=False).returncode
    captured = [python, "-c", CAPTURE, OUT / version, ",".join(STEPS), ",".join(CASES)]
    subprocess.run(captured, cwd=ROOT, check=True)
    shutil.rmtree(home)
    return tests


def _compare(first: str, other: str) -> None:
    """Print the kernels that one version captures and the other does not."""
    from presage.graph.diff import diff, lines
    from presage.graph.save import read

    for path in sorted((OUT / first).glob("*.presage")):
        a, b = read(path), read(OUT / other / path.name)
        same = [o.name for o in a.ops if o.kernels] == [o.name for o in b.ops if o.kernels]
        print(f"{path.stem}: kernels of torch {first} and {other} {'equal' if same else 'differ'}")
        for line in [] if same else lines(diff(a, b), 8):
            print(f"    {line}")


def main() -> int:
    versions = sys.argv[1:] or list(ENDS)
    failed = {v: _run(v) for v in versions}
    for other in versions[1:]:
        _compare(versions[0], other)
    for version, status in failed.items():
        print(f"torch {version}: capture tests {'failed' if status else 'passed'}")
    return int(any(failed.values()))


if __name__ == "__main__":
    sys.exit(main())
