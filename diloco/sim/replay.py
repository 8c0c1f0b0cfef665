"""`python -m diloco.sim.replay SEED`: run one schedule again, and print all that happened in it."""

from __future__ import annotations

import argparse

from diloco.sim import schedules


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diloco.sim.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    print(schedules.report(parser.parse_args().seed))


if __name__ == "__main__":
    main()
