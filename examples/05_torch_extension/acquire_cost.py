# SPDX-License-Identifier: Apache-2.0
"""What acquire costs from Python, beside torch.empty of the same shape, in one run.

    python3 acquire_cost.py
"""

import statistics
import time

import parts

ROWS, HEADS, PADDED, DIM = 256, 16, 64, 512


def nanoseconds(contenders, rounds=60, calls=500):
    """The median of interleaved rounds, for each."""
    seen = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            seen[name].append((time.perf_counter_ns() - start) / calls)
    return {name: statistics.median(times) for name, times in seen.items()}


def cost():
    import holdfast_torch
    import torch

    gpu = torch.device("cuda", 0)
    lane = holdfast_torch.Lane(memory="torch")
    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, lane=lane)
    q_pad.reserve(2048)
    resident = holdfast_torch.KvScratch(512, 128, lane=lane)
    resident.reserve(1 << 16)
    per_call = holdfast_torch.KvScratch(512, 128, lane=lane, resident=False)
    acquire, kv, call = q_pad.acquire, resident.acquire, per_call.acquire
    rows = 1 << 15
    contenders = {
        "torch.empty, queries": lambda: torch.empty((ROWS, PADDED, DIM), dtype=torch.bfloat16, device=gpu),
        "PaddedQuery.acquire": lambda: acquire(ROWS),
        "torch.empty, scratch": lambda: torch.empty((rows, 512), dtype=torch.float8_e4m3fn, device=gpu),
        "KvScratch.acquire, resident": lambda: kv(rows),
        "KvScratch.acquire, per call": lambda: call(rows, False),
    }
    eager = nanoseconds(contenders)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nanoseconds({name: contenders[name] for name in list(contenders)[:4]}, rounds=20)
    for name, ns in eager.items():
        print(f"  {name:28} {ns:7.0f} ns eager" + (f" {captured[name]:7.0f} ns captured" if name in captured else ""))
    for times, how in ((eager, "eager"), (captured, "captured")):
        for ours, theirs in (("PaddedQuery.acquire", "torch.empty, queries"),
                             ("KvScratch.acquire, resident", "torch.empty, scratch")):
            parts.check(times[ours] <= times[theirs],
                        f"{ours} {times[ours]:.0f} ns, {theirs} {times[theirs]:.0f} ns, {how}")


if __name__ == "__main__":
    parts.run("acquire_cost", {"acquire costs no more than torch.empty": cost}, alone=True)
