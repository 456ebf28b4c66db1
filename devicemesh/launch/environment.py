"""The variables that tell a process which rank it is: torchrun's names and meanings."""


def rank_environment(rank: int, world_size: int, host: str, port: int) -> dict[str, str]:
    """What rank `rank` of `world_size` local processes finds in its environment.

    Args:
        rank: 0..world_size-1; all ranks are on this machine, so it is the local rank too.
        world_size: number of ranks.
        host: address of the store.
        port: its port. Whoever starts the ranks serves the store there, which
            TORCHELASTIC_USE_AGENT_STORE tells the ranks: they are clients only.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
