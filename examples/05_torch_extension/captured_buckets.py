# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs over a padded query buffer, one for each row bucket: the fault as production saw it, in plain torch, and
the same code with a few lines changed.

    python3 captured_buckets.py
"""

import gc
import time

import parts

HEADS, PADDED, DIM = 16, 64, 512
BUCKETS = [2048, 512, 64]


class Plain:
    """The usual code: one cached buffer, replaced whenever the row count changes."""

    def __init__(self):
        import torch

        self.torch = torch
        self.cached = torch.empty(0, device="cuda")

    def pad(self, q_packed):
        rows = q_packed.shape[0]
        if self.cached.shape[0] != rows:
            self.cached = self.torch.zeros(rows, PADDED, DIM, dtype=self.torch.bfloat16, device="cuda")
        q = self.cached
        q[:, :HEADS] = q_packed
        return q


class Holdfast:
    """The same on holdfast."""

    def __init__(self, memory):
        import holdfast_torch

        self.holdfast = holdfast_torch
        self.q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, lane=holdfast_torch.Lane(memory=memory))

    def pad(self, q_packed):
        q = self.q_pad.acquire(q_packed.shape[0])
        self.holdfast.pad_queries(q_packed, q)
        return q


class Engine:
    """Captures one graph a bucket. "Attention" sums all 64 heads: whole numbers, so that the right sum is exact, and
    anything but zero in the padding shows."""

    def __init__(self, padding, rows=max(BUCKETS)):
        import torch

        self.torch, self.padding = torch, padding
        self.q = torch.zeros(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.zeros(rows, DIM, dtype=torch.bfloat16, device="cuda")
        self.graphs = {}

    def step(self, rows):
        q = self.padding.pad(self.q[:rows])
        self.torch.sum(q, dim=1, out=self.out[:rows])

    def capture(self, buckets):
        for rows in buckets:
            self.step(rows)  # warm-up: the usual code replaces its buffer here
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                self.step(rows)
            self.graphs[rows] = graph

    def right(self, rows, run):
        """Runs a step on fresh queries; whether its output is right."""
        self.q.random_(-2, 3)
        self.out.fill_(99)
        run()
        return self.torch.equal(self.out[:rows], self.q[:rows].float().sum(1).to(self.out.dtype))

    def check_replays(self, when):
        for rows, graph in self.graphs.items():
            parts.check(self.right(rows, graph.replay), f"{rows} rows replayed {when}: wrong")

    def flush(self):
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()


def plain_fault():
    engine = Engine(Plain())
    engine.capture(BUCKETS)
    engine.flush()
    engine.check_replays("after the flush")
    engine.torch.cuda.synchronize()


def tenants(torch):
    """Somebody else, who takes the memory that was freed, and expects to find again what was stored."""
    return [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]


def after_flush(memory):
    engine = Engine(Holdfast(memory))
    engine.capture(BUCKETS)
    engine.flush()
    others = tenants(engine.torch)
    engine.check_replays("after the flush")
    parts.check(all(bool((other == 7).all()) for other in others), "somebody else's memory was overwritten")


def growth_between(memory):
    engine = Engine(Holdfast(memory), rows=8192)
    engine.capture([64])
    engine.capture([512])
    parts.check(engine.right(4096, lambda: engine.step(4096)), "4096 rows, eager: wrong")
    engine.capture([2048])
    with engine.torch.cuda.stream(engine.torch.cuda.Stream()):  # growth on another stream
        engine.torch.cuda.current_stream().wait_stream(engine.torch.cuda.default_stream())
        parts.check(engine.right(8192, lambda: engine.step(8192)), "8192 rows, eager: wrong")
    engine.flush()
    others = tenants(engine.torch)
    for _ in range(3):
        engine.check_replays("after growth")
        parts.check(engine.right(100, lambda: engine.step(100)), "100 rows, eager: wrong")
    parts.check(all(bool((other == 7).all()) for other in others), "somebody else's memory was overwritten")
    q_pad = engine.padding.q_pad
    whole = q_pad.acquire(q_pad.capacity)
    parts.check(not bool(whole[:, HEADS:].any()), "padding is not zero")
    return f"generation {q_pad.generation}, {q_pad.retired_bytes >> 20} MiB kept for older graphs"


def growth_in_a_capture(memory):
    engine = Engine(Holdfast(memory), rows=4096)
    engine.capture([64])
    graph = engine.torch.cuda.CUDAGraph()
    with engine.torch.cuda.graph(graph):
        engine.step(4096)  # more than there is
    engine.graphs[4096] = graph
    engine.flush()
    engine.check_replays("captured while it grew")


def objects_deleted(memory):
    import holdfast_torch

    engine = Engine(Holdfast(memory))
    engine.capture(BUCKETS)
    engine.padding = None  # buffer, lane and all
    engine.flush()
    holdfast_torch.collect()
    others = tenants(engine.torch)
    engine.check_replays("without the Python objects")
    parts.check(all(bool((other == 7).all()) for other in others), "somebody else's memory was overwritten")
    parts.check(holdfast_torch.kept_bytes()["pinned"] > 0, "graphs own nothing")
    engine.graphs.clear()
    engine.flush()
    for _ in range(500):
        holdfast_torch.collect()
        if not any(holdfast_torch.kept_bytes().values()):
            return "and all memory came back after the graphs"
        time.sleep(0.01)
    raise AssertionError(f"kept for good: {holdfast_torch.kept_bytes()}")


def two_lanes(memory):
    import torch

    engines = [Engine(Holdfast(memory)) for _ in range(2)]  # a lane each
    streams = [torch.cuda.Stream() for _ in engines]
    torch.cuda.synchronize()
    for engine, stream in zip(engines, streams):
        with torch.cuda.stream(stream):
            engine.capture(BUCKETS)
    engines[0].flush()
    for i in range(30):
        rows = BUCKETS[i % len(BUCKETS)]
        torch.cuda.synchronize()
        for n, engine in enumerate(engines):
            engine.q.fill_(i % 3 + n + 1)
            engine.out.fill_(99)
        torch.cuda.synchronize()
        for _ in range(4):
            for engine, stream in zip(engines, streams):
                with torch.cuda.stream(stream):
                    engine.graphs[rows].replay()
        torch.cuda.synchronize()
        for n, engine in enumerate(engines):
            parts.check(bool((engine.out[:rows] == HEADS * (i % 3 + n + 1)).all()), f"lane {n}, {rows} rows: wrong")


def tensor_outlives_buffer(memory):
    import holdfast_torch
    import torch

    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, lane=holdfast_torch.Lane(memory=memory))
    view = q_pad.acquire(64)[:, :HEADS]
    q_pad.acquire(128)  # it may move; the first tensor stays
    view.fill_(3)
    torch.cuda.synchronize()
    del q_pad
    gc.collect()
    holdfast_torch.collect()
    torch.cuda.empty_cache()
    others = tenants(torch)
    parts.check(bool((view == 3).all()), "the view's memory is somebody else's")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        parts.check(bool((view == 3).all()), "on another stream")
    del view, others
    return f"kept afterwards: {holdfast_torch.kept_bytes()}"


def arguments_pinned(memory):
    """Each operator, over each argument in turn that was acquired before the capture and is gone at the replay."""
    import holdfast_torch
    import torch

    def ours(plain):
        rows, *row = plain.shape
        lane = holdfast_torch.Lane(memory=memory)
        if len(row) == 2:
            tensor = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, lane=lane).acquire(rows)[:, :row[0]]
        else:
            scratch = holdfast_torch.KvScratch(row[0] * plain.element_size(), 0, lane=lane, resident=False)
            tensor = scratch.acquire(rows).view(plain.dtype)
        return tensor.copy_(plain)

    def check_argument(op, arguments, index, wanted):
        arguments[-1].zero_()
        result = torch.zeros_like(wanted)
        given = [*arguments[:index], ours(arguments[index]), *arguments[index + 1:]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(*given)
            result.copy_(given[-1])
        del given  # tensor, buffer and lane
        gc.collect()
        torch.cuda.synchronize()
        holdfast_torch.collect()
        torch.cuda.empty_cache()
        others = tenants(torch)
        graph.replay()
        parts.check(torch.equal(result, wanted), f"{op}: argument {index} was not kept")
        parts.check(all(bool((other == 7).all()) for other in others), f"{op}: argument {index} written elsewhere")

    packed = torch.zeros(64, HEADS, DIM, dtype=torch.bfloat16, device="cuda").random_(-9, 10)
    padded = torch.zeros(64, PADDED, DIM, dtype=torch.bfloat16, device="cuda")
    padded[:, :HEADS] = packed
    data, scales = (torch.randint(0, 64, (4096, n), dtype=torch.uint8, device="cuda") for n in (256, 32))
    indices = torch.randint(0, 4096, (64, 8), dtype=torch.int32, device="cuda")
    gathered = torch.zeros(512, 512, dtype=torch.uint8, device="cuda")
    for op, *arguments in ((holdfast_torch.pad_queries, packed, torch.zeros_like(padded)),
                           (holdfast_torch.unpad_output, padded, torch.zeros_like(packed)),
                           (holdfast_torch.gather_nvfp4, data, scales, 0.0372, indices, gathered)):
        op(*arguments)
        wanted = arguments[-1].clone()
        for index, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                check_argument(op, arguments, index, wanted)


VARIANTS = [after_flush, growth_between, growth_in_a_capture, objects_deleted, two_lanes, tensor_outlives_buffer,
            arguments_pinned]
PARTS = {"plain torch, after the flush": plain_fault}
for _memory in ("torch", "default"):
    for _variant in VARIANTS:
        name = f"holdfast, {_memory} memory, {_variant.__name__.replace('_', ' ')}"
        PARTS[name] = lambda variant=_variant, memory=_memory: variant(memory)

if __name__ == "__main__":
    parts.run("captured_buckets", PARTS, faults={"plain torch, after the flush"})
