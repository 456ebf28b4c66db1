"""``torch.distributed`` without torch: the same names and signatures.

    import devicemesh.distributed as dist

runs a script on CPU that was written for torch's, on numpy arrays as on torch tensors.
``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks. Where
devicemesh does more than torch, the function says so; what is left out is listed, with
reasons, in tests/torch/test_signatures.py.
"""

from devicemesh._core import (
    DeviceMeshError,
    FileStore,
    HashStore,
    PeerError,
    PrefixStore,
    ProcessGroup,
    QueueEmptyError,
    Store,
    StoreError,
    TCPStore,
    Work,
)
from devicemesh.device_mesh import DeviceMesh, init_device_mesh
from devicemesh.distributed import device_mesh
from devicemesh.distributed.coalesced import all_gather_coalesced, all_reduce_coalesced
from devicemesh.distributed.collectives import (
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    barrier,
    broadcast,
    monitored_barrier,
    reduce_scatter_single,
    reduce_scatter_tensor,
    supports_complex,
)
from devicemesh.distributed.groups import (
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from devicemesh.distributed.lifecycle import (
    destroy_process_group,
    get_node_local_rank,
    get_pg_count,
    init_process_group,
    is_initialized,
)
from devicemesh.distributed.lists import (
    all_gather,
    all_to_all,
    all_to_all_single,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from devicemesh.distributed.messages import P2POp, batch_isend_irecv, irecv, isend, recv, send
from devicemesh.distributed.names import (
    Backend,
    get_default_backend_for_device,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from devicemesh.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from devicemesh.distributed.state import GroupMember, default_pg_timeout, group
from devicemesh.reduce_op import ReduceOp

# torch's names of what these functions raise.
DistError = DeviceMeshError
DistBackendError = DeviceMeshError
DistNetworkError = PeerError
DistStoreError = StoreError

__all__ = [
    "Backend",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "device_mesh",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
    "supports_complex",
]
