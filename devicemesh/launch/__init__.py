"""Starting ranks on this machine: what `python -m devicemesh run` does."""
