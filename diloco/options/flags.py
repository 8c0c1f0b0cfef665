"""What can be configured, one frozen dataclass per concern. The defaults live here and nowhere else.

Fields marked SHARED describe the run and must be the same on all its peers: they make up the manifest, and a
peer that does not name one adopts the swarm's. The rest is each peer's own business.
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
    count_or_auto,
    duration,
    finite,
    loggers,
    rate_or_auto,
    safe_name,
    up_to,
    whole,
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
"""What is used under --mode grpo where nobody names a value: fine-tuning wants less of everything."""

MUON_DEFAULTS: dict[str, int | float] = {"lr": 0.02, "weight_decay": 2e-3}
"""The same under --optimizer muon. MuLoCo (arXiv 2505.23725): rates of 0.016 to 0.063 and weight decays of 5e-4 to 5e-3
from 150M to 3.1B parameters; with these two a step takes as much off a matrix as with AdamW's defaults."""

# Some of these numbers come from other peers: bounded by what torch and msgpack hold.
_LARGEST = 2**48
Count = Annotated[int, Parameter(converter=whole, validator=(at_least(1), up_to(_LARGEST)))]
Whole = Annotated[int, Parameter(converter=whole, validator=(at_least(0), up_to(_LARGEST)))]
Seconds = Annotated[float, Parameter(validator=(finite, at_least(0)))]
Rate = Annotated[float, Parameter(validator=(finite, at_least(0)))]
Name = Annotated[str, Parameter(validator=safe_name)]


def address_list(alias: str = "", *, of_peers: bool = False) -> Parameter:
    """A list flag: `--flag A B`, `--flag A --flag B` and `--flag A,B` mean the same."""
    return Parameter(
        alias=(alias,) if alias else (),
        consume_multiple=1,
        negative="",
        converter=addresses(of_peers=of_peers),
        metavar="MADDR...",
        show_default=lambda value: ", ".join(value) or "none",
    )


def auto(most: float = math.inf) -> Parameter:
    """A number from 0 on that is worked out where it is not given, or given as auto."""
    return Parameter(
        converter=rate_or_auto(most), metavar="NUMBER|auto", show_default=lambda value: value or "auto"
    )


def auto_count() -> Parameter:
    """A whole number from 1 on, or auto."""
    return Parameter(converter=count_or_auto, metavar="INT|auto")


@dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Where and when to save, and what to start from."""

    path: str = "outputs"
    """Directory or URL (s3://…, any that fsspec knows) of the checkpoints; a step's lie in <path>/model_step_<N>/."""
    interval: Count | None = None
    """Inner steps between two checkpoints, which are written while training goes on; none: no checkpoints."""
    resume: str | None = None
    """A model_step_<N> directory or URL, or `auto` for the newest one under the path that is whole."""
    topk: Count | None = None
    """How many of this peer's own checkpoints to keep; none: all."""
    keep: Literal["last", "best"] = "last"
    """Which: the last, or those that evaluations (--eval-every) have scored best, and the last one with them."""
    required: bool = False
    """End the training where a checkpoint cannot be saved; default: say so, and train on."""
    delta_interval: Count | None = None
    """Under --mode grpo: inner steps between two delta checkpoints, of which each holds what has changed in bf16."""
    delta_path: str | None = None
    """Where they go; default: deltas/ in the run directory."""


@dataclass(frozen=True, kw_only=True)
class HvConfig:
    """When, how and with whom this peer averages."""

    run_id: Annotated[Name, Parameter(alias="--run-id")] = "diloco"
    """Name of the run; peers with another one never meet."""
    initial_peers: Annotated[tuple[str, ...], address_list("--initial-peers", of_peers=True)] = ()
    """Addresses (/ip4/…/tcp/…/p2p/…) of any members of the swarm's DHT."""
    galaxy_size: Annotated[Count | None, Parameter(alias="--galaxy-size")] = None
    """Peers to wait for before step 1; default: those the coordinator knows, else 1."""
    world_rank: Annotated[Whole | None, Parameter(alias="--world-rank")] = None
    """This peer's number in the swarm, from 0; default: the coordinator's choice, without one the lowest free."""
    local_steps: Count = field(default=500, metadata=SHARED)
    """Inner steps between two averagings of the same weights (H)."""
    local_time: Annotated[float | None, Parameter(converter=duration, metavar="SECONDS")] = field(
        default=None, metadata=SHARED
    )
    """Time after which --hv.local-steps count as done (120s, 10m, 1h), so that slow peers keep nobody waiting."""
    num_fragments: Count = field(default=1, metadata=SHARED)
    """Parts of the model, averaged in turn (Streaming DiLoCo, arXiv 2501.18512); must divide --hv.local-steps."""
    overlap_steps: Whole = field(default=0, metadata=SHARED)
    """Inner steps trained while a round takes place (tau), fewer than --hv.local-steps / --hv.num-fragments."""
    mixing: Annotated[float | None, Parameter(validator=(finite, at_least(0), up_to(1)))] = field(
        default=None, metadata=SHARED
    )
    """With overlap: merge by alpha x own + (1 - alpha) x new weights (arXiv 2501.18512); default: new + own work."""
    outer_lr: Annotated[float | None, auto()] = field(default=None, metadata=SHARED)
    """Learning rate of the outer Nesterov SGD; auto: by the peers in the round, H, and the inner optimizer."""
    outer_momentum: Annotated[float | None, auto(1.0)] = field(default=None, metadata=SHARED)
    """Momentum of the outer Nesterov SGD; auto: 0.9, under Muon 0.6 to 0.9 by the peers, 0 for topk."""
    compression: Annotated[
        CodecName,
        Parameter(alias="--hv.hivemind-compression", converter=codec),
    ] = field(default="fp32", metadata=SHARED)
    """What pseudo-gradients look like on the wire; hivemind's 8-bit codecs mean int8, scaled-fp16 means fp16."""
    aggregation: Literal["mean", "clip", "trimmed-mean", "centered-clip"] = field(
        default="clip", metadata=SHARED
    )
    """How pseudo-gradients become one: clip scales outliers down; the last two weigh three peers or more alike."""
    max_weight: Annotated[float, Parameter(validator=(finite, at_least(1), up_to(1000)))] = field(
        default=2.0, metadata=SHARED
    )
    """Under clip, a peer counts for so many times the median peer's tokens at most."""
    trim: Annotated[float, Parameter(validator=(finite, at_least(0.01), up_to(0.5)))] = field(
        default=0.2, metadata=SHARED
    )
    """Under trimmed-mean, the part of the peers left out on either side of each value: withstands that many liars."""
    staleness_discount: Annotated[float, Parameter(validator=(finite, at_least(0.01), up_to(1)))] = field(
        default=1.0, metadata=SHARED
    )
    """Work counts for so much less with each commit that it came too late for; 1: for as much."""
    host_maddrs: Annotated[tuple[str, ...], address_list("--host-maddrs")] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses to listen on."""
    announce_maddrs: Annotated[tuple[str, ...], address_list("--announce-maddrs")] = ()
    """Addresses others reach this peer by, where they differ from those it listens on."""
    # Not a docstring: cyclopts would keep its line breaks.
    transport: Annotated[
        Literal["auto", "libp2p", "tcp"],
        Parameter(
            help="What pseudo-gradients travel by: `auto` takes TCP with TLS 1.3 between peers that reach each other, "
            "else libp2p, else a third peer that forwards; `libp2p` never takes the first; `tcp` goes without TLS "
            "where both ends say so: nothing protects the bytes then, so only on a network you trust."
        ),
    ] = "auto"
    data_port: Annotated[int, Parameter(converter=whole, validator=(at_least(0), up_to(65535)))] = 0
    """TCP port for pseudo-gradients, on the hosts of --host-maddrs; 0: any free one."""
    announce_data_maddrs: Annotated[tuple[str, ...], address_list()] = ()
    """Addresses others reach the data port by (port 0: as it is), where they differ from those of --host-maddrs."""
    swarm_secret_file: Annotated[str | None, Parameter(alias="--swarm-secret-file")] = None
    """File with the swarm secret, where the run has one; default: the secret itself in DILOCO_SWARM_SECRET."""
    admission_key_file: Annotated[str | None, Parameter(alias="--admission-key-file")] = None
    """File with the run's admission key: this peer can then admit others in the coordinator's stead."""
    allowlist_file: Annotated[str | None, Parameter(alias="--allowlist-file")] = None
    """With an admission key: file of the peer ids that are admitted, one a line; default: all that have the secret."""
    quorum: Annotated[float, Parameter(validator=(finite, at_least(0.5), up_to(0.99)))] = 0.5
    """A commit needs more than this part of the peers that the last one named; the others' work is in a later one."""
    grace: Annotated[float | None, Parameter(converter=duration, metavar="SECONDS")] = None
    """Time that a quorum waits for the others at most (30s, 2m); default: what they usually need."""
    matchmaking_time: Seconds | None = None
    """Seconds a round waits for its members under NO_WAIT; default 15."""
    averaging_timeout: Seconds | None = None
    """Seconds one attempt at a round may take; default: learned from the rounds before."""
    all_reduce_strategy: Literal["WAIT_FOR_ALL", "NO_WAIT"] = "WAIT_FOR_ALL"
    """Whether a round waits for every live peer, or only for the matchmaking time."""
    timeout_waiting_for_peers: Seconds = 600.0
    """Seconds to wait for the galaxy before starting with those who are there."""
    metrics_port: Annotated[int | None, Parameter(converter=whole, validator=(at_least(0), up_to(65535)))] = (
        None
    )
    """Port on loopback at which Prometheus finds this peer's /metrics; 0: any free one, default: none."""
    fail_rank_drop: bool = False
    """Stop when a peer is lost, instead of going on without it."""
    skip_load_from_peers: bool = False
    """Accepted for compatibility: a peer's weights always come from the swarm."""

    @property
    def steps_per_epoch(self) -> int:
        """Inner steps between two outer steps, of whichever fragment."""
        return self.local_steps // self.num_fragments


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """What is learnt by reinforcement, and who writes the completions."""

    dataset: Annotated[str, Parameter(alias="--dataset")] = field(
        default="reasoning-gym:chain_sum", metadata=SHARED
    )
    """reasoning-gym:<generator>[,option=value...], gsm8k, math or mbpp (from Hugging Face, or <name>=<directory>)."""
    reward: Annotated[str | None, Parameter(metavar="FILE.py:FUNCTION")] = None
    """A function of yours (or module:function) that pays for completions in place of the dataset's rewards."""
    num_generations: Annotated[int, Parameter(converter=whole, validator=(at_least(2), up_to(_LARGEST)))] = (
        field(default=8, metadata=SHARED)
    )
    """Completions of each prompt, which are compared with each other."""
    max_completion_length: Count = field(default=256, metadata=SHARED)
    """Tokens of a completion at most."""
    steps_per_generation: Count | None = field(default=None, metadata=SHARED)
    """Batches of --per-device-train-batch-size that one generation is cut into; default: those of one inner step."""
    num_iterations: Count = field(default=1, metadata=SHARED)
    """How often a generation is trained on."""
    temperature: Annotated[float, Parameter(validator=(finite, at_least(0.01)))] = field(
        default=1.0, metadata=SHARED
    )
    """Of the completions that are trained on."""
    beta: Rate = field(default=0.0, metadata=SHARED)
    """Weight of the divergence from the initial model; 0 needs no copy of it."""
    eval_prompts: Whole = 64
    """Held-out prompts of an evaluation; 0: no evaluation."""
    eval_samples: Count = 5
    """Completions of each of them, for pass@k."""
    rollout: Annotated[Literal["vllm", "hf"], Parameter(alias="--rollout")] = "vllm"
    """Who writes completions: a vLLM server, or the trainer itself, which is slow but needs nothing else."""
    rollout_url: Annotated[
        tuple[str, ...],
        Parameter(alias="--rollout-url", consume_multiple=1, negative="", metavar="URL..."),
    ] = ()
    """vLLM servers that run already (http://host:port); default: this peer starts its own."""
    vllm_port: Annotated[
        int, Parameter(alias="--vllm-port", converter=whole, validator=(at_least(0), up_to(65535)))
    ] = 0
    """Port of this peer's own server, on loopback; 0: any free one."""
    vllm_python: str | None = None
    """The Python that has vLLM, where that is another environment than this one."""
    vllm_gpu: str | None = None
    """The GPU of the own server; default: the last one, which the trainer then does without."""
    vllm_args: Annotated[
        tuple[str, ...],
        Parameter(consume_multiple=1, allow_leading_hyphen=True, negative="", metavar="ARG..."),
    ] = ()
    """More arguments for the own server."""
    vllm_timeout: Seconds = 300.0
    """Seconds the own server may take until it has answered one request."""
    logp_alarm: Rate | None = None
    """A difference between a server's log-probabilities and the trainer's that is worth an alarm; default: by type."""
    run_suffix: Annotated[str, Parameter(alias="--run-suffix")] = ""
    """Ends the names of the run directory and of the run at wandb."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One peer's training."""

    mode: Literal["pretrain", "grpo"] = field(default="pretrain", metadata=SHARED)
    """What the workers do: predict text (diloco.train_fsdp), or learn by reinforcement (diloco.train_grpo)."""
    path_model: str = field(default="2m", metadata=SHARED)
    """A preset (demo, 2m, 15m, 150m, 1b), a directory, or a Hugging Face model id."""
    dataset_name_or_path: str = field(default="stdlib", metadata=SHARED)
    """`stdlib`, text, JSONL or Parquet files (or a directory of them), or a Hugging Face dataset."""
    text_column: str | None = field(default=None, metadata=SHARED)
    """The column that holds the text; default: found by itself."""
    fake_data: bool = field(default=False, metadata=SHARED)
    """Train on random tokens instead of the dataset."""
    seq_length: Annotated[int, Parameter(converter=whole, validator=(at_least(2), up_to(_LARGEST)))] = field(
        default=1024, metadata=SHARED
    )
    """Tokens per sample."""
    total_batch_size: Count = field(default=512, metadata=SHARED)
    """Samples per inner step of one peer, over all its ranks."""
    per_device_train_batch_size: Annotated[int | Literal["auto"], auto_count()] = 32
    """Samples per forward pass of one rank; the default shrinks to what divides the total, auto finds it by trying."""
    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata=SHARED)
    """The inner optimizer; muon: hidden matrices by Muon, the rest by AdamW at a fifth of the rate."""
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
    """Seeds the initial weights and the order of the data."""
    precision: Literal["auto", "fp16-mixed", "bf16-mixed", "32-true"] = "auto"
    """Auto: fp32 on CPU; on GPU bf16 where the device has it, else fp16."""
    torch_compile: bool | None = None
    """Compile the model; default: on GPU only."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"
    ] = "FULL_SHARD"
    """How the ranks of this peer share the model."""
    attn_implementation: Annotated[str, Parameter(validator=attention)] = "sdpa"
    """Attention of the transformers model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    num_workers: Whole = 4
    """Accepted for compatibility: data is read by one background thread."""
    eval_interval: Annotated[Count | None, Parameter(alias="--eval-every")] = None
    """Nominal steps between two evaluations; default: only those before the first step and after the last."""
    eval_tokens: Count = 262_144
    """Held-out tokens an evaluation reads."""
    run_dir: str | None = None
    """Where metrics, logs, plots and the model go; default runs/<UTC time>-<project>."""
    project: str = "diloco"
    """Name of the project, for the run directory and wandb."""
    metric_logger_type: Annotated[str, Parameter(converter=loggers, metavar="wandb|tensorboard|dummy")] = (
        "dummy"
    )
    """wandb, tensorboard, both (apart by a comma), or nothing beside metrics.jsonl."""
    log_activations_steps: Count | None = None
    """Steps between two records of each layer's activation norms; default: none is made."""
    grpo: Annotated[GrpoConfig, Parameter(group="GRPO")] = field(default_factory=GrpoConfig)
    ckpt: Annotated[CkptConfig, Parameter(group="Checkpoints")] = field(default_factory=CkptConfig)
    hv: Annotated[HvConfig, Parameter(group="Swarm")] = field(default_factory=HvConfig)

    @property
    def end_step(self) -> int:
        """Nominal steps at which training ends."""
        return min(self.max_steps or self.total_steps, self.total_steps)

    @property
    def metric_loggers(self) -> tuple[str, ...]:
        """What records go to beside metrics.jsonl."""
        return tuple(name for name in self.metric_logger_type.split(",") if name != "dummy")
