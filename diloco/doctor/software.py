"""Checks the installed versions of Python and packages by their metadata, and torch by importing it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from diloco.doctor.findings import Finding, failed, passed, warned
from diloco.errors import UserError
from diloco.options.flags import GrpoConfig

if TYPE_CHECKING:
    from packaging.requirements import Requirement

INSTALL = "pip install --constraint constraints.txt --editable .  # in a clone of diloco"
_UNKNOWN = "diloco is not installed, so versions are not checked"


def check_python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        wanted = metadata.metadata("diloco")["Requires-Python"]
    except metadata.PackageNotFoundError:
        yield warned("python", f"{version}; {_UNKNOWN}", INSTALL)
        return
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield passed("python", version)
    else:
        yield failed(
            "python", f"{version}; diloco needs {wanted}", f"python3.11 -m venv .venv && .venv/bin/{INSTALL}"
        )


def check_packages(
    extras: Collection[str] = (), version_of: Callable[[str], str] = metadata.version
) -> Iterator[Finding]:
    """Check the dependencies of diloco and of these extras."""
    try:
        requirements = list(_requirements(extras))
    except metadata.PackageNotFoundError:
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


def _requirements(extras: Collection[str]) -> Iterator[Requirement]:
    from packaging.requirements import Requirement

    for text in metadata.requires("diloco") or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            requirement.marker = None
            yield requirement


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
