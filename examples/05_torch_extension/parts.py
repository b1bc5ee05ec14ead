# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a script, each in a process of its own with a time limit: some of them end in a lost context."""

import os
import subprocess
import sys
import traceback

ILLEGAL = "illegal address"


class Skip(Exception):
    """The part cannot be run here, and why."""


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def _child(part, function):
    try:
        saw = "ok\t" + (function() or "")
    except Skip as why:
        saw = f"skipped\t{why}"
    except Exception as error:
        if "illegal memory access" in str(error):
            saw = f"{ILLEGAL}\t"
        else:
            traceback.print_exc()
            saw = f"FAILED\t{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    print(f"\n\t{part}\t{saw}", flush=True)
    os._exit(0)  # no destructor could do anything with a lost context


def _summary(output):
    lines = [line.split("\t") for line in output.splitlines() if line.startswith("\t")]
    return lines[-1][2:] if lines else ["FAILED", "it died"]


def run(script, parts, faults=(), alone=False, timeout=90):
    """Every part ends ok; those in `faults` by an illegal address. `alone`: one at a time, since they measure.

    Exit status 0: as promised; 77: no torch, no GPU, or every part was skipped."""
    if len(sys.argv) > 1:
        _child(sys.argv[1], parts[sys.argv[1]])
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    if not usable:
        print(f"{script}: skipped: needs PyTorch and an NVIDIA GPU")
        sys.exit(77)
    import holdfast_torch  # noqa: F401  built once, before the parts need it

    os.environ.setdefault("HOLDFAST_TORCH_EXTENSION", holdfast_torch._C.__file__)

    def start(part):
        return subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0]), part], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    started = {} if alone else {part: start(part) for part in parts}
    good, skipped = True, 0
    for part in parts:
        process = started.get(part) or start(part)
        try:
            output, _ = process.communicate(timeout=timeout)
            state, what = (_summary(output) + [""])[:2]
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            state, what = "FAILED", f"not done after {timeout} s"
        as_expected = state == (ILLEGAL if part in faults else "ok") or state == "skipped"
        skipped += state == "skipped"
        if as_expected:
            state = "ok" if state == "ok" else f"ok ({state})" if state == ILLEGAL else state
            for line in output.splitlines():  # figures
                if line.startswith("  "):
                    print(line)
        else:
            good = False
            print("\n".join("      | " + line[:300] for line in output.splitlines()[-25:]))
            if state in ("ok", ILLEGAL):
                what = f"{state}, but should have ended otherwise. {what}"
            state = "FAILED"
        print(f"{script}: {part}: {state}" + (f": {what}" if what else ""), flush=True)
    sys.exit(1 if not good else 77 if skipped == len(parts) else 0)
