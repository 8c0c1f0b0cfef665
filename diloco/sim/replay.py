"""`python -m diloco.sim.replay SEED`: run one schedule again, and print all that happened in it."""

from __future__ import annotations

import argparse

from diloco.sim import schedules


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diloco.sim.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=0, help="only run so many seeds from this one on")
    arguments = parser.parse_args()
    if arguments.count:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            if fault := schedules.run(seed).fault:
                print(f"{seed}: {fault}")
        return
    print(schedules.report(arguments.seed))


if __name__ == "__main__":
    main()
