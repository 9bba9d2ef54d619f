"""One self-contained HTML page of an answer: the sentence, then charts, each with its numbers in a table."""

from presage.report.html.page import Fact, Page, Section, Table
from presage.report.html.render import rendered, write_page

__all__ = ["Fact", "Page", "Section", "Table", "rendered", "write_page"]
