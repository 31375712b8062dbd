"""How a page looks and behaves in a browser."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import MISSING, PROGRAM, Browser, browser
from paceline._page.document import page_of_runs
from paceline._page.ledger import runs_of
from page_support import ledger


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(page_of_runs("throttled", runs_of("throttled", ledger())), encoding="utf-8")
    return path


LEGEND = "[...document.querySelectorAll('[data-chart=\"0\"] .u-series')].map(row => [...row.children].map(cell => cell.textContent.trim()).join(': '))"


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1200, False), (1200, True)])
def test_the_page_opens_without_a_complaint_and_fits(
    tab: Browser, file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    tab.open(file, width, dark=dark)
    assert tab.value("document.querySelectorAll('.uplot canvas').length") == 3
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    # Ink in each chart, and in the dark a dark page.
    inked = "[...document.querySelectorAll('canvas')].every(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0))"
    assert tab.value(inked)
    light = sum(tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"))
    assert light < 150 if dark else light > 700
    tab.picture(tmp_path / "page.png")
    (height,) = struct.unpack(">I", (tmp_path / "page.png").read_bytes()[20:24])
    assert height == tab.value("document.documentElement.scrollHeight") > 900  # the whole page, and not the window


def test_pointing_at_a_step_shows_its_figures_and_the_move_before_it(tab: Browser, file: Path) -> None:
    tab.open(file)
    assert tab.value(LEGEND)[0] == "step: --"
    box = tab.value(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('[data-chart=\"0\"] .u-over').getBoundingClientRect())"
    )
    tab.point(box[0] + box[2] * 59 / 119, box[1] + box[3] / 2)
    tab.until(f"{LEGEND}[0] == 'step: 60'")
    plans = [json.loads(line)["plan"] for line in ledger() if '"plan"' in line]
    legend = tab.value(LEGEND)
    for device in range(3):
        assert f"sim:{device}: {plans[59]['shares'][device]}" in legend
    last = [plan for plan in plans[:60] if plan["moved"]][-1]
    assert f"step {last['step'] + 1}: " in legend[-1]
    assert last["reason"] in legend[-1]
    other = tab.value(LEGEND.replace('chart="0"', 'chart="2"'))
    assert other[0] == "step: 60"  # the charts' cursors go together


def test_keys_move_the_cursor_and_hide_lines(tab: Browser, file: Path) -> None:
    tab.open(file)
    tab.value("document.querySelector('[data-chart=\"0\"]').focus()")
    for key, step in (
        ("Home", 1),
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", 120),
        ("ArrowRight", 120),
    ):
        tab.press(key)
        tab.until(f"{LEGEND}[0] == 'step: {step}'")
    tab.value("document.querySelectorAll('[data-chart=\"0\"] .u-series th')[1].focus()")
    tab.press("Enter")
    tab.until("document.querySelectorAll('[data-chart=\"0\"] .u-series')[1].classList.contains('u-off')")
    assert tab.complaints == []


def test_heads_of_columns_stand_where_the_columns_do(tab: Browser, file: Path) -> None:
    tab.open(file)
    aligned = "[...row.cells].map(cell => getComputedStyle(cell).textAlign)"
    found = tab.value(
        f"[...document.querySelectorAll('table.figures')].map(one => [one.tHead.rows[0], one.tBodies[0].rows[0]].map(row => {aligned}))"
    )
    assert any("left" in body[1:] for _, body in found)  # words
    assert all(head == body for head, body in found)


def test_charts_follow_the_window_and_are_light_on_paper(tab: Browser, file: Path) -> None:
    tab.open(file, dark=True)
    tab.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    tab.until("document.querySelector('.uplot').clientWidth < 500")
    tab.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    tab.until("document.querySelector('.uplot').clientWidth > 1000")
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value("getComputedStyle(document.documentElement).getPropertyValue('--ink')").strip() == "#1b1f24"
    # Portrait A4 has 718 pixels between its margins. What is wider would be cut.
    assert tab.value("Math.max(...[...document.querySelectorAll('.uplot')].map(plot => plot.clientWidth))") <= 680
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value("getComputedStyle(document.documentElement).getPropertyValue('--ink')").strip() == "#e6edf3"
    assert tab.complaints == []
    printed = base64.b64decode(tab.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.count(b"/Type /Page\n") >= 2  # and not only what the window shows


def test_pages_of_a_trainer_a_pipeline_and_a_pool_open_without_a_complaint(tab: Browser, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from paceline.torch import DataParallel, Pipeline, Pool
    from torch_support import TWO, classifier, classify

    module, batch = classifier(12)
    for kind in (DataParallel, Pipeline):
        with kind(module, TWO) as trainer:
            for one in trainer.live([batch] * 4):
                trainer.step(classify, one)
            trainer.page(tmp_path / f"{kind.__name__}.html")
    with Pool(TWO) as pool:
        served = pool.serve(lambda x: x + 1, max_batch=4)
        list(served.map(torch.tensor(k) for k in range(40)))
        assert pool.submit(lambda _: None, not_before=60).cancel()
        pool.page(tmp_path / "Pool.html")
    for name, charts in (("DataParallel", 4), ("Pipeline", 4), ("Pool", 4)):
        tab.open(tmp_path / f"{name}.html")
        assert tab.value("document.querySelectorAll('.uplot canvas').length") == charts
        tab.value("document.querySelector('[data-chart=\"1\"]').scrollIntoView()")
        box = tab.value(
            "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('[data-chart=\"1\"] .u-over').getBoundingClientRect())"
        )
        tab.point(box[0] + box[2] / 2, box[1] + box[3] / 2)
        tab.until(f"!{LEGEND}[0].endsWith(': --')")  # of another chart: cursors go together
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert float(tab.value(LEGEND)[0].removeprefix("seconds: ")) >= 0
    tab.open(tmp_path / "Pipeline.html", 400)
    # A colour of the key stands in the line of its word.
    assert set(tab.value("[...document.querySelectorAll('.key span')].map(one => one.getClientRects().length)")) == {1}
