"""Checks the flags that `diloco provision` passes to every peer, before any pod is rented."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.options.extras import extras_of
from diloco.options.model_files import load_model_config, may_be_hub_id, preset_names
from diloco.options.parse_errors import parse_error_text
from diloco.options.sources import ValueSource
from diloco.options.trainer import (
    TrainConfig,
    as_rollout_peer,
    with_fitting_batch_size,
    with_mode_defaults,
)

if TYPE_CHECKING:
    from provisioning.machines.setup import Setup


def check_peer_flags(flags: Sequence[str], setup: Setup) -> list[str]:
    """The extras that peers with these flags need. Raises UserError for flags that a peer would refuse on every pod.

    Does not check what depends on the pods: data sets, GPUs, and files that only the pods have.
    """
    from provisioning.swarm.commands import check_flags

    check_flags(flags)
    files = PodFiles(setup)
    source = ValueSource(find=files.local_config)
    given = _parsed(flags, source)
    if given["config"] is None or files.local_config(given["config"]):
        return _check_settings(given, source.named, files)
    return []


@dataclass(frozen=True)
class PodFiles:
    """Maps paths on the pods to files of this machine. Relative paths start at the working directory on a pod."""

    setup: Setup

    def local_path(self, path: str | Path) -> Path | None:
        """The file that is copied to this path on the pods; None if there is none."""
        from provisioning.machines.paths import CODE

        there = PurePosixPath(path)
        sent = [(CODE, self.setup.source), *((mount.place, mount.source) for mount in self.setup.mounts)]
        found = (source / there.relative_to(place) for place, source in sent if there.is_relative_to(place))
        return None if ".." in there.parts else next(found, None)

    def local_config(self, path: Path) -> Path | None:
        """As `local_path`. Raises UserError if the file exists on this machine and is not copied."""
        found = self.local_path(path)
        if found is None:
            _check_not_left_behind("--config", str(path))
        return found

    def local_model(self, path_model: str) -> str | None:
        """The model's name or directory on this machine; None: only on the pods. Raises UserError as `local_config`."""
        if path_model in preset_names():
            return path_model
        if (found := self.local_path(path_model)) is not None:
            return str(found)
        if may_be_hub_id(path_model):
            return None
        _check_not_left_behind("--path-model", path_model)
        # A name without a slash is a misspelt preset, which the caller reports.
        return None if {"/", "~"} & set(path_model) else path_model


def _parsed(flags: Sequence[str], source: ValueSource) -> dict[str, Any]:
    """The arguments of `diloco peer` by name. Raises UserError."""
    from cyclopts import App, CycloptsError, Parameter

    from diloco.cli.peer import peer

    # As in the `diloco` command: if a flag is given twice, the last value counts.
    app = App(name="peer", config=[source], help_flags=(), default_parameter=Parameter(allow_repeating=True))
    app.default(peer)
    try:
        _, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise UserError(
            f"{parse_error_text(error)}\nArguments after `--` are flags of every peer: see `diloco peer --help`."
        ) from error
    bound.apply_defaults()
    return bound.arguments


def _check_settings(given: Mapping[str, Any], named: Collection[str], files: PodFiles) -> list[str]:
    """Check the settings as `diloco peer` does, and return the extras that they need.

    Raises UserError if they suit no machine.
    """
    from diloco.cli.machine_recipes import possible
    from diloco.train.devices import num_ranks
    from peers.errors import UserError as PeersUserError

    train, is_rollout = given["train"], given["role"] == "rollout"
    if is_rollout:
        train, named = as_rollout_peer(train, named)
    # The number of GPUs of a pod is not known here.
    ranks = num_ranks(given["nproc_per_node"], "cpu", 0)
    train = with_mode_defaults(train, named)
    has_own_model = is_rollout or given["worker"] is not None
    configs = [train] if has_own_model else possible(train, named, num_ranks=ranks)
    refusals: list[Exception] = []
    for config in configs:
        try:
            with_fitting_batch_size(config, named, num_ranks=ranks)
            if not has_own_model:
                _check_task_and_model(config, files)
        except (UserError, PeersUserError) as error:
            refusals.append(error)
    # Settings that suit some machines are left to the checks on the pods.
    if len(refusals) == len(configs):
        raise refusals[0]
    return [] if given["worker"] is not None else _extras_on_pods(train)


def _extras_on_pods(config: TrainConfig) -> list[str]:
    starts_server = config.mode == "grpo" and config.grpo.rollout == "vllm" and not config.grpo.vllm_python
    return [*extras_of(config), *(["vllm"] if starts_server else [])]


def _check_task_and_model(config: TrainConfig, files: PodFiles) -> None:
    from diloco.doctor.before_start import check_fragments
    from diloco.rl.task_choice import check_task_name

    if config.mode == "grpo":
        check_task_name(config.grpo.dataset)
    if (model := files.local_model(config.path_model)) is None:
        return
    load_model_config(model)
    if config.mode == "pretrain":
        check_fragments(replace(config, path_model=model))


def _check_not_left_behind(flag: str, path: str) -> None:
    there = PurePosixPath(path)
    if not there.is_absolute() and ".." not in there.parts and Path(path).exists():
        raise UserError(
            f"{flag} {path} exists here, but is not copied to the pods: add --mount {path}:{path} before the `--`."
        )
