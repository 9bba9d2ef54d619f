"""The docs site builds strictly, loads nothing from elsewhere, has no dead links and a page for each question."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
QUESTIONS = {
    "why_slow": "Why is my step slow?",
    "will_it_fit": "Will it fit?",
    "which_sharding": "Which sharding?",
    "which_parallelism": "Which parallelism?",
    "how_sure": "How sure?",
    "when_done": "When will it end?",
    "my_gpu": "My GPU is not listed",
}
OTHERS = ("index", "quickstart", "how", "accuracy_overview", "limits", "api", "add_gpu", "add_family")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


class Reader(HTMLParser):
    """What a page of the site loads, where it links to, its title and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {k: v or "" for k, v in attrs}
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        if tag in ("script", "img", "iframe", "source", "link") and known.get("rel") not in (
            "canonical",
            "next",
            "prev",
        ):
            self.loads += [known[k] for k in ("src", "href") if k in known]
        if "id" in known:
            self.places.add(known["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """The built site: every page by its path."""
    for package in ("zensical", "mkdocstrings_handlers"):
        if find_spec(package) is None:
            pytest.skip(f"no {package}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "docs/make_site.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    css = [*folder.rglob("*.css")]
    assert css and not any(re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", f.read_text()) for f in css)
    return {str(f.relative_to(folder)): Reader(f.read_text()) for f in folder.rglob("*.html")}


@pytest.mark.slow
def test_every_page_is_on_the_site(site: dict[str, Reader]) -> None:
    assert {f"{p.stem}.html" for p in DOCS.glob("*.md")} <= set(site)
    assert {f"notebooks/{p.stem}.html" for p in DOCS.glob("notebooks/*.ipynb")} <= set(site)


def test_the_navigation_lists_every_page_once() -> None:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [p.name for p in DOCS.glob("*.md")] + [f"notebooks/{p.stem}.md" for p in DOCS.glob("notebooks/*.ipynb")]
    assert sorted(listed) == sorted([*pages, "changelog.md", "contributing.md"])


def test_pictures_of_the_gallery_are_small_and_shown() -> None:
    pictures = sorted(DOCS.glob("gallery/*.png"))
    text = (DOCS / "gallery.md").read_text()
    assert len(pictures) >= 6 and all(f"(gallery/{p.name})" in text for p in pictures)
    assert max(p.stat().st_size for p in pictures) < 150_000


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: dict[str, Reader]) -> None:
    assert sum(len(page.loads) for page in site.values()) > len(site)
    found = {(name, url) for name, page in site.items() for url in page.loads if re.match(r"(?:\w+:)?//", url)}
    assert found == set()


@pytest.mark.slow
def test_no_link_is_dead(site: dict[str, Reader]) -> None:
    dead = []
    for name, page in site.items():
        for link in page.links:
            path, _, place = link.partition("#")
            if name == "404.html" or re.match(r"\w+:", path):
                continue
            target = os.path.normpath(Path(name).parent / path) if path else name
            target = {".": "index.html"}.get(target, target)
            if target not in site or (place and place not in site[target].places and place != "__"):
                dead.append((name, link))
    assert dead == []


@pytest.mark.parametrize("source", MARKDOWN, ids=lambda p: p.name)
def test_links_of_the_sources_lead_somewhere(source: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(FENCE.sub("", source.read_text()))]
    assert [x for x in links if x and ":" not in x and not (source.parent / x).exists()] == []


@pytest.mark.parametrize("source", MARKDOWN, ids=lambda p: p.name)
def test_a_page_has_one_title(source: Path) -> None:
    text = FENCE.sub("", source.read_text())
    assert len(re.findall(r"^# \S", text, re.M)) == 1 and text.lstrip().startswith("# ")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert text.startswith(f"# {QUESTIONS[name]}\n")
    assert "```console\n$ presage " in text  # a command with its output
    assert re.search(r"^## (?:How far to trust it|What accuracy to expect)$", text, re.M)
    assert f"({name}.md)" in (DOCS / "index.md").read_text() and f"({name}.md)" in (DOCS / "quickstart.md").read_text()


def test_the_other_pages_are_there() -> None:
    assert [name for name in OTHERS if not (DOCS / f"{name}.md").exists()] == []


def test_figures_of_the_overview_stand_on_the_pages_it_names() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| \[[^\]]+\]\(([^)]+)\) \|$", (DOCS / "accuracy_overview.md").read_text(), re.M
    )
    assert len(rows) > 10
    for figures, page in rows:
        found = (DOCS / page).read_text()
        for figure in re.findall(r"\d[\d.]*(?:%(?: of \d+)?| points| of \d+ families)", figures):
            assert figure.replace(" points", "") in found, f"{figure} is not on {page}"


def test_every_exported_name_is_in_the_reference() -> None:
    import presage

    text, _, errors = (DOCS / "api.md").read_text().partition("\n## Errors")
    text, _, engine = text.partition("\n## The engine")
    assert documented(text + errors) | {"engine"} == set(presage.__all__)
    assert documented(engine) <= set(presage.engine.__all__) and "simulate" in documented(engine)


def documented(text: str) -> set[str]:
    return {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
