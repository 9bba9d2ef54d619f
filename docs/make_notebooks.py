"""Execute the notebooks again and store their outputs: `python docs/make_notebooks.py [NAME.ipynb...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_output
from shown import place

NOTEBOOKS = sorted((Path(__file__).resolve().parent / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """The notebook as it runs now in a folder that looks like the repository's root."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place(folder))}})
    client.execute()
    return plain(notebook)


def plain(notebook: Any) -> Any:
    """Without times of execution and identities, which differ from run to run."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for k, cell in enumerate(notebook.cells):
        cell.metadata, cell["id"] = {}, f"cell-{k}"
        printed = "".join(out.text for out in cell.get("outputs", ()) if out.output_type == "stream")
        shown = [out for out in cell.get("outputs", ()) if out.output_type != "stream"]
        if "outputs" in cell:  # a kernel hands over what is printed in pieces
            cell.outputs = [*([new_output("stream", text=printed)] if printed else []), *shown]
    return notebook


def texts(notebook: Any) -> list[str]:
    """What the cells print and show, as text."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]


def main() -> None:
    wanted = set(sys.argv[1:])
    for path in NOTEBOOKS:
        if not wanted or path.name in wanted:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main()
