"""A parameter server: rank 0 takes gradients from whoever is ready, by send and recv.

    python -m devicemesh run -n 4 examples/torch_scripts/parameter_server.py
    torchrun --nproc-per-node=4 examples/torch_scripts/parameter_server.py torch.distributed

The argument names the module to use in the place of torch.distributed; nothing else differs.
"""

import importlib
import json
import sys

import numpy as np

MODULE = sys.argv[1] if len(sys.argv) > 1 else "devicemesh.distributed"
ARRAYS = sys.argv[2] if len(sys.argv) > 2 else "torch" if MODULE.startswith("torch") else "numpy"
dist = importlib.import_module(MODULE)

STEPS, GRADIENT, PARAMETERS = 10, 1, 2


def tensor(array):
    """What is handed to `dist`: the array, or a torch tensor over the same memory."""
    return importlib.import_module("torch").from_numpy(array) if ARRAYS == "torch" else array


def serve(size):
    parameters = np.zeros(8)
    served = [0] * size
    for _ in range(STEPS):
        total = np.zeros(8)
        waiting = []
        gradient = np.empty(8)
        for _ in range(size - 1):
            source = dist.recv(tensor(gradient), tag=GRADIENT)  # from any
            waiting.append(source)
            total += gradient
        parameters -= total / 1024
        for source in waiting:
            dist.send(tensor(parameters), dst=source, tag=PARAMETERS)
            served[source] += 1
    assert served[1:] == [STEPS] * (size - 1)
    return parameters


def work(rank):
    parameters = np.zeros(8)
    for step in range(STEPS):
        # Small whole numbers: their sums do not depend on who came first.
        gradient = np.arange(8.0) * rank + step + np.round(parameters)
        dist.send(tensor(gradient), dst=0, tag=GRADIENT)
        assert dist.recv(tensor(parameters), src=0, tag=PARAMETERS) == 0
    return parameters


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = serve(size) if rank == 0 else work(rank)
    everywhere = [np.empty(8) for _ in range(size)] if rank == 0 else None
    dist.gather(tensor(parameters), everywhere and [tensor(each) for each in everywhere], dst=0)
    if rank == 0:
        assert all(np.array_equal(each, parameters) for each in everywhere)
        print(json.dumps({"parameters": list(parameters)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
