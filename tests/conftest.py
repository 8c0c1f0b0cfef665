from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Imported here, because its pytest plugin would import it at the end of the session, through pytest's own compiler. In
# CPython 3.11 that can fail ("AST constructor recursion depth mismatch") if garbage with finalizers is then collected.
import hypothesis
import pytest

from tests.support.swarm import LightSwarm

COROUTINE_TIMEOUT_S = 900.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run the tests that are marked exhaustive, too"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not by `-m`: an `-m` on the command line replaces pyproject.toml's, which excludes tests of optional software.
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_configure(config: pytest.Config) -> None:
    """Make Hypothesis try the same examples every time, and others with `--hypothesis-seed=random` or a number."""
    # nohup ignores SIGHUP, and a shell SIGINT of what it starts in the background. Commands that tests start would
    # inherit that; they do not inherit a handler.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile(
        "diloco",
        derandomize=config.getoption("--hypothesis-seed", default=None) is None,
        # The time that an example takes depends on the load of the machine, not on the code.
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("diloco")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop, with a deadline. A fixture value that is an asynchronous context
    manager is entered in that loop before the test and exited after it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with asyncio.timeout(COROUTINE_TIMEOUT_S), contextlib.AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


@contextlib.contextmanager
def dht_node(directory: Path) -> Iterator[str]:
    """The address of a plain DHT node on loopback, in a thread of its own."""
    from peers.net.dht.node import Dht
    from peers.net.identity import load_or_create

    ready = threading.Event()
    address: list[str] = []
    end: list[Callable[[], object]] = []

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        end.append(lambda: loop.call_soon_threadsafe(stop.set))
        identity = load_or_create(directory / "identity.key")
        dht = await Dht.join(identity=identity, host_maddrs=("/ip4/127.0.0.1/tcp/0",))
        address.extend(await dht.maddrs())
        ready.set()
        await stop.wait()
        await dht.close()

    # asyncio.run also ends the tasks that hivemind leaves behind.
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield address[0]
    end[0]()
    thread.join(20)


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A DHT node that tests share: each test uses its own run id."""
    with dht_node(tmp_path_factory.mktemp("bootstrap")) as address:
        yield address


@pytest.fixture(scope="module")
def quiet_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A DHT node without dead peers of other tests in its routing table, for tests with short query timeouts."""
    with dht_node(tmp_path_factory.mktemp("bootstrap")) as address:
        yield address


@pytest.fixture
def swarm(
    bootstrap: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., LightSwarm]]:
    """`swarm(**worker settings)`: a light swarm; all of its processes are ended after the test."""
    made: list[LightSwarm] = []

    def make(**worker: Any) -> LightSwarm:
        made.append(
            LightSwarm(tmp_path, [bootstrap], f"t{zlib.crc32(request.node.nodeid.encode())}", **worker)
        )
        return made[-1]

    yield make
    for light in made:
        light.close()
