"""What all tests share: the plugin under test is the one that runs them."""

pytest_plugins = ["devicemesh.testing.plugin", "pytester"]
