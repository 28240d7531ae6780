"""Time the planning of models with more and more modules, beside Accelerate, in one run.

`python tests/bench_planning.py [500 1000 ...]` prints for each size both times, their ratio, and whether the
maps are equal. Times are this machine's; the ratio and the growth are what to read.
"""

import logging
import sys
import time

import accelerate
import torch
from torch import nn

from step05_device_map.device_map import infer_auto_device_map


def timed(plan, model, budgets):
    """Plan once; returns the seconds and the map."""
    start = time.perf_counter()
    device_map = plan(model, dict(budgets))
    return time.perf_counter() - start, dict(device_map)


def main() -> None:
    logging.disable(logging.WARNING)  # Accelerate warns of the accelerators that are not here
    previous = None
    for count in [int(size) for size in sys.argv[1:]] or [500, 1000, 2000, 4000, 8000, 16000]:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
        budgets = {0: count * 20, 1: count * 20, "cpu": count * 80}
        ours, our_map = timed(infer_auto_device_map, model, budgets)
        theirs, their_map = timed(accelerate.infer_auto_device_map, model, budgets)
        growth = f" our_growth={ours / previous:.1f}" if previous else ""
        print(
            f"modules={count} ours_seconds={ours:.3f} accelerate_seconds={theirs:.3f} "
            f"ratio={ours / theirs:.3f}{growth} equal={our_map == their_map}",
            flush=True,
        )
        previous = ours


if __name__ == "__main__":
    main()
