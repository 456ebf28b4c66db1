"""python -m devicemesh run -n 8 examples/hello_mesh.py"""

import numpy as np

from devicemesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "model_parallel"))

value = np.array([float(mesh.get_rank())])
mesh.get_group("model_parallel").all_reduce(value, op="sum")  # over the four ranks of my row
row = value[0]
mesh.get_group("replicate").all_reduce(value, op="avg")  # over the two ranks of my column

print(f"rank {mesh.get_rank()} at {mesh.get_coordinate()}: row {row:g}, mean of rows {value[0]:g}")
