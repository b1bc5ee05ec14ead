# SPDX-License-Identifier: Apache-2.0
"""61 layers, 12 row buckets, a graph each: bytes and microseconds a step, in one run, for

    plain      one grow-only query buffer, padding zeroed once; KV scratch for each call, its tail of 128 rows by a
               memset: the fixes that production found; the graphs share one of torch's pools, largest first
    holdfast   PaddedQuery and resident KvScratch of one lane

Both launch the same kernels otherwise.

    python3 serving_steps.py
"""

import gc
import statistics

import parts

LAYERS, HEADS, PADDED, DIM, TOPK, TAIL = 61, 16, 64, 512, 64, 128
BUCKETS = [2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 32]
POOL_ROWS = 1 << 18


def steps():
    import holdfast_torch
    import torch

    def buffer(*sizes, dtype=torch.uint8):
        return torch.zeros(*sizes, dtype=dtype, device="cuda")

    most = max(BUCKETS)
    queries = buffer(most, HEADS, DIM, dtype=torch.bfloat16).random_(-2, 3)
    pool = (buffer(POOL_ROWS, 256).random_(0, 256), torch.full((POOL_ROWS, 32), 0x38, dtype=torch.uint8, device="cuda"))
    indices = torch.randint(0, POOL_ROWS, (most, TOPK), dtype=torch.int32, device="cuda")
    out = buffer(most, DIM, dtype=torch.bfloat16)

    def launch(rows, q, kv):
        holdfast_torch.pad_queries(queries[:rows], q)
        holdfast_torch.gather_nvfp4(*pool, 100 / (448 * 6), indices[:rows], kv)
        torch.sum(q, dim=1, out=out[:rows])  # "attention", over all heads

    class Plain:
        def __init__(self):
            self.query = buffer(most, PADDED, DIM, dtype=torch.bfloat16)  # the largest first: it never has to grow

        def layer(self, rows):
            kv = torch.empty(rows * TOPK + TAIL, DIM, dtype=torch.float8_e4m3fn, device="cuda")
            kv[rows * TOPK:].view(torch.uint8).zero_()
            launch(rows, self.query[:rows], kv[:rows * TOPK])

    class Holdfast:
        def __init__(self):
            lane = holdfast_torch.Lane(memory="torch")
            self.query = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, lane=lane)
            self.scratch = holdfast_torch.KvScratch(DIM, TAIL, lane=lane)

        def layer(self, rows):
            launch(rows, self.query.acquire(rows), self.scratch.acquire(rows * TOPK))

    def step(engine, rows):
        for _ in range(LAYERS):
            engine.layer(rows)

    def used():
        """Bytes gone from the device, and bytes that torch has reserved."""
        gc.collect()
        holdfast_torch.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()

    def capture(kind):
        before = used()
        engine = kind()
        shared = torch.cuda.graph_pool_handle()
        graphs = {}
        for rows in BUCKETS:
            step(engine, rows)
            graphs[rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[rows], pool=shared):
                step(engine, rows)
        after = used()
        return engine, graphs, [b - a for a, b in zip(before, after)]

    step(Holdfast(), 32)  # kernels are loaded before anything is counted
    plain, plain_graphs, plain_bytes = capture(Plain)
    ours, our_graphs, our_bytes = capture(Holdfast)

    for name, (device, reserved) in (("plain", plain_bytes), ("holdfast", our_bytes)):
        print(f"  {name:9} {device / 2**20:7.0f} MiB of the device, {reserved / 2**20:7.0f} MiB in torch's figures")

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ratios = []
    for rows in BUCKETS:
        times = {"plain": [], "holdfast": []}
        reference = None
        for _ in range(7):
            for name, graphs in (("plain", plain_graphs), ("holdfast", our_graphs)):
                out.fill_(99)
                start.record()
                graphs[rows].replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1000)
                reference = queries[:rows].float().sum(1).to(out.dtype) if reference is None else reference
                parts.check(torch.equal(out[:rows], reference), f"{name}, {rows} rows: wrong")
        a, b = (statistics.median(times[name]) for name in ("plain", "holdfast"))
        ratios.append(b / a)
        less = (a - b) / LAYERS
        print(f"  {rows:5} rows: plain {a:8.1f} us a step, holdfast {b:8.1f} us ({less:5.2f} us a layer less)")
    parts.check(our_bytes[0] <= plain_bytes[0] + (8 << 20), f"more memory: {our_bytes} against {plain_bytes}")
    del plain, ours
    return f"steps take {min(ratios):.3f} to {max(ratios):.3f} of plain's time"


if __name__ == "__main__":
    parts.run("serving_steps", {f"{LAYERS} layers x {len(BUCKETS)} buckets": steps}, alone=True, timeout=120)
