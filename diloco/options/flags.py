"""The configuration of a trainer and its peer: one frozen dataclass per concern, with all defaults.

Fields marked SHARED describe the run and must be the same on all its peers. They make up the manifest; a peer takes
over the swarm's value for each one that its user does not set. All other fields may differ between peers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco.options.checks import (
    addresses,
    at_least,
    attention,
    codec,
    duration,
    duration_or_auto,
    finite,
    loggers,
    rate_or_auto,
    safe_name,
    up_to,
    whole,
    whole_or_auto,
)
from peers.protocol.codecs import CodecName

SHARED = {"shared": True}
GRPO_DEFAULTS: dict[str, int | float] = {
    "lr": 1e-6,
    "weight_decay": 0.0,
    "warmup_steps": 10,
    "total_steps": 1000,
    "total_batch_size": 64,
    "hv.local_steps": 20,
}
"""Defaults under --mode grpo, where fine-tuning needs smaller values."""

MUON_DEFAULTS: dict[str, int | float] = {"lr": 0.02, "weight_decay": 2e-3}
"""Defaults under --optimizer muon. MuLoCo (arXiv 2505.23725) uses rates of 0.016 to 0.063 and weight decays of 5e-4 to
5e-3 from 150M to 3.1B parameters. The product of rate and decay, by which a step shrinks a matrix, is the same as for
AdamW's defaults."""

# Some values come from other peers' manifests, so numbers are limited to what torch and msgpack can represent.
LARGEST = 2**48
Count = Annotated[int, Parameter(converter=whole, validator=(at_least(1), up_to(LARGEST)))]
Whole = Annotated[int, Parameter(converter=whole, validator=(at_least(0), up_to(LARGEST)))]
Seconds = Annotated[float, Parameter(validator=(finite, at_least(0)))]
Rate = Annotated[float, Parameter(validator=(finite, at_least(0)))]
Name = Annotated[str, Parameter(validator=safe_name)]
Port = Annotated[int, Parameter(converter=whole, validator=(at_least(0), up_to(65535)))]
Switch = Annotated[bool, Parameter(negative="")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]


def address_list(alias: str = "", *, of_peers: bool = False) -> Parameter:
    """A flag for a list of addresses: `--flag A B`, `--flag A --flag B` and `--flag A,B` mean the same."""
    return Parameter(
        alias=(alias,) if alias else (),
        consume_multiple=1,
        negative="",
        converter=addresses(of_peers=of_peers),
        metavar="MADDR...",
        show_default=lambda value: ", ".join(value) or "none",
    )


def auto(maximum: float = math.inf) -> Parameter:
    """A flag for a number from 0 to `maximum`, whose default `auto` is computed."""
    return Parameter(
        converter=rate_or_auto(maximum), metavar="NUMBER|auto", show_default=lambda value: value or "auto"
    )


@dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Where and when to save checkpoints, and which one to resume from."""

    path: str = "outputs"
    """Directory or URL (s3://…, any that fsspec supports) of the checkpoints, which are in <path>/model_step_<N>/."""
    interval: Count | None = None
    """Inner steps between two checkpoints, which are written while training continues; default: no checkpoints."""
    resume: str | None = None
    """A model_step_<N> directory or URL, or `auto` for the newest complete one under the path."""
    topk: Count | None = None
    """Number of this peer's most recent checkpoints to keep; default: all."""
    required: bool = False
    """End the training if a checkpoint cannot be saved; default: log the error and continue."""
    delta_interval: Count | None = None
    """With --mode grpo: inner steps between two delta checkpoints, which hold the changes of the bf16 weights."""
    delta_path: str | None = None
    """Directory of the delta checkpoints; default: deltas/ in the run directory."""


@dataclass(frozen=True, kw_only=True)
class HvConfig:
    """When, how and with whom this peer averages."""

    run_id: Annotated[Name, Parameter(alias="--run-id")] = "diloco"
    """Name of the run; peers of different runs ignore each other. `diloco run` takes its run directory's name."""
    initial_peers: Annotated[tuple[str, ...], address_list("--initial-peers", of_peers=True)] = ()
    """Addresses (/ip4/…/tcp/…/p2p/…) of one or more members of the swarm's DHT."""
    galaxy_size: Annotated[Count | None, Parameter(alias="--galaxy-size")] = None
    """Number of peers to wait for before step 1; default: as many as the coordinator knows, else 1."""
    world_rank: Annotated[Whole | None, Parameter(alias="--world-rank")] = None
    """This peer's number in the swarm, from 0; default: assigned by the coordinator, without one the lowest free."""
    local_steps: Count = field(default=500, metadata=SHARED)
    """Inner steps between two averagings of the same weights (H)."""
    local_time: Annotated[float | None, Parameter(converter=duration_or_auto, metavar="SECONDS|auto")] = (
        field(default=None, metadata=SHARED)
    )
    """Time after which an epoch ends even if --hv.local-steps are not done, so that slow peers delay nobody: 120s, 10m,
    or auto: the time that trains the most tokens; default: no limit."""
    num_fragments: Count = field(default=1, metadata=SHARED)
    """Parts of the model, averaged in turn (Streaming DiLoCo, arXiv 2501.18512); must divide --hv.local-steps."""
    overlap_steps: Annotated[int, Parameter(converter=whole_or_auto, metavar="NUMBER|auto")] = field(
        default=0, metadata=SHARED
    )
    """Inner steps to train during a round (tau), less than --hv.local-steps / --hv.num-fragments; auto: as many as the
    round takes, at most one epoch."""
    mixing: Annotated[float | None, Parameter(validator=(finite, at_least(0), up_to(1)))] = field(
        default=None, metadata=SHARED
    )
    """With overlap: alpha in alpha x own + (1 - alpha) x new weights (arXiv 2501.18512); default: new + own work."""
    outer_lr: Annotated[float | None, auto()] = field(default=None, metadata=SHARED)
    """Learning rate of the outer Nesterov SGD; auto depends on the peers in the round, H and the inner optimizer."""
    outer_momentum: Annotated[float | None, auto(1.0)] = field(default=None, metadata=SHARED)
    """Momentum of the outer Nesterov SGD; auto: 0.9, with Muon 0.6 to 0.9 depending on the peers, 0 for topk."""
    compression: Annotated[
        CodecName,
        Parameter(alias="--hv.hivemind-compression", converter=codec),
    ] = field(default="fp32", metadata=SHARED)
    """Codec of pseudo-gradients on the wire; hivemind's 8-bit codecs mean int8, scaled-fp16 means fp16."""
    aggregation: Literal["mean", "clip", "trimmed-mean", "centered-clip"] = field(
        default="clip", metadata=SHARED
    )
    """How pseudo-gradients are averaged: clip scales outliers down; the last two weigh peers equally."""
    max_weight: Annotated[float, Parameter(validator=(finite, at_least(1), up_to(1000)))] = field(
        default=2.0, metadata=SHARED
    )
    """With clip, a peer's weight (its tokens) is limited to this multiple of the median weight."""
    trim: Annotated[float, Parameter(validator=(finite, at_least(0.01), up_to(0.5)))] = field(
        default=0.2, metadata=SHARED
    )
    """With trimmed-mean, the fraction of peers left out at each end of every value: the tolerated fraction of liars."""
    staleness_discount: Annotated[float, Parameter(validator=(finite, at_least(0.01), up_to(1)))] = field(
        default=1.0, metadata=SHARED
    )
    """Factor on the weight of late work for each commit that it missed; 1: no discount."""
    host_maddrs: Annotated[tuple[str, ...], address_list("--host-maddrs")] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses to listen on."""
    announce_maddrs: Annotated[tuple[str, ...], address_list("--announce-maddrs")] = ()
    """Addresses at which others reach this peer, if they differ from those it listens on."""
    # Not a docstring: cyclopts would keep its line breaks.
    transport: Annotated[
        Literal["auto", "libp2p", "tcp"],
        Parameter(
            help="Transport of pseudo-gradients: `auto` uses TCP with TLS 1.3 between peers that reach each other, "
            "else libp2p, else a third peer that forwards; `libp2p` does not use TCP with TLS; `tcp` omits TLS if "
            "both peers set it: the data is then not encrypted, so use it only on a network you trust. It is the "
            "default of `diloco run`, whose peers listen on loopback."
        ),
    ] = "auto"
    data_port: Port = 0
    """TCP port for pseudo-gradients, on the hosts of --host-maddrs; 0: any free one."""
    announce_data_maddrs: Annotated[tuple[str, ...], address_list()] = ()
    """Addresses at which others reach the data port (port 0: unchanged), if they differ from those of --host-maddrs."""
    swarm_secret_file: Annotated[str | None, Parameter(alias="--swarm-secret-file")] = None
    """File with the swarm secret, if the run has one; default: the secret itself in DILOCO_SWARM_SECRET."""
    admission_key_file: Annotated[str | None, Parameter(alias="--admission-key-file")] = None
    """File with the run's admission key, with which this peer can admit others instead of the coordinator."""
    allowlist_file: Annotated[str | None, Parameter(alias="--allowlist-file")] = None
    """With an admission key: file of the peer ids to admit, one per line; default: all peers that have the secret."""
    quorum: Annotated[float, Parameter(validator=(finite, at_least(0.5), up_to(0.99)))] = 0.5
    """A commit needs more than this fraction of the roster; the work of absent peers goes into a later commit."""
    grace: Annotated[float | None, Parameter(converter=duration, metavar="SECONDS")] = None
    """Longest time that a quorum waits for the other peers (30s, 2m); default: the time that they usually take."""
    matchmaking_time: Seconds | None = None
    """Seconds that a round waits for its members with NO_WAIT; default 15."""
    averaging_timeout: Seconds | None = None
    """Time limit in seconds of one attempt at a round; default: learned from earlier rounds."""
    all_reduce_strategy: Literal["WAIT_FOR_ALL", "NO_WAIT"] = "WAIT_FOR_ALL"
    """Whether a round waits for every live peer, or only for the matchmaking time."""
    timeout_waiting_for_peers: Seconds = 600.0
    """Seconds to wait for --hv.galaxy-size peers before starting with fewer."""
    metrics_port: Port | None = None
    """Port on loopback that serves this peer's /metrics to Prometheus; 0: any free one, default: none."""
    fail_rank_drop: bool = False
    """Stop when a peer is lost, instead of continuing without it."""
    skip_load_from_peers: bool = False
    """Accepted for compatibility: a peer's weights always come from the swarm."""

    @property
    def steps_per_epoch(self) -> int:
        """Inner steps between two outer steps, each of which averages one fragment."""
        return self.local_steps // self.num_fragments


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The task of GRPO, and where completions are generated."""

    dataset: Annotated[str, Parameter(alias="--dataset")] = field(
        default="reasoning-gym:chain_sum", metadata=SHARED
    )
    """reasoning-gym:<generator>[,option=value...]; gsm8k, math or mbpp (or <name>=<directory>); or file.py:Class, your
    own environment."""
    reward: Annotated[str | None, Parameter(metavar="FILE.py:FUNCTION")] = None
    """Your own reward function (or module:function), instead of the dataset's rewards."""
    num_generations: Annotated[int, Parameter(converter=whole, validator=(at_least(2), up_to(LARGEST)))] = (
        field(default=8, metadata=SHARED)
    )
    """Completions per prompt; GRPO compares them with each other."""
    max_completion_length: Count = field(default=256, metadata=SHARED)
    """Maximum number of tokens of a completion."""
    steps_per_generation: Count | None = field(default=None, metadata=SHARED)
    """Batches of --per-device-train-batch-size per generation; default: as many as one inner step has."""
    num_iterations: Count = field(default=1, metadata=SHARED)
    """Number of times that each generation is trained on."""
    temperature: Annotated[float, Parameter(validator=(finite, at_least(0.01)))] = field(
        default=1.0, metadata=SHARED
    )
    """Sampling temperature of the completions to train on."""
    beta: Rate = field(default=0.0, metadata=SHARED)
    """Weight of the KL divergence from the initial model, which must then be the same on all peers; 0 needs no copy of
    it."""
    lora_rank: Count | None = field(default=None, metadata=SHARED)
    """Train adapters of this rank (LoRA) in place of the weights, which must then be the same on all peers."""
    eval_prompts: Whole = 64
    """Held-out prompts per evaluation; 0: no evaluation."""
    eval_samples: Count = 5
    """Completions per held-out prompt, for pass@k."""
    rollout: Annotated[Literal["vllm", "hf", "peers"], Parameter(alias="--rollout")] = "vllm"
    """What generates completions: a vLLM server, transformers (hf; slow), or peers with --role rollout."""
    max_staleness: Whole = 8
    """With --rollout peers: maximum age of a rollout's policy in optimizer steps; older rollouts are dropped."""
    vllm_python: str | None = None
    """The Python interpreter that has vLLM, if it is in another environment than this one."""
    vllm_gpu: str | None = None
    """The GPU of this peer's server; default: the last one, which the trainer then does not use."""
    vllm_args: Annotated[
        tuple[str, ...],
        Parameter(consume_multiple=1, allow_leading_hyphen=True, negative="", metavar="ARG..."),
    ] = ()
    """Additional arguments for this peer's server."""
    vllm_timeout: Seconds = 300.0
    """While this peer's server starts: seconds without a new line in its log after which it is given up, or 12 times
    as many in all."""
    logp_alarm: Rate | None = None
    """Limit of the mean difference between the server's log-probabilities and the trainer's; default: by dtype."""
    run_suffix: Annotated[str, Parameter(alias="--run-suffix")] = ""
    """Suffix of the names of the run directory and of the wandb run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training of one peer."""

    mode: Literal["pretrain", "grpo"] = field(default="pretrain", metadata=SHARED)
    """What the workers do: pretraining (diloco.train_fsdp), or reinforcement learning (diloco.train_grpo)."""
    path_model: str = field(default="2m", metadata=SHARED)
    """A preset (demo, 2m, 15m, 150m, 1b), a directory, or a Hugging Face model id."""
    dataset_name_or_path: str = field(default="stdlib", metadata=SHARED)
    """`stdlib`, text, JSONL or Parquet files (or a directory of them), or a Hugging Face dataset."""
    text_column: str | None = field(default=None, metadata=SHARED)
    """The column of the dataset that holds the text; default: chosen automatically."""
    fake_data: bool = field(default=False, metadata=SHARED)
    """Train on random tokens instead of the dataset."""
    seq_length: Annotated[int, Parameter(converter=whole, validator=(at_least(2), up_to(LARGEST)))] = field(
        default=1024, metadata=SHARED
    )
    """Tokens per sample."""
    total_batch_size: Count = field(default=512, metadata=SHARED)
    """Samples per inner step of one peer, over all its ranks."""
    per_device_train_batch_size: Count = 32
    """Samples per forward pass of one rank; the default shrinks to a divisor of the total."""
    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata=SHARED)
    """The inner optimizer; muon uses Muon for hidden matrices and AdamW at a fifth of the rate for the rest."""
    lr: Rate = field(default=4e-4, metadata=SHARED)
    """Peak learning rate of the inner optimizer."""
    weight_decay: Rate = field(default=0.1, metadata=SHARED)
    """Weight decay of the inner optimizer, on matrices only."""
    warmup_steps: Whole = field(default=1000, metadata=SHARED)
    """Nominal steps of linear warm-up."""
    total_steps: Count = field(default=88_000, metadata=SHARED)
    """Nominal steps of the cosine schedule; training ends after them."""
    max_steps: Count | None = field(default=None, metadata=SHARED)
    """End training after this many nominal steps, without changing the schedule; default: --total-steps."""
    max_grad_norm: Rate = field(default=1.0, metadata=SHARED)
    """Gradients are clipped to this norm."""
    seed: Whole = field(default=42, metadata=SHARED)
    """Seed of the initial weights and of the order of the data."""
    precision: Literal["auto", "fp16-mixed", "bf16-mixed", "32-true"] = "auto"
    """Auto: fp32 on CPU; on GPU bf16 if the device supports it, else fp16."""
    torch_compile: bool | None = None
    """Compile the model; default: on GPU only."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"
    ] = "FULL_SHARD"
    """How the model is sharded over the ranks of this peer."""
    attn_implementation: Annotated[str, Parameter(validator=attention)] = "sdpa"
    """Attention implementation of the transformers model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    num_workers: Whole = 4
    """Accepted for compatibility: data is read by one background thread."""
    eval_interval: Annotated[Count | None, Parameter(alias="--eval-every")] = None
    """Nominal steps between two evaluations; default: evaluate only before the first step and after the last."""
    eval_tokens: Count = 262_144
    """Held-out tokens per evaluation."""
    run_dir: str | None = None
    """Directory for metrics, logs, plots and the model; default runs/<UTC time>-<project>."""
    project: str = "diloco"
    """Name of the project, for the run directory and wandb."""
    metric_logger_type: Annotated[str, Parameter(converter=loggers, metavar="wandb|tensorboard|dummy")] = (
        "dummy"
    )
    """wandb, tensorboard, both (separated by a comma), or dummy: only metrics.jsonl."""
    log_activations_steps: Count | None = None
    """Steps between two records of each layer's activation norms; default: no records."""
    grpo: Annotated[GrpoConfig, Parameter(group="GRPO")] = field(default_factory=GrpoConfig)
    ckpt: Annotated[CkptConfig, Parameter(group="Checkpoints")] = field(default_factory=CkptConfig)
    hv: Annotated[HvConfig, Parameter(group="Swarm")] = field(default_factory=HvConfig)

    @property
    def trains_adapters(self) -> bool:
        return self.mode == "grpo" and self.grpo.lora_rank is not None

    @property
    def shards_model(self) -> bool:
        """Whether this peer's ranks share one copy of the model; in GRPO each has its own."""
        return self.mode == "pretrain" and self.sharding_strategy != "NO_SHARD"

    @property
    def copies_state(self) -> bool:
        """Whether the trainer keeps a host copy of weights and optimizer state, from which checkpoints are written."""
        return self.mode == "pretrain" and self.ckpt.interval is not None

    @property
    def end_step(self) -> int:
        """Nominal steps at which training ends."""
        return min(self.max_steps or self.total_steps, self.total_steps)

    @property
    def metric_loggers(self) -> tuple[str, ...]:
        """The loggers that receive records besides metrics.jsonl."""
        return tuple(name for name in self.metric_logger_type.split(",") if name != "dummy")
