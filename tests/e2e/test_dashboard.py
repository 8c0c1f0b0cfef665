"""`diloco dashboard` in a browser, on a swarm of real daemons of which one dies. Keeps its screenshots.

They are in DILOCO_SCREENSHOTS, or in pytest's temporary directory of the test.
"""

from __future__ import annotations

import os
import re
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
    """A function body: whether this peer's row shows one of these states."""
    return (
        f"const cell = document.querySelector('tr[data-rank=\"{rank}\"] td.state');"
        f"return cell !== null && {list(states)!r}.includes(cell.dataset.state)"
    )


def test_the_dashboard_shows_a_swarm_by_day_and_night_on_every_screen_and_who_has_died(
    swarm, window, pictures, tmp_path
):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05, tells_loss=True)
    light.galaxy_size = 3
    light.start(0)
    light.start(1)
    light.extra["hardware"] = HOSTILE
    light.start(2)
    wait_for(lambda: all(peer.epoch >= 2 for peer in light.peers.values()), "epoch 2")
    argv = [*DILOCO, "dashboard", "--initial-peers", light.initial_peers[0], "--run-id", light.run_id]
    command = Command([*argv, "--port", "0"], tmp_path / "dashboard")
    try:
        wait_until(lambda: "token=" in command.stdout, "the address", command=command)
        address = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", command.stdout)[0]
        window.shows(width=1280)
        window.open(address)
        for rank in range(3):
            window.until(state_is(rank, "training", "averaging"), f"peer {rank}")
        window.until("return document.querySelectorAll('#loss path.line').length === 3", "three curves")
        window.until("return document.querySelectorAll('#rounds svg rect.reduce_s').length >= 3", "rounds")
        assert "token" not in window.run("return location.href")
        check_hostile_text(window)
        check_hostile_figures(window)
        before = window.screenshot(pictures / "light.png")
        window.shows(width=1280, dark=True)
        dark = window.screenshot(pictures / "dark.png")
        assert brightness(window) < 60
        window.shows(width=360, height=740)
        check_fits(window)
        phone = window.screenshot(pictures / "phone.png")
        window.shows(width=360, height=740, dark=True)
        window.screenshot(pictures / "phone-dark.png")
        assert len({before, dark, phone}) == 3
        window.shows(width=1280)
        assert brightness(window) > 200
        kept = picture_of_row(window, 2)
        light.peers[2].kill()
        seen_at = window.until(state_is(2, "lost"), "the dead peer")
        assert seen_at - light.peers[2].killed[-1] < SEEN_WITHIN_S
        after = window.screenshot(pictures / "light-after-a-death.png")
        assert after != before and picture_of_row(window, 2) != kept
        window.until(
            "return document.querySelector('#events').innerText.includes('peer 2 was lost')", "the event"
        )
        window.until("return document.querySelector('#totals').innerText.includes('gone')", "the totals")
        for rank in range(2):
            assert window.run(state_is(rank, "training", "averaging", "joining"))
        assert window.complaints() == []
        command.interrupt()
        assert command.wait(20) == 130
        check_gone(command)
        window.until("return document.querySelector('#link').dataset.live === 'false'", "that it is gone")
    finally:
        command.close()


def check_hostile_text(window: Browser) -> None:
    """What a peer says of itself is text, and nothing else."""
    row = window.run("return document.querySelector('tr[data-rank=\"2\"]').innerText")
    assert HOSTILE in row
    assert window.run("return document.querySelectorAll('img, b').length") == 0
    assert window.run("return window.hacked") is None


def check_hostile_figures(window: Browser) -> None:
    """However large a step that a peer tells of, and however close to another, its axis has an end."""
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
    """Of the page's background, 0 to 255."""
    colour = window.run("return getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def picture_of_row(window: Browser, rank: int) -> tuple[str, str]:
    """What of a row the eye sees: its words and its colour."""
    return tuple(
        window.run(
            'const cell = document.querySelector(`tr[data-rank="${arguments[0]}"] td.state`);'
            "return [cell.innerText, getComputedStyle(cell).color]",
            rank,
        )
    )
