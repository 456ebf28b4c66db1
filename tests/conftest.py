"""What all tests share: the plugin under test is the one that runs them."""

import signal

# A shell that starts this in the background has SIGINT ignored, and so would all that the
# tests start: here Ctrl-C is what it is in the foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["devicemesh.testing.plugin", "pytester"]
