"""`live` in notebooks, and where there is none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from paceline._progress import Figures, Progress
from paceline._progress_html import drawn, html_display
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify


class Notebook:
    """In place of IPython's display."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kernel: bool = True) -> None:
        self.shown: list[str] = []
        top, display = ModuleType("IPython"), ModuleType("IPython.display")
        shell = type("Shell", (), {"kernel": object()} if kernel else {})()
        top.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.HTML = str  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", top)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, html: str, *, display_id: bool) -> Notebook:
        assert display_id
        self.shown.append(html)
        return self

    def update(self, html: str) -> None:
        self.shown[-1] = html


def test_live_draws_again_in_one_place_and_gives_the_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch)
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1]) as made:
        seen = []
        for number in made.live(range(5)):
            seen.append(number)
            made.step(classify, batch)
    assert seen == list(range(5))
    assert len(notebook.shown) == 1
    assert "5/5" in notebook.shown[0]
    assert "8 items a step" in notebook.shown[0]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("place", ["no IPython", "a terminal"])
def test_live_is_progress_where_there_is_no_notebook(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "no IPython":
        monkeypatch.setitem(sys.modules, "IPython", None)
    else:
        Notebook(monkeypatch, kernel=False)
    assert html_display() is None
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1]) as made:
        shown: Progress[int] = made.live(range(3))
        for _ in shown:
            made.step(classify, batch)
    assert "3/3" in capsys.readouterr().err


def test_what_live_draws_has_names_as_words() -> None:
    html = drawn(Figures(1, None, "1  <b>", [], by_cost=True))
    assert "&lt;b&gt;" in html
    assert "<progress" not in html
