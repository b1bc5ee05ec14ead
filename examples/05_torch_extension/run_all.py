# SPDX-License-Identifier: Apache-2.0
"""Builds the extension once and runs every script here: a line for each part, and whether all was as promised.

    python3 run_all.py [script ...]
"""

import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TOGETHER = ["captured_buckets.py", "opcheck_compile.py", "triton_heads.py", "flash_mla_decode.py"]
ALONE = ["acquire_cost.py", "serving_steps.py"]  # they measure


def main():
    start = time.monotonic()
    try:
        import torch
    except ImportError as missing:
        print(f"skipped: {missing}")
        return 77
    if not torch.cuda.is_available():
        print("skipped: needs an NVIDIA GPU")
        return 77
    import holdfast_torch  # if this fails, so does the test

    os.environ.setdefault("HOLDFAST_TORCH_EXTENSION", holdfast_torch._C.__file__)
    print(f"built and loaded in {time.monotonic() - start:.0f} s", flush=True)

    wanted = sys.argv[1:] or TOGETHER + ALONE
    codes = {}

    def run(scripts):
        started = [(script, subprocess.Popen([sys.executable, HERE / script], stdout=subprocess.PIPE,
                                             stderr=subprocess.STDOUT, text=True)) for script in scripts]
        for script, process in started:
            try:
                output, _ = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                output += f"{script}: FAILED: not done after 240 s\n"
            codes[script] = process.returncode
            print(output, end="", flush=True)

    run([script for script in wanted if script not in ALONE])
    for script in ALONE:
        if script in wanted:
            run([script])
    failed = [script for script, code in codes.items() if code not in (0, 77)]
    skipped = sum(code == 77 for code in codes.values())
    print(f"{len(codes) - len(failed) - skipped} of {len(codes)} scripts as promised, {skipped} skipped, "
          f"{time.monotonic() - start:.0f} s" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 77 if skipped == len(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
