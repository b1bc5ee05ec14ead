#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots bench/results/<gpu>/*.json: the fraction of the copy ceiling by bytes moved, a line for each kernel.

    python3 cmake/plot_results.py bench/results/<gpu>        writes fraction_of_ceiling.svg there

Below 10 MB, where a benchmark tells microseconds a graph node, the fraction is that of the node's time and the ceiling's,
each less an empty node.
"""
import collections
import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "holdfast"  # the same file for the same results
from matplotlib import pyplot  # noqa: E402


def lines(directory: pathlib.Path) -> dict[str, list[tuple[float, float]]]:
    """Of each kernel: (bytes, fraction of the ceiling), ascending."""
    found = collections.defaultdict(dict)
    for path in sorted(directory.glob("*.json")):
        for run in json.loads(path.read_text())["benchmarks"]:
            if "bytes" not in run or run.get("run_type") == "aggregate":
                continue
            if "fraction_of_ceiling" in run:
                fraction = run["fraction_of_ceiling"]
            elif run.get("us_per_node", 0) > 0:
                fraction = run["ceiling_us_per_node"] / run["us_per_node"]
            else:
                continue
            kernel = re.sub(r"/(rows|heads|tail|iterations|manual_time)\b[^/]*", "", run["name"])
            found[kernel][run["bytes"]] = fraction
    return {kernel: sorted(points.items()) for kernel, points in sorted(found.items())}


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    figure, axes = pyplot.subplots(figsize=(10, 6), constrained_layout=True)
    for number, (kernel, points) in enumerate(lines(directory).items()):
        axes.plot(*zip(*points), marker="os^Dv"[number // 10 % 5], markersize=4, linewidth=1, label=kernel)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(xscale="log", xlabel="bytes read and written", ylabel="fraction of a device-to-device copy's rate",
             title=directory.name, ylim=(0, None))
    axes.legend(fontsize="x-small", ncol=2, loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(directory / "fraction_of_ceiling.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
