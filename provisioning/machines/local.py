"""The Machine protocol for this machine: scripts run as child processes, files are copied."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from provisioning.errors import MachineError
from provisioning.machines.machine import (
    BLOCK_BYTES,
    EXCLUDED,
    Answer,
    end,
    exchange,
    lines_of,
    spawned,
    whole,
)

_COMPILED = "__pycache__"


class LocalMachine:
    """`home` takes the place of a remote user's home directory."""

    def __init__(self, home: Path) -> None:
        self.home = home

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        process = await self._start(script, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(timeout_s):
                assert process.stdin and process.stdout and process.stderr
                streams = (whole(stream, "this machine") for stream in (process.stdout, process.stderr))
                out, err = await exchange(process.stdin, stdin, *streams)
                await process.wait()
        except TimeoutError as error:
            raise MachineError(f"a script took longer than {timeout_s:g} s on this machine") from error
        finally:
            # After a failure or cancellation: end the script with all processes of its session.
            await end(process)
        assert process.returncode is not None
        return Answer(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    async def sync(
        self, source: Path, into: str, *, excluded: Sequence[str] = EXCLUDED, mirrors: bool = True
    ) -> None:
        # Copy compiled kernels, too: without them, each pod would compile for a quarter of a minute.
        excluded = [pattern for pattern in excluded if pattern != _COMPILED]
        target = self.home / into
        fresh = target.with_name(f"{target.name}.new")

        def copied(from_path: str, to_path: str) -> None:
            # Another process may be compiling: its temporary files may disappear.
            lost = (FileNotFoundError,) if _COMPILED in Path(from_path).parts else ()
            with contextlib.suppress(*lost):
                shutil.copy2(from_path, to_path)

        def replaced(from_path: str, to_path: str) -> None:
            shutil.copy2(from_path, f"{to_path}.new")
            Path(f"{to_path}.new").replace(to_path)

        def copy() -> None:
            if target.is_dir() and not mirrors:
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=replaced)
                return
            shutil.rmtree(fresh, ignore_errors=True)
            if source.is_dir():
                shutil.copytree(source, fresh, ignore=shutil.ignore_patterns(*excluded), copy_function=copied)
                shutil.rmtree(target, ignore_errors=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, fresh)
            fresh.rename(target)

        try:
            await asyncio.to_thread(copy)
        except OSError as error:
            raise MachineError(f"{source} cannot be copied to {target}: {error}") from error

    async def fetch(self, directory: str, paths: Sequence[str], into: Path) -> None:
        def copy() -> None:
            for path in paths:
                source, target = self.home / directory / path, into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target, ignore=_links, dirs_exist_ok=True)
                elif not source.is_symlink():
                    shutil.copy2(source, target)

        try:
            await asyncio.to_thread(copy)
        except (OSError, shutil.Error) as error:
            raise MachineError(f"{self.home / directory} cannot be copied to {into}: {error}") from error

    async def follow(self, script: str) -> AsyncIterator[str]:
        process = await self._start(script, asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            async for line in lines_of(functools.partial(process.stdout.read, BLOCK_BYTES)):
                yield line
        finally:
            await end(process)

    def shell_argv(self, directory: str, ports: Sequence[int] = ()) -> list[str]:
        return ["sh", "-c", 'cd "$1" && exec "${SHELL:-sh}"', "sh", str(self.home / directory)]

    async def close(self) -> None:
        pass

    async def _start(self, script: str, stdin: int, stdout: int) -> asyncio.subprocess.Process:
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return await spawned(
            asyncio.create_subprocess_exec(
                "sh",
                "-c",
                script,
                cwd=self.home,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                start_new_session=True,
            )
        )


def _links(directory: str, names: list[str]) -> set[str]:
    return {name for name in names if (Path(directory) / name).is_symlink()}
