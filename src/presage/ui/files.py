"""A plan from a page or a link is data: it may name no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.ui.knobs import Wrong

__all__ = ["no_files"]

FILES = {"arguments": "a Megatron script", "titan": "a TorchTitan file"}


def no_files(table: Mapping[str, Any]) -> None:
    """Raises where a job's table refers to a file: nothing on this machine is read on a page's word."""
    for key, what in FILES.items():
        if key in table:
            raise Wrong(f"{key}: the page reads no files ({what}): start it with presage ui JOB.toml instead", ())
    if "config" in _section(table, "model"):
        raise Wrong("model.config: the page reads no files: start it with presage ui JOB.toml, or give the fields")
    cluster, software = _section(table, "cluster"), table.get("framework", "")
    name = software.get("name") if isinstance(software, Mapping) else software
    for where, said, about in (
        ("cluster.platform", cluster.get("platform"), "platform"), ("cluster.gpu", cluster.get("gpu"), "platform"),
        ("framework", name, "framework"),
    ):  # fmt: skip
        if isinstance(said, str) and (said.lower().endswith(".toml") or "/" in said or "\\" in said or "\0" in said):
            raise Wrong(f"{where}: the page reads no files: choose a known name", (about,))


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    return found if isinstance(found, Mapping) else {}
