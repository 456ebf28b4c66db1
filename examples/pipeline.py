"""A pipeline of two stages in two copies, with numpy and nothing of PyTorch.

    python -m devicemesh run -n 4 examples/pipeline.py

                  pipeline
                  0    1
    replicate  0  [  0    1  ]    a row is a pipeline: each rank has one layer of a network,
               1  [  2    3  ]    activations go right along it, gradients come back left

Each row works on its own half of the batch, in micro-batches; `mesh.shift("pipeline", 1)`
says who comes next. Ranks with the same stage average their gradients along `replicate`. At
the end every rank does the same alone and compares; the exit code is 0 only if all agree.
"""

import sys

import numpy as np

from devicemesh import init_device_mesh

WIDTHS = (16, 32, 4)  # of the input and of each layer's output
BATCH, MICRO_BATCHES, STEPS, RATE = 64, 4, 40, 1.0
TOLERANCE = 1e-12  # float64: sums in another order differ by rounding only


def initial(stage):
    return np.random.default_rng(stage).normal(0, 0.3, (WIDTHS[stage], WIDTHS[stage + 1]))


def batch_of(step):
    """Inputs and what the network should answer, the same on all ranks."""
    x = np.random.default_rng(1000 + step).normal(size=(BATCH, WIDTHS[0]))
    return x, np.tanh(x[:, : WIDTHS[-1]])


class Stage:
    """One layer, tanh(x @ w), between the ranks before and after it."""

    def __init__(self, mesh):
        self.group = mesh.get_group("pipeline")
        self.index = mesh.get_local_rank("pipeline")
        # Members of the group are numbered in the order of its ranks.
        self.before, self.after = (
            None if rank is None else self.group.ranks.index(rank)
            for rank in (mesh.shift("pipeline", -1), mesh.shift("pipeline", 1))
        )
        self.w = initial(self.index)

    def forward(self, x):
        """Passes a micro-batch on; the first stage reads `x`, the others what comes."""
        if self.before is not None:
            x = np.empty((len(x), WIDTHS[self.index]))
            self.group.recv(x, src=self.before)
        y = np.tanh(x @ self.w)
        if self.after is not None:
            self.group.send(y, dst=self.after)
        return x, y

    def backward(self, x, y, target):
        """The gradient of w; the last stage compares with `target`, the others hear."""
        if self.after is None:
            d_y = 2 * (y - target) / y.size
        else:
            d_y = np.empty_like(y)
            self.group.recv(d_y, src=self.after)
        d_z = d_y * (1 - y * y)
        if self.before is not None:
            self.group.send(np.ascontiguousarray(d_z @ self.w.T), dst=self.before)
        return x.T @ d_z


def train(mesh):
    """This rank's layer after training on the mesh."""
    stage = Stage(mesh)
    replicas = mesh.get_group("replicate")
    copies, copy = mesh.size("replicate"), mesh.get_local_rank("replicate")
    for step in range(STEPS):
        x, target = (np.split(part, copies)[copy] for part in batch_of(step))
        pieces = [np.split(part, MICRO_BATCHES) for part in (x, target)]
        # All go right, then all come back.
        passed = [stage.forward(piece) for piece in pieces[0]]
        gradient = np.zeros_like(stage.w)
        for (seen, y), wanted in zip(passed, pieces[1], strict=True):
            gradient += stage.backward(seen, y, wanted) / MICRO_BATCHES
        replicas.all_reduce(gradient, op="avg")
        stage.w -= RATE * gradient
    return stage.w


def train_alone():
    """All layers, and the loss of each step, in one process."""
    layers = [initial(stage) for stage in range(len(WIDTHS) - 1)]
    losses = []
    for step in range(STEPS):
        x, target = batch_of(step)
        seen = [x]
        for w in layers:
            seen.append(np.tanh(seen[-1] @ w))
        d_y = 2 * (seen[-1] - target) / target.size
        losses.append(np.mean((seen[-1] - target) ** 2))
        for stage in reversed(range(len(layers))):
            d_z = d_y * (1 - seen[stage + 1] ** 2)
            d_y = d_z @ layers[stage].T
            layers[stage] -= RATE * (seen[stage].T @ d_z)
    return layers, losses


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipeline"))
    w = train(mesh)
    layers, losses = train_alone()
    difference = np.array([np.abs(w - layers[mesh.get_local_rank("pipeline")]).max()])
    mesh.flatten("everyone").get_group().all_reduce(difference, op="max")
    equal = difference[0] < TOLERANCE
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(
            f"largest difference from training in one process: {difference[0]:.1e} "
            f"({'equal' if equal else 'NOT equal'} to float tolerance)"
        )
    mesh.close()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
