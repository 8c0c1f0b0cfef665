from __future__ import annotations

from msgspec.structs import replace

from peers.errors import PeerUnreachable
from peers.monitor.report_service import ReportService
from peers.protocol.reports import Report
from peers.protocol.wire import encode
from tests.support.sighted import full_report
from tests.support.virtual_time import run_virtually


class Sent:
    """A channel that takes four messages."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    async def send(self, report: Report, timeout_s: float) -> None:
        self.reports.append(report)
        if len(self.reports) == 4:
            raise PeerUnreachable("it has gone")


def test_the_peers_that_a_peer_sees_are_sent_once_and_again_when_they_have_changed():
    names, channel = [f"12D3KooW{rank:044d}" for rank in range(200)], Sent()

    def report(_since: float) -> Report:
        missing = names[:1] if len(channel.reports) >= 2 else []
        return replace(full_report(), sees=tuple(name for name in names if name not in missing))

    service = ReportService("run", "peer", None, report)
    ended, _ = run_virtually(service._report_forever(channel), now=0.0)
    assert isinstance(ended, PeerUnreachable)
    assert [one.sees and len(one.sees) for one in channel.reports] == [200, None, 199, None]
    assert len(encode(channel.reports[1])) < 4000
