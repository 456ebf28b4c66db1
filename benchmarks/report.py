"""What the benchmarks share: figures with their spread, on the screen and as JSON."""

import json
import os
import platform
import statistics
import sys
from pathlib import Path


def summary(values):
    """Median and spread of some measurements."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quartiles": [quarters[0], quarters[2]],
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "values": values,
    }


def show(name, measured, unit="s"):
    """One line for people."""
    scale, shown = (1e3, "ms") if unit == "s" and measured["median"] < 1 else (1, unit)
    low, high = (scale * each for each in measured["quartiles"])
    print(
        f"{name:44} {scale * measured['median']:9.2f} {shown:3}"
        f" (quartiles {low:.2f} to {high:.2f}, n={measured['n']})",
        flush=True,
    )


def write(path, **results):
    """The results and where they were measured, as JSON; no path: nowhere."""
    if path is None:
        return
    machine = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }
    Path(path).write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
