"""Training on a 2 x 4 mesh of CPU processes, with numpy and nothing of PyTorch.

    python -m devicemesh run -n 8 examples/mesh_2x4.py
    torchrun --nproc-per-node=8 examples/mesh_2x4.py        # the same, unchanged

Eight processes train a small network on scikit-learn's handwritten digits. The mesh says
who does what:

                       model_parallel
                     0    1    2    3
    replicate  0  [  0    1    2    3  ]   each row holds the whole network, in 4 parts,
               1  [  4    5    6    7  ]   and sees its own half of every batch

- Along `model_parallel` the two layers are cut: a rank has a quarter of the first layer's
  columns and the same quarter of the second layer's rows. The forward pass sums the parts of
  the output, the backward pass sums the parts of the gradient that reaches the input.
- Along `replicate` the ranks with the same quarter average their gradients.

At the end every rank trains the same network once more, whole and alone, and compares. The
exit code is 0 only if all parts agree.
"""

import sys

import numpy as np

from devicemesh import DeviceMesh, init_device_mesh

DIMS = ("replicate", "model_parallel")
PIXELS, HIDDEN, CLASSES = 64, 64, 10
TRAINING, TEST = 1400, 397
BATCH, EPOCHS, RATE, MOMENTUM, SEED = 100, 12, 0.1, 0.9, 2024
TOLERANCE = 1e-9  # float64: sums in another order differ by rounding only

# Whole shape of each parameter, and the axis along which `model_parallel` cuts it.
PARAMETERS = {
    "scale": ((PIXELS,), None),
    "shift": ((PIXELS,), None),
    "w1": ((PIXELS, HIDDEN), 1),
    "b1": ((HIDDEN,), 0),
    "w2": ((HIDDEN, CLASSES), 0),
    "b2": ((CLASSES,), None),
}


class Network:
    """One rank's part of: scale and shift the pixels, linear, relu, linear.

    All parameters of the part lie in one flat array, and so do their gradients: one
    all_reduce averages them all. `self.w1` and the others are views of it.
    """

    def __init__(self, mesh):
        self.group = mesh.get_group("model_parallel")
        self.parts = mesh.size("model_parallel")
        self.part = mesh.get_local_rank("model_parallel")

        rng = np.random.default_rng(SEED)  # the same on all ranks
        initial = {
            "scale": np.ones(PIXELS),
            "shift": np.zeros(PIXELS),
            "w1": rng.normal(0, np.sqrt(2 / PIXELS), (PIXELS, HIDDEN)),
            "b1": np.zeros(HIDDEN),
            "w2": rng.normal(0, np.sqrt(1 / HIDDEN), (HIDDEN, CLASSES)),
            "b2": np.zeros(CLASSES),
        }
        parts = {name: self.part_of(name, whole) for name, whole in initial.items()}
        self.parameters = np.concatenate([part.ravel() for part in parts.values()])
        self.gradients = np.zeros_like(self.parameters)
        start = 0
        for name, part in parts.items():
            span = slice(start, start + part.size)
            setattr(self, name, self.parameters[span].reshape(part.shape))
            setattr(self, f"d_{name}", self.gradients[span].reshape(part.shape))
            start += part.size

    def part_of(self, name, whole):
        """This rank's part of a whole parameter."""
        _, axis = PARAMETERS[name]
        return whole if axis is None else np.split(whole, self.parts, axis)[self.part]

    def forward(self, x):
        """Logits, the same on all ranks of the row."""
        self.x = x
        self.scaled = x * self.scale + self.shift
        self.hidden = np.maximum(self.scaled @ self.w1 + self.b1, 0)
        logits = self.hidden @ self.w2  # what my hidden units contribute
        self.group.all_reduce(logits, op="sum")
        return logits + self.b2

    def backward(self, d_logits):
        """Fills the gradients."""
        d_hidden = (d_logits @ self.w2.T) * (self.hidden > 0)
        d_scaled = d_hidden @ self.w1.T  # what comes back through my hidden units
        self.group.all_reduce(d_scaled, op="sum")
        self.d_w2[:] = self.hidden.T @ d_logits
        self.d_b2[:] = d_logits.sum(axis=0)
        self.d_w1[:] = self.scaled.T @ d_hidden
        self.d_b1[:] = d_hidden.sum(axis=0)
        self.d_scale[:] = (d_scaled * self.x).sum(axis=0)
        self.d_shift[:] = d_scaled.sum(axis=0)


def cross_entropy(logits, labels):
    """Mean loss of a batch and its derivative with respect to the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    derivative = np.exp(log_p)
    derivative[rows, labels] -= 1
    return -log_p[rows, labels].mean(), derivative / len(labels)


def train(mesh, images, labels, say=lambda line: None):
    """Trains on `mesh`; this rank's part of the network."""
    network = Network(mesh)
    replicas = mesh.get_group("replicate")
    velocity = np.zeros_like(network.parameters)
    rng = np.random.default_rng(SEED)  # all ranks draw the same batches
    for epoch in range(EPOCHS):
        losses = []
        for batch in rng.permutation(TRAINING).reshape(-1, BATCH):
            # My row's share of the batch.
            mine = np.split(batch, mesh.size("replicate"))[mesh.get_local_rank("replicate")]
            loss, d_logits = cross_entropy(network.forward(images[mine]), labels[mine])
            network.backward(d_logits)
            replicas.all_reduce(network.gradients, op="avg")
            velocity = MOMENTUM * velocity - RATE * network.gradients
            network.parameters += velocity
            losses.append(loss)
        mean = np.array([np.mean(losses)])
        replicas.all_reduce(mean, op="avg")
        say(f"epoch {epoch + 1:2}  loss {mean[0]:.4f}")
    return network


def load_digits(everyone):
    """(images, labels), read by one rank and given to all."""
    images = np.empty((TRAINING + TEST, PIXELS))
    labels = np.empty(TRAINING + TEST, dtype=np.int64)
    if everyone.rank() == 0:
        from sklearn import datasets

        pixels, digits = datasets.load_digits(return_X_y=True)
        order = np.random.default_rng(SEED).permutation(len(digits))
        images[:], labels[:] = pixels[order] / 16, digits[order]
    everyone.broadcast(images, root=0)
    everyone.broadcast(labels, root=0)
    return images, labels


def picture(mesh):
    """The mesh as text: rows are replicas, columns are parts of the network."""
    rows, columns = mesh.shape
    lines = ["              model_parallel", " " * 14 + "".join(f"{c:>4}" for c in range(columns))]
    for r in range(rows):
        name = "replicate" if r == 0 else ""
        lines.append(f"{name:>10} {r:>2} [" + "".join(f"{x:>4}" for x in mesh.mesh[r]) + "  ]")
    return "\n".join(lines)


def main():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=DIMS)
    everyone = mesh.flatten("everyone").get_group()
    first = mesh.get_rank() == 0

    def say(line):
        if first:
            print(line, flush=True)

    say(picture(mesh))
    images, labels = load_digits(everyone)
    network = train(mesh, images[:TRAINING], labels[:TRAINING], say)
    guesses = network.forward(images[TRAINING:]).argmax(axis=1)
    say(f"test accuracy {(guesses == labels[TRAINING:]).mean():.1%}")

    # The same, alone: on a mesh of this rank only no group has anybody to talk to.
    alone = DeviceMesh("cpu", [[mesh.get_rank()]], mesh_dim_names=DIMS)
    whole = train(alone, images[:TRAINING], labels[:TRAINING])
    difference = np.array(
        [
            np.abs(getattr(network, name) - network.part_of(name, getattr(whole, name))).max()
            for name in PARAMETERS
        ]
    )
    everyone.all_reduce(difference, op="max")
    equal = difference.max() < TOLERANCE
    say(
        f"largest difference from training in one process: {difference.max():.1e} "
        f"({'equal' if equal else 'NOT equal'} to float tolerance)"
    )
    mesh.close()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
