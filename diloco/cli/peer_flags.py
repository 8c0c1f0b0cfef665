"""What can be told, before there are pods, of the flags that `diloco provision` passes to every peer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.options.model_files import load_model_config, may_be_hub_id, preset_names
from diloco.options.sources import ValueSource
from diloco.options.trainer import TrainConfig, parse_error_text, with_fitting_batch_size, with_mode_defaults

if TYPE_CHECKING:
    from provisioning.machines.setup import Setup


def check_peer_flags(flags: Sequence[str], setup: Setup) -> None:
    """Raises UserError for flags that a peer refuses on whatever pod it starts.

    Data sets, GPUs, packages and files that only the pods have are not judged.
    """
    from provisioning.swarm.commands import check_flags

    check_flags(flags)
    files = PodFiles(setup)
    source = ValueSource(find=files.config_here)
    given = _parsed(flags, source)
    if given["config"] is None or files.config_here(given["config"]):
        _check_settings(given, source.named, files)


@dataclass(frozen=True)
class PodFiles:
    """Which files of this machine are on the pods. Relative paths begin in a pod's directory there."""

    setup: Setup

    def here(self, path: str | Path) -> Path | None:
        """What is sent to this path; None: nothing is."""
        from provisioning.machines.paths import CODE

        there = PurePosixPath(path)
        sent = [(CODE, self.setup.source), *((mount.place, mount.source) for mount in self.setup.mounts)]
        found = (source / there.relative_to(place) for place, source in sent if there.is_relative_to(place))
        return None if ".." in there.parts else next(found, None)

    def config_here(self, path: Path) -> Path | None:
        """As `here`. Raises UserError for a file that is here and not sent."""
        found = self.here(path)
        if found is None:
            _check_not_left_behind("--config", str(path))
        return found

    def model_here(self, path_model: str) -> str | None:
        """What this machine calls the model; None: only the pods can tell. Raises UserError as `config_here`."""
        if path_model in preset_names():
            return path_model
        if (found := self.here(path_model)) is not None:
            return str(found)
        if may_be_hub_id(path_model):
            return None
        _check_not_left_behind("--path-model", path_model)
        # A word without a slash is a misspelt preset.
        return None if {"/", "~"} & set(path_model) else path_model


def _parsed(flags: Sequence[str], source: ValueSource) -> dict[str, Any]:
    """The arguments of `diloco peer` by name. Raises UserError."""
    from cyclopts import App, CycloptsError, Parameter

    from diloco.cli.peer import peer

    # As in the `diloco` command: of a flag that is given twice, the last one counts.
    app = App(name="peer", config=[source], help_flags=(), default_parameter=Parameter(allow_repeating=True))
    app.default(peer)
    try:
        _, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise UserError(
            f"{parse_error_text(error)}\nWhat follows `--` is for every peer: see `diloco peer --help`."
        ) from error
    bound.apply_defaults()
    return bound.arguments


def _check_settings(given: Mapping[str, Any], named: Collection[str], files: PodFiles) -> None:
    """What has to fit together, as `diloco peer` checks it. Raises UserError."""
    from diloco.cli.machine_recipes import possible
    from diloco.train.devices import num_ranks
    from peers.errors import UserError as PeersUserError

    train, generates = given["train"], given["role"] == "rollout"
    # How many GPUs there are, only the pods know.
    ranks = num_ranks(given["nproc_per_node"], "cpu", 0)
    train = with_mode_defaults(replace(train, mode="grpo") if generates else train, named)
    brings_own_model = generates or given["worker"] is not None
    configs = [train] if brings_own_model else possible(train, named, num_ranks=ranks)
    refusals: list[Exception] = []
    for config in configs:
        try:
            with_fitting_batch_size(config, named, num_ranks=ranks)
            if not brings_own_model:
                _check_task_and_model(config, files)
        except (UserError, PeersUserError) as error:
            refusals.append(error)
    # What suits one pod's machine and not another's is left to the pods.
    if len(refusals) == len(configs):
        raise refusals[0]


def _check_task_and_model(config: TrainConfig, files: PodFiles) -> None:
    from diloco.doctor.before_start import check_fragments
    from diloco.rl.task_choice import check_task_name

    if config.mode == "grpo":
        check_task_name(config.grpo.dataset)
    if (model := files.model_here(config.path_model)) is None:
        return
    load_model_config(model)
    if config.mode == "pretrain":
        check_fragments(replace(config, path_model=model))


def _check_not_left_behind(flag: str, path: str) -> None:
    there = PurePosixPath(path)
    if not there.is_absolute() and ".." not in there.parts and Path(path).exists():
        raise UserError(
            f"{flag} {path} is here, but is not sent to the pods: add --mount {path}:{path} before the `--`."
        )
