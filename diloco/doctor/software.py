"""Checks the installed versions of Python and packages by their metadata, and torch by importing it."""

from __future__ import annotations

import os
import platform
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.doctor.findings import Finding, failed, passed, warned
from diloco.errors import UserError
from diloco.options.flags import GrpoConfig

if TYPE_CHECKING:
    from packaging.requirements import Requirement

INSTALL = "pip install --constraint constraints.txt --editable ."
_UNKNOWN = "diloco is neither installed nor run from a clone, so versions are not checked"


def check_python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    wanted = _wanted_python()
    if wanted is None:
        yield warned("python", f"{version}; {_UNKNOWN}", INSTALL)
    elif SpecifierSet(wanted).contains(version, prereleases=True):
        yield passed("python", version)
    else:
        yield failed(
            "python", f"{version}; diloco needs {wanted}", f"python3.11 -m venv .venv && .venv/bin/{INSTALL}"
        )


def check_packages(
    extras: Collection[str] = (), version_of: Callable[[str], str] = metadata.version
) -> Iterator[Finding]:
    """Check the dependencies of diloco and of these extras."""
    requirements = list(_requirements(extras))
    if not requirements:
        yield warned("packages", _UNKNOWN, INSTALL)
        return
    wrong = list(_unsatisfied(requirements, version_of))
    for requirement, found in wrong:
        yield failed("packages", f"{found}; diloco needs {requirement}", f'pip install "{requirement}"')
    if not wrong:
        yield passed("packages", f"all {len(requirements)} have versions that diloco supports")


def check_torch() -> Iterator[Finding]:
    """Check that torch can be imported, which takes seconds."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield failed(
            "torch", f"cannot be imported: {error}", 'pip install --force-reinstall "torch>=2.10,<2.14"'
        )
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield passed("torch", f"{torch.__version__}, built for {built_for}")


def check_vllm(grpo: GrpoConfig) -> Iterator[Finding]:
    """Check that the Python interpreter of the peer's own vLLM server has vLLM."""
    from diloco.rl.own_server import check_has_vllm

    python = grpo.vllm_python or sys.executable
    try:
        check_has_vllm(python, os.environ)
    except UserError as error:
        yield failed("vllm", str(error), "pip install 'diloco[vllm]'  # or --rollout hf")
        return
    yield passed("vllm", f"{python} has vLLM")


def _wanted_python() -> str | None:
    if (project := _project()) is not None:
        return str(project["requires-python"])
    try:
        return str(metadata.metadata("diloco")["Requires-Python"])
    except metadata.PackageNotFoundError:
        return None


def _requirements(extras: Collection[str]) -> Iterator[Requirement]:
    from packaging.requirements import Requirement

    for text in _requirement_texts(extras):
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            requirement.marker = None
            yield requirement


def _requirement_texts(extras: Collection[str]) -> list[str]:
    if (project := _project()) is not None:
        more = project["optional-dependencies"]
        return [*project["dependencies"], *(text for extra in extras for text in more[extra])]
    try:
        return metadata.requires("diloco") or []
    except metadata.PackageNotFoundError:
        return []


def _project() -> dict[str, Any] | None:
    """The table `project` of pyproject.toml if diloco runs from a clone, where installed metadata may be outdated."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    try:
        project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return None
    return project if project.get("name") == "diloco" else None


def _unsatisfied(
    requirements: Iterable[Requirement], version_of: Callable[[str], str]
) -> Iterator[tuple[Requirement, str]]:
    for requirement in requirements:
        try:
            version = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            yield requirement, f"{requirement.name} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement, f"{requirement.name} {version} is installed"
