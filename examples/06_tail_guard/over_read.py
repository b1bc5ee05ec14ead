# SPDX-License-Identifier: Apache-2.0
"""A kernel that reads 128 rows past a torch tensor, and a graph over a tensor that was freed: over plain torch, where
nothing tells; over the guard, where each faults at once; and over the cure, where what is read too far is zero.

    python3 over_read.py          exit status 0: as promised; 77: no torch, Triton or GPU
"""

import os
import subprocess
import sys

import tail_guard

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

ROWS, BEYOND, ROW = 32, 128, 512
CORRECT, TOO_FAR, FREED = "a correct program", "128 rows too far", "a captured tensor freed"


def correct_program():
    """Eager, captured, on two streams: the answer is known."""
    torch.manual_seed(0)
    x = torch.randint(-4, 5, (64, 256), device="cuda", dtype=torch.float32)
    w = torch.randint(-4, 5, (256, 256), device="cuda", dtype=torch.float32)
    wanted = (x.double() @ w.double()).relu().sum(1).float()  # whole numbers: exact in any order

    def step():
        return (x @ w).relu().sum(1)  # temporaries, freed while the graph is captured

    eager = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        twice = eager * 2
        eager.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        captured.zero_()
        graph.replay()
    torch.cuda.synchronize()
    good = torch.equal(eager, wanted) and torch.equal(captured, wanted) and torch.equal(twice, 2 * wanted)
    return "right" if good else "WRONG"


@triton.jit
def count_not_zero(data, counts, ROW: tl.constexpr):
    row = tl.program_id(0)
    values = tl.load(data + row * ROW + tl.arange(0, ROW))
    tl.store(counts + row, tl.sum((values != 0).to(tl.int32)))


def read_too_far():
    counts = torch.empty(ROWS + BEYOND, device="cuda", dtype=torch.int32)
    others = [torch.ones(ROWS, ROW, device="cuda", dtype=torch.uint8) for _ in range(64)]
    del others[32]  # whose place the scratch takes, where memory is shared
    scratch = torch.zeros(ROWS, ROW, device="cuda", dtype=torch.uint8)
    count_not_zero[(ROWS + BEYOND,)](scratch, counts, ROW)
    torch.cuda.synchronize()
    return "silent; the bytes are " + ("somebody else's" if counts[ROWS:].any() else "zero")


def replay_over_freed():
    cached = torch.ones(1 << 22, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = cached.sum()
    del cached  # the engine replaces it; the graph doesn't know
    graph.replay()
    torch.cuda.synchronize()
    del total
    return "silent"


PARTS = {CORRECT: correct_program, TOO_FAR: read_too_far, FREED: replay_over_freed}

# A process for each: its last part may fault, after which it is good for nothing.
RUNS = [
    ("plain", {CORRECT: "right", TOO_FAR: "silent; the bytes are somebody else's", FREED: "silent"}),
    ("guard", {CORRECT: "right", TOO_FAR: "illegal address"}),
    ("guard", {FREED: "illegal address"}),
    ("cure", {CORRECT: "right", TOO_FAR: "silent; the bytes are zero"}),
]


def child(mode, parts):
    if mode != "plain":
        tail_guard.install()
    for part in parts:
        try:
            saw = PARTS[part]()
        except Exception as error:
            saw = "illegal address" if "illegal memory access" in str(error) else f"{type(error).__name__}: {error}"
        print(f"{part}\t{saw}", flush=True)
    os._exit(0)  # no destructor could do anything with a lost context


def main():
    if not torch.cuda.is_available():
        print("skipped: needs an NVIDIA GPU")
        return 77
    os.environ["HOLDFAST_TAIL_LIBRARY"] = tail_guard.library()
    started = []
    for mode, expected in RUNS:
        environment = {**os.environ, "HOLDFAST_TAIL_MODE": mode, "HOLDFAST_TAIL": str(BEYOND * ROW)}
        started.append(subprocess.Popen([sys.executable, __file__, mode, *expected], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, env=environment))
    good = True
    for (mode, expected), process in zip(RUNS, started):
        try:
            output, _ = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        saw = dict(line.split("\t", 1) for line in output.splitlines() if "\t" in line)
        for part, wanted in expected.items():
            right = saw.get(part) == wanted
            verdict = "" if right else f"   FAILED: not {wanted}"
            print(f"{mode:5}  {part:23}  {saw.get(part, 'nothing seen')}{verdict}")
        if any(saw.get(part) != wanted for part, wanted in expected.items()):
            good = False
            print("\n".join("      | " + line[:200] for line in output.splitlines()[-12:]))
    print("tail guard: " + ("ok" if good else "FAILED"))
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], sys.argv[2:])
    sys.exit(main())
