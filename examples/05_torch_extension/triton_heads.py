# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that never heard of holdfast writes the real heads, acquire(rows)[:, :heads]; the padding stays zero.

    python3 triton_heads.py
"""

import parts

try:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def scale_heads(q, out, q_row, q_head, out_row, out_head, factor, DIM: tl.constexpr):
        row, head = tl.program_id(0), tl.program_id(1)
        dims = tl.arange(0, DIM)
        values = tl.load(q + row * q_row + head * q_head + dims)
        tl.store(out + row * out_row + head * out_head + dims, (values * factor).to(tl.bfloat16))
except ImportError:
    triton = None

HEADS, PADDED, DIM = 16, 64, 512


def produce(q, heads_view):
    rows, heads, _ = heads_view.shape
    scale_heads[(rows, heads)](q, heads_view, *q.stride()[:2], *heads_view.stride()[:2], 2.0, DIM)


def real_heads():
    if triton is None:
        raise parts.Skip("no Triton")
    import holdfast_torch

    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM)
    q = torch.empty(300, HEADS, DIM, dtype=torch.bfloat16, device="cuda").random_(-50, 51)

    def step(rows):
        acquired = q_pad.acquire(rows)
        produce(q[:rows], acquired[:, :HEADS])
        return acquired

    def right(acquired):
        rows = acquired.shape[0]
        return torch.equal(acquired[:, :HEADS], 2 * q[:rows]) and not bool(acquired[:, HEADS:].any())

    for rows in (300, 7, 64):
        parts.check(right(step(rows)), f"{rows} rows, eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(100)
    torch.cuda.empty_cache()
    for _ in range(2):
        q.random_(-50, 51)
        graph.replay()
        parts.check(right(captured), "100 rows, replayed")
    whole = q_pad.acquire(q_pad.capacity)
    parts.check(not bool(whole[:, HEADS:].any()), "the padding of all rows")


if __name__ == "__main__":
    parts.run("triton_heads", {"real heads by Triton": real_heads})
