"""Build the docs as a site: `python docs/make_site.py [FOLDER]` (default: out/site), with Zensical.

A link that leaves docs/ leads to a file of the repository. On a code host it opens there; here each such file is a page
under `files/`, a folder a list of what is in it, and a notebook is a page too. So no link is dead, and the site needs
nothing from outside. Links that lead nowhere fail the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")  # pictures too
FENCES = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.M | re.S)
NAMED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "files/README.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".csv": "text"}
MOST = 60_000  # characters of a file that are shown


def uri(target: str) -> str:
    """The page of a file of the repository."""
    if target.startswith("docs/") and not target.endswith(".py"):
        return target.removeprefix("docs/").replace(".ipynb", ".md")
    return NAMED.get(target, f"files/{target}.md")


def target_of(page: str, link: str) -> str:
    """The file of the repository that a link on a page of it leads to, or nothing: elsewhere, or within the page."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return ""
    target = os.path.normpath(PurePosixPath(page).parent / path)
    return target if (ROOT / target).exists() and not target.startswith("..") else ""


def outside(target: str) -> bool:
    return bool(target) and not (target.startswith("docs/") and not target.endswith(".py"))


def relinked(text: str, page: str) -> str:
    """The text of a page with its links as they are on the site."""
    here = PurePosixPath(uri(page)).parent

    def again(found: re.Match[str]) -> str:
        words, link = found.groups()
        target = target_of(page, link)
        if not target or (page.startswith("docs/") and not outside(target) and not target.endswith(".ipynb")):
            return found.group()
        anchor = link.partition("#")[2]
        return f"[{words}]({os.path.relpath(uri(target), here)}{'#' + anchor if anchor else ''})"

    parts, at = [], 0
    for fence in FENCES.finditer(text):
        parts += [LINK.sub(again, text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, LINK.sub(again, text[at:])])


def shown(target: str) -> str:
    """A file or folder of the repository as a page."""
    path = ROOT / target
    if path.is_dir():
        inside = [p for p in sorted(path.iterdir()) if not p.name.startswith((".", "__")) and p.suffix != ".pyc"]
        return "\n".join([f"# {target}", "", *(f"- `{p.name}{'/' if p.is_dir() else ''}`" for p in inside)]) + "\n"
    text = path.read_text()
    if path.suffix == ".md":
        return relinked(text, target)
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text[:MOST].rstrip()}\n````\n"


def wanted() -> list[str]:
    """Every file alongside docs/ that a page of the site leads to, and those that such pages lead to in turn."""
    found = [name for name in NAMED if (ROOT / name).exists()]
    pages = [f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))] + found
    while pages:
        page = pages.pop()
        text = FENCES.sub("", (ROOT / page).read_text())
        for _, link in LINK.findall(text):
            target = target_of(page, link)
            if outside(target) and target not in found:
                found.append(target)
                pages += [target] if target.endswith(".md") else []
    return sorted(found)


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what the cells showed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_output(out) for out in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(out: dict[str, Any]) -> str:
    data = out.get("data", {})
    if "text/html" in data:
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.S)
        return " ".join(html.split())  # one line: Markdown ends a block of HTML at an empty one
    return f"```text\n{''.join(out.get('text') or data.get('text/plain', '')).rstrip()}\n```"


def write_sources(folder: Path) -> None:
    """The Markdown of the whole site."""
    for path in sorted(p for p in (ROOT / "docs").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")):
        name = f"docs/{path.relative_to(ROOT / 'docs')}"
        target = folder / uri(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".md", ".ipynb"):
            target.write_text(relinked(path.read_text() if path.suffix == ".md" else notebook_page(path), name))
        else:
            shutil.copy(path, target)
    for name in wanted():
        target = folder / uri(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(shown(name))


def build(out: Path) -> None:
    """Write the site; raises CalledProcessError if a link or an anchor leads nowhere."""
    work = out.with_name(f"{out.name}_sources")
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    write_sources(work / "docs")
    settings = (ROOT / "mkdocs.yml").read_text()
    (work / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"))
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=work, check=True)
    shutil.move(work / "site", out)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out" / "site").resolve())
