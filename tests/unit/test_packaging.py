"""What is published: the wheel and the source distribution, the extras, and the workflows that test and release it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from diloco.cli.app import exit_code
from diloco.options.extras import MODULES
from tests.support.commands import ROOT
from tests.support.documents import MADDR

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("diloco", "peers", "provisioning")
WORKFLOWS = ROOT / ".github/workflows"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], set[str]]:
    """The names of files in the wheel and in the source distribution."""
    if int(metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77 to build; pip install --upgrade setuptools")
    clone, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    # The tests must not be packed.
    (clone / "tests").mkdir()
    (clone / "tests/__init__.py").touch()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for build in ("build_wheel", "build_sdist"):
        code = f"from setuptools import build_meta; build_meta.{build}({str(dist)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    return set(zipfile.ZipFile(wheel).namelist()), packed


def test_wheel_and_source_hold_every_file_of_the_packages_and_nothing_else(built):
    wheel, sdist = built
    files = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel if ".dist-info/" not in name} == files
    assert files | {"pyproject.toml", "README.md", "LICENSE"} <= sdist
    assert {f"{name}/py.typed" for name in PACKAGES} <= files
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
    assert any(name.endswith("/entry_points.txt") for name in wheel)


# What vLLM asks of packages that constraints.txt pins, and numba of llvmlite; copied from their metadata.
_VLLM = "vllm==0.30.0"
_WITH_VLLM = (
    "numba==0.65.0",
    "llvmlite>=0.47.0dev0,<0.48",
    "torch==2.13.0",
    "transformers>=5.10.4",
    "huggingface-hub>=1.31.0",
    "tokenizers>=0.21.1",
    "safetensors>=0.6.2",
    "protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*",
    "starlette>=1.0.1",
    "aiohttp>=3.13.3",
    "pydantic>=2.12.0",
    "prometheus-client>=0.18.0",
    "filelock>=3.16.1",
    "jsonschema>=4.23.0",
    "opentelemetry-sdk>=1.27.0",
    "requests>=2.26.0",
)


def test_the_pinned_versions_can_be_installed_with_vllm():
    """The environments of pods for GRPO have the extra `vllm`, and obey constraints.txt."""
    assert PROJECT["project"]["optional-dependencies"]["vllm"][0].startswith(f"{_VLLM} ;"), (
        "another vLLM: copy the requirements in its metadata into this test"
    )
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    assert not [
        f"{one} is pinned to {pins[one.name]}"
        for one in map(Requirement, _WITH_VLLM)
        if not one.specifier.contains(pins[one.name], prereleases=True)
    ]


def test_the_entry_point_is_a_function():
    module, _, name = PROJECT["project"]["scripts"]["diloco"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (f"dashboard --initial-peers {MADDR}", "uvicorn", "dashboard"),
        ("run --mode grpo --rollout hf --path-model 2m --device cpu", "trl", "grpo"),
        ("run --mode grpo --rollout hf --path-model 2m --device cpu", "reasoning_gym", "grpo"),
        ("run --mode grpo --rollout hf --path-model 2m --device cpu --dataset math", "math_verify", "grpo"),
        (f"peer --initial-peers {MADDR} --mode grpo --rollout hf --device cpu", "peft", "grpo"),
        ("grpo-sweep --instances 1 --path-model 2m --device cpu", "httpx", "grpo"),
        ("run --metric-logger-type wandb", "wandb", "wandb"),
        (f"peer --initial-peers {MADDR} --metric-logger-type tensorboard", "tensorboard", "tensorboard"),
        ("run --ckpt.path s3://bucket/run", "s3fs", "s3"),
        ("run --dataset-name-or-path owner/texts", "datasets", "data"),
        ("run --dataset-name-or-path texts.parquet", "pyarrow", "data"),
        ("provision --provider ssh --offers", "asyncssh", "pods"),
        ("provision --provider lambda --offers", "httpx", "pods"),
        ("provision --provider lium --offers", "lium", "pods"),
        ("experiments run lr_sweep --provider lium --plan", "httpx", "pods"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(command, missing, extra, monkeypatch, tmp_path, capsys):
    """Before it starts anything: no run directory is made."""
    assert extra in PROJECT["project"]["optional-dependencies"]
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LIUM_API_KEY", "none")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests/unit/test_packaging.py", tmp_path / "texts.parquet")
    assert exit_code(command.split()) == 2
    said = " ".join(line.strip("│╭╮╰╯─ ") for line in capsys.readouterr().err.splitlines())
    assert f"pip install 'diloco[{extra}]'" in said
    assert not (tmp_path / "runs").exists()


def test_each_module_that_an_extra_is_looked_up_by_comes_with_it():
    for extra, modules in MODULES.items():
        texts = PROJECT["project"]["optional-dependencies"][extra]
        brought = {word.replace("-", "_") for text in texts for word in re.findall(r"[a-z][\w-]+", text)}
        assert set(modules) <= brought, extra


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_a_workflow_runs_only_commands_and_files_that_exist(name):
    workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["timeout-minutes"] <= 60
        for command in [step["run"] for step in job["steps"] if "run" in step]:
            subprocess.run(["bash", "-n", "-c", command], check=True)
            assert all(target in targets for target in re.findall(r"make ([\w-]+)", command))
            assert all((ROOT / path).is_file() for path in re.findall(r"--constraint (\S+)", command))


def test_only_the_job_that_publishes_may_ask_for_an_identity_and_it_waits_for_the_others():
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}


def test_every_python_that_may_install_it_is_tested():
    matrix = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]["test"]["strategy"]
    named = [text for text in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert matrix["matrix"]["python"] == [text.rpartition(" ")[2] for text in named]
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text(encoding="utf-8")
