"""Tests that run on several processes: a pytest plugin (devicemesh.testing.plugin) and the
function beneath it (devicemesh.testing.ranks.run_ranks)."""
