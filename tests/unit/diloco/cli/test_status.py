"""`diloco status --watch` beside the event loop that receives reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import pytest

from diloco.cli import status


async def test_the_swarm_is_summed_up_where_its_reports_come_in(monkeypatch, capsys):
    class Observer:
        def swarm(self):
            return {"is_on_the_loop": threading.current_thread() is threading.main_thread()}

        async def changed(self, _):
            raise asyncio.CancelledError

    watched = SimpleNamespace(observed=lambda _: contextlib.nullcontext(Observer()))
    monkeypatch.setattr(status, "MIN_REDRAW_S", 0.0)
    waiting = SimpleNamespace(stop=lambda: None)
    with pytest.raises(asyncio.CancelledError):
        await status._show_status(watched, None, waiting, watch=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"is_on_the_loop": True}
