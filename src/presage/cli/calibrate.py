"""`presage calibrate`: measure this machine's GPU. Its options are those of `python -m presage.calibrate`."""

from __future__ import annotations

import typer

from presage.cli.options import current_output

__all__ = ["command"]

LESSON = """\
Measures this machine's GPU into a pack, a folder of raw measurements that predictions on such a GPU are made from.

What it measures, on random data, with warm-up, medians and spreads:
  kernels   every family of ops (matrix multiply, convolution, attention, ...) over shapes drawn by a seed, with what
            they read in the cache and not
  host      what an op costs the host, with and without the profiler; launch and synchronisation latencies
  copies    bandwidths within the device and to and from the host
  power     clocks under sustained load

How long: about 20 minutes for a full sweep of an H200. It stops when --minutes are over; the same command goes on where
it stopped, so a short lease can be used in pieces. What is in the folder is kept.

What is needed: Python, torch and numpy, and nobody else on the GPU. On a bare machine, copy the presage folder there
and run `python -m presage.calibrate` with the same options.

What then: `presage pack PACK` says what is in it; `presage pack A B --merge-into C` makes one of several, compressed.
"""


def command(context: typer.Context) -> None:
    """Measure this machine's GPU into a pack (needs torch and a GPU)."""
    from presage.calibrate.__main__ import main

    argv = [*context.args, *(["--quiet"] if current_output().quiet else [])]
    if "-h" in argv or "--help" in argv:
        typer.echo(LESSON)
        argv = ["--help"]
    main(argv)
