"""One rank of a process group whose ranks all want the same kernel tuned at once: ``rank.py RANK SIZE FILE``."""

from __future__ import annotations

import json
import sys
import time


def main(rank: int, size: int, file: str) -> None:
    import torch.distributed as dist
    from test_kernel import Config, Problem, made, ran

    import sonde.jit.search as search_module
    from sonde.jit import PickBest, settings
    from sonde.jit.timing import Trial

    searches = []

    def search(*args, **options) -> list[Trial]:
        searches.append(rank)
        time.sleep(1)  # long enough for the others to ask meanwhile
        return [Trial(Config(64), (1.0,) * 5), Trial(Config(16), (2.0,) * 5)]

    search_module.search = search
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    dist.barrier()
    with settings.set(PickBest):
        block = ran(made(), Problem(20))
    everyone: list = [None] * size
    dist.all_gather_object(everyone, (block, searches))
    dist.destroy_process_group()
    print(json.dumps(everyone))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
