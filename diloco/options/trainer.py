"""Parses flags and TOML to a TrainConfig, and writes it back. Flags override TOML, which overrides the defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from diloco.errors import UserError
from diloco.options.flags import GRPO_DEFAULTS, MUON_DEFAULTS, GrpoConfig, TrainConfig
from diloco.options.help import HELP_FLAGS, read_page
from diloco.options.parse_errors import parse_error_text
from diloco.options.sources import ValueSource
from peers.core.schedule import Schedule

Scalar = str | int | float | bool | None

TrainFlags = Annotated[TrainConfig, Parameter(name="*", group="Training")]
ConfigPath = Annotated[
    Path | None,
    Parameter(
        name="--config",
        group="Training",
        metavar="FILE.toml",
        help="A TOML file of these flags, with sections [hv], [ckpt] and [grpo]; flags override it.",
    ),
]


def parse_train_config(
    argv: Sequence[str], mode: Literal["pretrain", "grpo"] = "pretrain"
) -> tuple[TrainConfig, frozenset[str]]:
    """Parse a trainer's arguments. Returns the configuration and the dotted names of the fields that the user has set.

    `--help` and `--version` print and raise SystemExit. Raises UserError for invalid arguments.
    """
    source = ValueSource()
    config = _parse(list(argv), source)
    if config.mode != mode and "mode" in source.named:
        raise UserError(f"--mode {config.mode} has another trainer: start {trainer_of(config)}.")
    # Counting `mode` as set makes a swarm of the other mode refuse this peer. train_fsdp, whose mode is the default,
    # checks the swarm's mode itself.
    named = source.named if mode == TrainConfig.mode else source.named | {"mode"}
    return with_fitting_batch_size(with_mode_defaults(replace(config, mode=mode), named), named), named


def trainer_of(config: TrainConfig) -> str:
    """The module that trains in the configuration's mode."""
    return _PROGRAMS[config.mode]


def with_mode_defaults(config: TrainConfig, named: Collection[str]) -> TrainConfig:
    """The configuration with the defaults of its mode and optimizer in the fields that are not in `named`.

    Raises UserError for an optimizer or a dataset of the other mode.
    """
    if config.mode == "grpo" and config.optimizer != "adamw":
        raise UserError(f"--optimizer {config.optimizer} is for pretraining: leave it out with --mode grpo.")
    if config.mode == "pretrain" and "grpo.dataset" in named and config.grpo.dataset != GrpoConfig().dataset:
        raise UserError(
            f"--dataset {config.grpo.dataset} is for --mode grpo, which is not given. To pretrain on it: "
            f"--dataset-name-or-path {config.grpo.dataset}"
        )
    defaults = GRPO_DEFAULTS if config.mode == "grpo" else MUON_DEFAULTS if config.optimizer == "muon" else {}
    own = {name: value for name, value in defaults.items() if name not in named}
    hv: dict[str, Any] = {
        name.removeprefix("hv."): own.pop(name) for name in list(own) if name.startswith("hv.")
    }
    values: dict[str, Any] = {**own, "hv": replace(config.hv, **hv)}
    return replace(config, **values)


def as_rollout_peer(config: TrainConfig, named: Collection[str]) -> tuple[TrainConfig, frozenset[str]]:
    """A rollout peer's configuration, and the fields that count as set by its user.

    These are also the mode, so that the peer refuses a run of another mode, but not the batch size of a device, since
    the peer trains no batches.
    """
    return replace(config, mode="grpo"), frozenset({*named, "mode"} - {"per_device_train_batch_size"})


def with_fitting_batch_size(
    config: TrainConfig, named: Collection[str], *, num_ranks: int = 1
) -> TrainConfig:
    """The configuration with a per-device batch size that divides the batch of each of `num_ranks` ranks.

    A size that the user has not set is reduced to a divisor. Raises UserError if the user's sizes do not divide, and
    peers.errors.UserError for an invalid schedule.
    """
    Schedule.of(shared_values(config))
    total, device = config.total_batch_size, config.per_device_train_batch_size
    if total % num_ranks:
        raise UserError(f"--total-batch-size {total} is not a multiple of this peer's {num_ranks} ranks.")
    per_rank = total // num_ranks
    fitting = next(size for size in range(min(device, per_rank), 0, -1) if per_rank % size == 0)
    if fitting != device and "per_device_train_batch_size" in named:
        ranks = f" by {num_ranks} ranks" if num_ranks > 1 else ""
        raise UserError(
            f"--total-batch-size {total} is not a multiple of --per-device-train-batch-size {device}{ranks}; "
            f"use --per-device-train-batch-size {fitting}."
        )
    return replace(config, per_device_train_batch_size=fitting)


def notes_on_unused_flags(config: TrainConfig, named: Collection[str]) -> list[str]:
    """One sentence for each flag that the user has set without effect."""
    hv, without_streams = config.hv, "with --hv.transport libp2p: there are no direct streams"
    waits_for_all = hv.all_reduce_strategy == "WAIT_FOR_ALL"
    unused = (
        ("num_workers", True, "has no effect: one background thread reads the data"),
        ("hv.skip_load_from_peers", True, "has no effect: a peer always loads the swarm's state"),
        ("ckpt.delta_interval", config.mode != "grpo", "has no effect without --mode grpo"),
        ("hv.mixing", hv.overlap_steps < 1, "has no effect unless --hv.overlap-steps is 1 or more"),
        ("hv.data_port", hv.transport == "libp2p", f"has no effect {without_streams}"),
        ("hv.announce_data_maddrs", hv.transport == "libp2p", f"has no effect {without_streams}"),
        (
            "hv.matchmaking_time",
            waits_for_all,
            "has no effect with WAIT_FOR_ALL: a round waits for all live peers",
        ),
        (
            "sharding_strategy",
            config.mode == "grpo",
            "has no effect with GRPO: each rank has the whole model",
        ),
        (
            "sharding_strategy",
            config.shards_model and config.sharding_strategy == "SHARD_GRAD_OP",
            "SHARD_GRAD_OP is treated as FULL_SHARD",
        ),
        (
            "sharding_strategy",
            config.shards_model and config.sharding_strategy == "_HYBRID_SHARD_ZERO2",
            "_HYBRID_SHARD_ZERO2 is treated as HYBRID_SHARD",
        ),
    )
    values, defaults = flat_values(config), flat_values(TrainConfig())
    return [
        f"{flag_of(name)} {text}."
        for name, applies, text in unused
        if applies and name in named and values[name] != defaults[name]
    ]


def flag_of(name: str) -> str:
    """The flag of a field by its dotted name."""
    return f"--{name.replace('_', '-')}"


def flat_values(config: Any) -> dict[str, Any]:
    """Every field by its dotted name."""
    return {name: value for name, value, _shared in _walk(config, "")}


def shared_fields() -> frozenset[str]:
    """The dotted names of the fields that all peers of a run must agree on."""
    return frozenset(name for name, _value, shared in _walk(TrainConfig(), "") if shared)


def shared_values(config: TrainConfig) -> dict[str, Scalar]:
    """The shared fields by their dotted names: the run's manifest."""
    return {name: value for name, value, shared in _walk(config, "") if shared}


def with_shared(
    config: TrainConfig,
    values: Mapping[str, Scalar],
    *,
    named: Collection[str] = (),
    num_ranks: Callable[[TrainConfig], int] = lambda _: 1,
) -> TrainConfig:
    """The configuration with the values of the swarm's manifest, which are validated since they come from other peers.

    `named` are the fields that this peer's user has set; `num_ranks` is called with the run's settings. Raises
    UserError for unknown fields and values out of range.
    """
    unknown = sorted(set(values) - shared_fields())
    if unknown:
        raise UserError(
            f"The swarm's manifest has fields that this version of diloco does not know: {', '.join(unknown)}. "
            "Install the version that the other peers use."
        )
    source = ValueSource(values={**flat_values(config), **values}, name="the swarm's manifest")
    agreed = _parse([], source)
    return with_fitting_batch_size(agreed, named, num_ranks=num_ranks(agreed))


def to_toml(config: TrainConfig, *, only: Collection[str] | None = None) -> str:
    """The fields that are not None as TOML, which `--config` reads back: all of them, or those in `only`."""
    import tomli_w

    table: dict[str, Any] = {}
    for name, value in flat_values(config).items():
        *sections, key = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        if value is not None and (only is None or name in only):
            place[key] = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps(table)


_PROGRAMS = {"pretrain": "diloco.train_fsdp", "grpo": "diloco.train_grpo"}


def trainer_app(source: ValueSource) -> App:
    """The command line of the trainers."""
    # As in the `diloco` command: if a flag is given twice, the last value counts.
    app = App(
        name="trainer", config=[source], help_flags=(), default_parameter=Parameter(allow_repeating=True)
    )

    @app.default
    def train(train: TrainFlags = TrainConfig(), *, config: ConfigPath = None) -> TrainConfig:  # noqa: B008
        """Train a language model, alone or as a peer of a swarm: diloco.train_fsdp predicts text, diloco.train_grpo
        learns by reinforcement.
        """
        return train

    return app


def _parse(argv: list[str], source: ValueSource) -> TrainConfig:
    if any(word in HELP_FLAGS for word in argv):
        print(read_page(["trainer"]), end="", flush=True)
        raise SystemExit(0)
    try:
        command, bound, _ = trainer_app(source).parse_args(
            argv, exit_on_error=False, print_error=False, verbose=False
        )
    except CycloptsError as error:
        raise UserError(parse_error_text(error)) from error
    result = command(*bound.args, **bound.kwargs)
    if not isinstance(result, TrainConfig):
        raise SystemExit(0)
    return result


def _walk(config: Any, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    for item in fields(config):
        name, value = f"{prefix}{item.name}", getattr(config, item.name)
        if is_dataclass(value):
            yield from _walk(value, f"{name}.")
        else:
            yield name, value, bool(item.metadata.get("shared"))
