"""The text of an HTML page: what a reader sees, one block a line."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = frozenset(("script", "style", "template", "noscript", "svg", "head", "iframe", "select"))
_BLOCKS = re.compile(
    "address|article|aside|blockquote|br|dd|div|dl|dt|figcaption|footer|form|h[1-6]|header|hr|li|"
    "main|nav|ol|p|pre|section|table|td|th|tr|ul"
)
_BLANKS = re.compile(r"\s+")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self._hidden: str | None = None
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = not self.title
        elif tag == "body":
            self._hidden = None  # a head may be left open
        elif self._hidden is None and tag in _HIDDEN:
            self._hidden = tag
        if _BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag == self._hidden:
            self._hidden = None
        if _BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif self._hidden is None:
            self.parts.append(_BLANKS.sub(" ", data))


def text_of_html(html: str) -> str:
    """Return the title and the visible text; markup that is broken is read as far as it goes."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    blocks = (_BLANKS.sub(" ", block).strip() for block in "".join(reader.parts).split("\n"))
    lines = [block for block in blocks if block]
    title = _BLANKS.sub(" ", "".join(reader.title)).strip()
    if title and (not lines or lines[0] != title):
        lines.insert(0, title)
    return "\n".join(lines)
