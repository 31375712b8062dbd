"""Ledgers for the tests of pages, and what reads pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from paceline.sim import simulate

MOST_BYTES = 1_000_000


def lines_of(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n") if line]


def ledger(**options: Any) -> list[str]:
    """A run whose first device is half as fast for a while."""
    given: dict[str, Any] = {"steps": 120, "noise": 0.02, "throttles": [(0, 2.0, 40, 80)], "seed": 3} | options
    return lines_of(simulate(given.pop("speeds", [1, 1, 0.5]), ledger=True, **given).ledger)


class Reader(HTMLParser):
    """Reads a page: its words, its tables, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.fetched: list[str] = []
        self.words, self.scripts = "", 0
        self._inside, self._caption = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self._inside = tag
        self.scripts += tag == "script"
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption.strip(), []).append([])
        if tag in ("td", "th") and self._caption:
            self.tables[self._caption.strip()][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag != "small" else "caption-note"

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            return
        self.words += data
        if self._inside == "caption":
            self._caption += data
        elif self._inside in ("td", "th"):
            self.tables[self._caption.strip()][-1][-1] += data


def charts_in(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    charts: list[dict[str, Any]] = json.loads(found[1])
    return charts
