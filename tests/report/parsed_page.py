"""The page as a parsed text, and a text that must be escaped in it."""

import re
from html.parser import HTMLParser

EVIL = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"


class Reader(HTMLParser):
    """Collects what a page loads, links to, and says."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.skipping = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.skipping = tag in ("script", "style")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_endtag(self, tag: str) -> None:
        self.skipping = False

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(html: str) -> Reader:
    reader = Reader()
    # These mark where a name may break, and part no words.
    reader.feed(re.sub(r'<wbr>|<span class="nowrap">(.*?)</span>', r"\1", html))
    return reader
