"""The Ray job: Ray Train's TorchTrainer places one worker on each node, which starts a program there.

The program is our trainer or any script that takes its rank from torchrun's variables. If one rank dies, Ray restarts
all of them, and the program resumes from its own checkpoint.

    python -m diloco.launch.ray_worker --num-nodes 2 --storage /shared -- -m diloco.train_fsdp --config config.toml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_MAX_FAILURES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when all nodes have finished; raises Ray's error otherwise."""
    arguments, program = _parsed(list(sys.argv[1:] if argv is None else argv))
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from diloco.launch.ray_node import run_node

    ranks = arguments.ranks_per_node
    trainer = TorchTrainer(
        run_node,
        train_loop_config={"program": program, "ranks_per_node": ranks},
        scaling_config=ScalingConfig(
            num_workers=arguments.num_nodes,
            use_gpu=arguments.use_gpu,
            resources_per_worker={"CPU": 1, **({"GPU": ranks} if arguments.use_gpu else {})},
            # A worker starts all ranks of its node, so two workers on one node would share its GPUs.
            placement_strategy="STRICT_SPREAD",
        ),
        # Only for the workers to exchange addresses; the program sets up its own process group.
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="diloco",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )
    trainer.fit()
    return 0


def _parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m diloco.launch.ray_worker", description=__doc__)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--storage", required=True, help="a directory that all nodes share")
    parser.add_argument("--use-gpu", action="store_true")
    index = argv.index("--") if "--" in argv else len(argv)
    arguments, program = parser.parse_args(argv[:index]), argv[index + 1 :]
    if not program:
        parser.error("the program is missing: give it after `--`")
    return arguments, program


if __name__ == "__main__":
    sys.exit(main())
