"""The rules of the package layout (tools/house.py): layers, one noun per idea, words of the field, sizes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import house  # noqa: E402


def test_rooms_import_from_lower_layers_only() -> None:
    """Which also means that there is no cycle of rooms, and that fitting and validation stay out of the runtime."""
    assert not house.layer_violations()


def test_every_room_has_a_layer() -> None:
    rooms = {house.room(name) for name in house.modules()} - {"presage", *house.OUTSIDE}
    assert rooms == set(house.RANK)


def test_a_class_name_stands_for_one_class() -> None:
    assert not house.repeated_classes()


def test_names_and_docstrings_speak_plainly() -> None:
    assert not house.wording()


def test_functions_and_modules_stay_small() -> None:
    assert not house.sizes()


def test_the_package_does_not_grow() -> None:
    """Sizes only go down, towards the targets in tools/house.py."""
    lines, files = house.totals()
    outside = sum(lines[r] for r in house.OUTSIDE), sum(files[r] for r in house.OUTSIDE)
    assert sum(lines.values()) - outside[0] <= house.CEILING["runtime lines"]
    assert sum(files.values()) - outside[1] <= house.CEILING["runtime files"]
    assert sum(lines.values()) <= house.CEILING["all lines"]


def test_a_page_never_reads_what_a_terminal_renderer_wrote() -> None:
    """Rich's own cells are private, and a headline is a value, not a text to split."""
    for path in (ROOT / "src/presage/report").rglob("*.py"):
        text = path.read_text()
        assert "._cells" not in text and 'split("\\n")' not in text, path


def test_the_engine_knows_no_ops_and_reports_run_no_models() -> None:
    for path in (ROOT / "src/presage/engine").rglob("*.py"):
        strings = (n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
        assert not [s for s in strings if isinstance(s, str) and s.startswith("aten::")], path
    runs = {"simulate", "predict_job", "predict", "predict_run", "kernel_times"}
    for path in (ROOT / "src/presage/report").rglob("*.py"):
        calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        assert not runs & {f.id for f in calls if isinstance(f, ast.Name)}, path


def test_graphs_are_written_by_graph_builder_alone() -> None:
    """Other modules change values by `replace`, or add them through GraphBuilder; capture lowers what it records."""
    parts = {"Op", "Tensor", "Storage", "Event", "Graph"}
    for name, path in house.modules().items():
        if name.startswith(("presage.graph", "presage.capture")) or "presage.graph.graph" not in path.read_text():
            continue
        tree = house.tree(path)
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "presage.graph.graph"]
        known = parts & {alias.name for node in imports for alias in node.names}
        calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
        assert not known & {f.id for f in calls if isinstance(f, ast.Name)}, path


def test_the_glossary_has_the_words() -> None:
    text = (ROOT / "docs/glossary.md").read_text()
    for word in ("step", "microbatch", "rank", "GEMM", "memory-bound", "collective", "exposed", "bubble", "straggler"):
        assert word.lower() in text.lower()
    assert text.count("\n**") + text.count("\n| ") >= 55
