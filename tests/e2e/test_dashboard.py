"""`diloco dashboard` in a browser, on a swarm of real daemons of which one dies.

Screenshots are kept in DILOCO_SCREENSHOTS, or else in the test's temporary directory.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import browser as browsers
from tests.support.browser import Browser
from tests.support.commands import DILOCO, Command, check_gone, wait_until
from tests.support.swarm import wait_until as wait_for

pytest.importorskip("uvicorn", reason="needs the extra `dashboard`: pip install -e '.[dev]'")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        bool(browsers.missing()),
        reason=f"{browsers.missing()} not installed: `make test-dashboard` installs Debian's packages",
    ),
]

HOSTILE = "<img src=x onerror=window.hacked=1> & <b>"
SEEN_WITHIN_S = 2.0
FIRST_PICTURE_S = 5.0
MOST_PAGE_BYTES = 100_000
SCREENS = (("desk", 1280, 900), ("phone", 375, 740))


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    directory = tmp_path / "browser"
    directory.mkdir()
    with browsers.browser(directory) as opened:
        yield opened


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    directory = Path(os.environ.get("DILOCO_SCREENSHOTS") or tmp_path / "screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def state_is(rank: int, *states: str) -> str:
    """The body of a JavaScript function that says whether this peer's row shows one of these states."""
    return (
        f"const cell = document.querySelector('tr[data-rank=\"{rank}\"] td.state');"
        f"return cell !== null && {list(states)!r}.includes(cell.dataset.state)"
    )


def test_the_dashboard_shows_a_swarm_by_day_and_night_on_every_screen_and_who_has_died(
    swarm, window, pictures, tmp_path
):
    light = swarm(local_steps=10, max_steps=4000, step_s=0.05, tells_loss=True)
    light.galaxy_size = 4
    light.manifest["max_steps"] = 4000
    for rank in range(3):
        light.start(rank)
    light.extra["hardware"] = HOSTILE
    light.start(3)
    wait_for(lambda: all(peer.epoch >= 2 for peer in light.peers.values()), "epoch 2")
    argv = [*DILOCO, "dashboard", "--initial-peers", light.initial_peers[0], "--run-id", light.run_id]
    command = Command([*argv, "--port", "0"], tmp_path / "dashboard")
    try:
        wait_until(lambda: "token=" in command.stdout, "the address", command=command)
        address = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", command.stdout)[0]
        window.shows(width=1280)
        opened_at = time.time()
        window.open(address)
        drawn_at = window.until(
            "return document.querySelectorAll('#peers tbody tr').length >= 4", "the peers"
        )
        assert drawn_at - opened_at < FIRST_PICTURE_S
        check_light(window)
        for rank in range(4):
            window.until(state_is(rank, "training", "averaging"), f"peer {rank}")
        window.until("return document.querySelectorAll('#loss path.line').length === 4", "four curves")
        window.until("return document.querySelectorAll('#rounds svg rect.reduce_s').length >= 3", "rounds")
        window.until(
            "return document.querySelectorAll('#links circle.node').length === 4", "the map of links"
        )
        window.until("return document.querySelector('#totals').innerText.includes('of 4000')", "the progress")
        assert "token" not in window.run("return location.href")
        check_hostile_text(window)
        check_hostile_figures(window)
        check_one_bar_is_cut(window)
        pictures_of(window, pictures, "well")
        window.shows(width=1280)
        kept = picture_of_row(window, 2)
        light.peers[2].kill()
        seen_at = window.until(state_is(2, "lost"), "the dead peer")
        assert seen_at - light.peers[2].killed[-1] < SEEN_WITHIN_S
        assert picture_of_row(window, 2) != kept
        window.until(
            "return document.querySelector('#verdict[data-level=fault]')?.innerText.includes('Peer 2 was lost')",
            "the verdict",
        )
        window.until("return document.querySelector('#peers tbody tr').dataset.rank === '2'", "trouble first")
        window.until(
            "return document.querySelector('#loss .key').innerText.includes('peer 2: lost')", "its legend"
        )
        window.until(
            "return document.querySelector('#events').innerText.includes('Peer 2 was lost')", "the event"
        )
        window.until("return document.querySelector('#totals').innerText.includes('gone')", "the totals")
        pictures_of(window, pictures, "after-a-death")
        check_accessible(window)
        for rank in (0, 1, 3):
            assert window.run(state_is(rank, "training", "averaging", "joining"))
        assert window.complaints() == []
        command.interrupt()
        assert command.wait(20) == 130
        check_gone(command)
        window.until("return document.querySelector('#link').dataset.live === 'false'", "that it is gone")
    finally:
        command.close()


def pictures_of(window: Browser, pictures: Path, name: str) -> None:
    """Take screenshots at both widths, light and dark; check that nothing overflows and no label is cut off."""
    taken = set()
    for screen, width, height in SCREENS:
        for dark in (False, True):
            window.shows(width=width, height=height, dark=dark)
            # The page redraws for the new width in the next frame.
            window.until(
                "return document.querySelector('#loss svg').clientWidth < innerWidth", "the new width"
            )
            check_fits(window)
            check_labels(window)
            assert brightness(window) < 60 if dark else brightness(window) > 200
            taken.add(window.screenshot(pictures / f"{name}-{screen}-{'dark' if dark else 'light'}.png"))
    assert len(taken) == 4


def check_labels(window: Browser) -> None:
    """No label extends beyond the left or right edge of its chart."""
    cut = window.run(
        "return [...document.querySelectorAll('svg text')].filter(text => {"
        "const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();"
        "return own.left < all.left - 1 || own.right > all.right + 1})"
        ".map(text => text.textContent).slice(0, 5)"
    )
    assert cut == []


def check_one_bar_is_cut(window: Browser) -> None:
    """One long wait does not flatten the other rounds."""
    axis = "import('/static/rounds.js').then(rounds => rounds.axisOf(arguments[0]))"
    assert window.run(f"return {axis}", [1, 1.2, 1.1, 90]) == pytest.approx(3.3)
    assert window.run(f"return {axis}", [1, 1.2, 1.1, 2]) == 2


def check_accessible(window: Browser) -> None:
    """Every control and section has a name. With axe-core's file in DILOCO_AXE, axe finds nothing serious, either."""
    unnamed = window.run(
        "return [...document.querySelectorAll('button, svg[role=img], progress, section')].filter(e => "
        "!e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby') && !e.innerText).map(e => e.outerHTML)"
    )
    assert unnamed == []
    path = Path(os.environ.get("DILOCO_AXE", ""))
    if not path.is_file():
        return
    window.run(path.read_text(encoding="utf-8"))
    for (_, width, height), dark in itertools.product(SCREENS, (False, True)):
        window.shows(width=width, height=height, dark=dark)
        found = window.run("return axe.run().then(result => result.violations)")
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], (width, dark)


def check_light(window: Browser) -> None:
    """The page has loaded few bytes by now. `pytest -s` shows how many, and the time to the first paint."""
    page = window.run(
        "const entries = [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')];"
        "const painted = performance.getEntriesByName('first-contentful-paint')[0];"
        "return {bytes: entries.reduce((sum, entry) => sum + entry.decodedBodySize, 0),"
        "painted_ms: painted ? painted.startTime : null}"
    )
    print(f"page: {page['bytes']} bytes, first painted after {page['painted_ms']} ms")
    assert 10_000 < page["bytes"] < MOST_PAGE_BYTES


def check_hostile_text(window: Browser) -> None:
    """Text that a peer reports about itself is shown as text: no HTML in it takes effect."""
    row = window.run("return document.querySelector('tr[data-rank=\"3\"]').innerText")
    assert HOSTILE in row
    assert window.run("return document.querySelectorAll('img, b').length") == 0
    assert window.run("return window.hacked") is None


def check_hostile_figures(window: Browser) -> None:
    """An axis has fewer than 20 ticks even if peers report huge steps, or huge steps that hardly differ."""
    lengths = (
        "import('/static/charts.js').then(charts => [charts.ticks(4e18, 4e18, 4), "
        "charts.ticks(1e17, 1e17 + 64, 4), charts.ticks(-1e18, 1e18, 4)].map(ticks => ticks.length))"
    )
    assert all(0 < length < 20 for length in window.run(f"return {lengths}"))


def check_fits(window: Browser) -> None:
    """Nothing is wider than the screen."""
    wide = window.run(
        "return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + '.' + e.getAttribute('class')).slice(0, 5)"
    )
    assert wide == [] and window.run("return document.documentElement.scrollWidth <= innerWidth")


def brightness(window: Browser) -> float:
    """Brightness of the page's background, 0 to 255."""
    colour = window.run("return getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def picture_of_row(window: Browser, rank: int) -> tuple[str, str]:
    """The visible text and colour of a peer's state."""
    return tuple(
        window.run(
            'const cell = document.querySelector(`tr[data-rank="${arguments[0]}"] td.state`);'
            "return [cell.innerText, getComputedStyle(cell).color]",
            rank,
        )
    )
