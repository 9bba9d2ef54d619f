"""Which host a prediction is for: a known one, a measured one, that of a trace or of a pack, or none that is known.

NAME             a host that ships with presage (`presage hosts`)
FILE.toml        calls measured by `presage calibrate --host`, overheads of `presage trace --overheads`, or a host
                 model of tools/fit_host.py
PACK, host.json  the host's part of a calibration pack
unknown          the reference, with how much hosts differ in the interval
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from presage.costs.host_factors import (
    PACK_FILE,
    REFERENCE,
    SAME,
    MeasuredFactors,
    factors_of_host,
    host_spread,
    pack_host,
)
from presage.costs.host_model import HostModel, is_host_model, model_of
from presage.errors import InputError
from presage.hardware.facts import load_toml
from presage.hardware.host import Host, host, host_of
from presage.traces.overhead_factors import is_overheads, overheads_of, traced_factors

UNKNOWN = "unknown"
ASSUMED = "--host FILE or NAME for yours (see `presage hosts`)"


def assumed_host(usual: HostModel) -> HostModel:
    """The host of a prediction for which none was given: the reference, which the user's own may differ from as much as
    hosts do."""
    note = f"host unknown: taken as {host(REFERENCE).name}; {ASSUMED}"
    return replace(usual.on_host(SAME, host_spread().unknown_sd, REFERENCE, note), assumed=True)


def chosen_host(name: str, usual: HostModel) -> HostModel:
    """The model of the host that a user names."""
    path = Path(name)
    if name == UNKNOWN:
        return assumed_host(usual)
    if path.name == PACK_FILE or path.is_dir():
        return of_pack(path.parent if path.name == PACK_FILE else path, usual)
    if not name.endswith(".toml"):
        return _of_host(host(name), name, usual)
    return _of_file(path, usual)


def _of_file(path: Path, usual: HostModel) -> HostModel:
    """The host of a TOML file, whichever of the three kinds it is."""
    table = load_toml(path)
    if is_host_model(table):
        found = model_of(path, table)
        return replace(found, name=str(path), note=f"host: the model of {path}, fitted to {found.fitted.traces} traces")
    if is_overheads(table):
        found_overheads = overheads_of(path, table)
        count = len(found_overheads.traces)
        return _scaled(usual, traced_factors(path, found_overheads), str(path), f"{count} trace{'s' * (count != 1)}")
    return _of_host(host_of(path, table), str(path), usual)


def _of_host(found: Host, name: str, usual: HostModel) -> HostModel:
    if found.key == REFERENCE:
        return replace(usual, name=REFERENCE, note=f"host: {found.name}")
    measured = factors_of_host(found, name)
    return _scaled(usual, measured, name, f"{found.name}, {measured.calls} calls")


def of_pack(pack: Path, usual: HostModel) -> HostModel:
    """The host that a calibration pack was measured on."""
    found = pack_host(pack)
    if found is None:
        raise InputError(pack, f"has no {PACK_FILE}: give the file of a host (presage calibrate --host FILE.toml)")
    return _scaled(usual, found, str(pack), f"{found.calls} calls")


def _scaled(usual: HostModel, found: MeasuredFactors, name: str, source: str) -> HostModel:
    """The reference's model at the pace of a measured host, and a note that says so."""
    seen = found.measured.main if found.measured.main == found.measured.autograd else None
    ratios = f"{seen:.2f}" if seen else f"{found.measured.main:.2f} (autograd {found.measured.autograd:.2f})"
    note = f"host: {name} ({source}) measured at {ratios} times the host time of {REFERENCE}, taken as "
    note += f"{found.taken.main:.2f}" if seen else f"{found.taken.main:.2f} ({found.taken.autograd:.2f})"
    return usual.on_host(found.taken, found.machine_sd, name, note)
