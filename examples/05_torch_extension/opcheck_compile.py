# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.library.opcheck, torch.compile(fullgraph=True) and make_graphed_callables; what is refused;
and gather_nvfp4 against its definition.

    python3 opcheck_compile.py
"""

import ctypes
import gc
import os

import parts

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of workers takes longer to start

HEADS, PADDED, DIM = 16, 64, 512


def inputs(torch, rows=8):
    packed = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda").random_(-9, 10)
    padded = torch.zeros(rows, PADDED, DIM, dtype=torch.bfloat16, device="cuda")
    return packed, padded


def nvfp4(torch, rows=64, topk=8):
    data = torch.randint(0, 256, (rows, 256), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x20, 0x40, (rows, 32), dtype=torch.uint8, device="cuda")
    indices = torch.randint(-2, rows + 2, (4, topk), dtype=torch.int32, device="cuda")
    return data, scales, 0.0372, indices


def opcheck():
    import holdfast_torch
    import torch

    packed, padded = inputs(torch)
    q = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM).acquire(8)
    gathered = torch.empty(32, 512, dtype=torch.uint8, device="cuda")
    calls = {
        holdfast_torch.pad_queries: [(packed, padded), (packed, q), (packed, q[:, :HEADS])],
        holdfast_torch.unpad_output: [(padded, packed), (q, packed)],
        holdfast_torch.gather_nvfp4: [(*nvfp4(torch), gathered)],
    }
    for op, all_arguments in calls.items():
        for arguments in all_arguments:
            results = torch.library.opcheck(op, arguments)
            bad = {test: result for test, result in results.items() if result != "SUCCESS"}
            parts.check(not bad, f"{op}: {bad}")


def compiled(backend):
    import holdfast_torch
    import torch

    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM)

    @torch.compile(fullgraph=True, backend=backend)
    def step(packed, q, out):
        holdfast_torch.pad_queries(packed * 2, q)
        sums = q.sum(1)
        holdfast_torch.unpad_output(q, out)
        return sums + 1

    for rows in (8, 8, 24):
        packed, _ = inputs(torch, rows)
        out = torch.empty_like(packed)
        q = q_pad.acquire(rows)
        sums = step(packed, q, out)
        parts.check(torch.equal(sums.float(), (2 * packed).float().sum(1) + 1), f"{rows} rows: sums")
        parts.check(torch.equal(out, 2 * packed), f"{rows} rows: unpadded")
        parts.check(torch.equal(q[:, :HEADS], 2 * packed), f"{rows} rows: q, in its place")
        parts.check(not bool(q[:, HEADS:].any()), f"{rows} rows: padding")


def graphed():
    import holdfast_torch
    import torch

    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM)

    def layer(packed):
        q = q_pad.acquire(packed.shape[0])
        holdfast_torch.pad_queries(packed, q)
        return q.sum(1)

    packed, _ = inputs(torch, 32)
    graphed_layer = torch.cuda.make_graphed_callables(layer, (packed.clone(),))
    q_pad.acquire(4096)  # grown
    del q_pad
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(3):
        packed.random_(-9, 10)
        parts.check(torch.equal(graphed_layer(packed).float(), packed.float().sum(1)), "replayed")


def refusals():
    import holdfast_torch
    import torch

    packed, padded = inputs(torch)

    def refused(error, call, words):
        try:
            call()
        except error as e:
            parts.check(words in str(e), f"the reason should say {words!r}: {e}")
            return
        raise AssertionError(f"not refused: {words}")

    refused(Exception, lambda: holdfast_torch.pad_queries(packed.clone().requires_grad_(), padded), "gradient")
    refused(Exception, lambda: holdfast_torch.pad_queries(packed.half(), padded.half()), "bfloat16")
    refused(Exception, lambda: holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, torch.float32), "bfloat16")
    refused(Exception, lambda: holdfast_torch.PaddedQuery(65, PADDED, DIM), "padded_heads")
    refused(Exception, lambda: holdfast_torch.pad_queries(padded, packed), "64 heads into 16")
    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM)
    refused(Exception, lambda: q_pad.acquire(-1), "-1 rows")
    refused(torch.OutOfMemoryError, lambda: q_pad.acquire(1 << 28), "out of memory")
    parts.check(q_pad.acquire(4).shape == (4, PADDED, DIM), "afterwards")
    kv = holdfast_torch.KvScratch(512, 128)
    first = kv.acquire(10)
    refused(Exception, lambda: kv.acquire(10), "release it first")
    del first
    first = kv.acquire(10)
    theirs = torch.empty(32, 512, dtype=torch.uint8, device="cuda")
    refused(Exception, lambda: holdfast_torch.gather_nvfp4(*nvfp4(torch), theirs, 128), "tail")
    fp8 = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM, torch.float8_e4m3fn).acquire(3)
    parts.check(fp8.dtype == torch.float8_e4m3fn and not bool(fp8.view(torch.uint8)[:, HEADS:].any()), "fp8")


def gather():
    import holdfast_torch
    import torch

    data, scales, global_scale, indices = nvfp4(torch, rows=4096, topk=64)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    nibbles = torch.stack((data & 15, data >> 4), dim=-1).view(-1, 512)
    scale = scales.view(torch.float8_e4m3fn).float() * torch.tensor(global_scale, device="cuda")
    values = (magnitudes[(nibbles & 7).long()] * scale.repeat_interleave(16, 1)).clamp(-448, 448)
    rows = values.to(torch.float8_e4m3fn).view(torch.uint8) ^ ((nibbles >> 3) << 7)
    flat = indices.view(-1).long()
    valid = (flat >= 0) & (flat < 4096)
    wanted = torch.where(valid[:, None], rows[flat.clamp(0, 4095)], 0)

    cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    cudart.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def tail(kv, rows):
        """What its consumer reads too far; torch would let nobody."""
        read = torch.empty(rows, 512, dtype=torch.uint8)
        device_to_host = 2
        code = cudart.cudaMemcpy(read.data_ptr(), kv.data_ptr() + kv.numel(), read.numel(), device_to_host)
        parts.check(code == 0, f"the tail cannot be read: {code}")
        return read

    for resident, fill, tail_rows in ((True, True, 0), (False, True, 0), (False, False, 128)):
        kv = holdfast_torch.KvScratch(512, 128, resident=resident).acquire(indices.numel(), fill)
        kv.view(torch.uint8).fill_(255)
        holdfast_torch.gather_nvfp4(data, scales, global_scale, indices, kv, tail_rows)
        parts.check(torch.equal(kv.view(torch.uint8), wanted), f"resident={resident}: rows")
        torch.cuda.synchronize()
        parts.check(not bool(tail(kv, 128).any()), f"resident={resident}, tail_rows={tail_rows}: tail")
    paged = torch.empty(4096, 512, dtype=torch.uint8, device="cuda")[:indices.numel()]
    holdfast_torch.gather_nvfp4(data.view(64, 64, 256), scales.view(64, 64, 32), global_scale, indices, paged)
    parts.check(torch.equal(paged, wanted), "paged")


PARTS = {
    "opcheck": opcheck,
    "compile, aot_eager": lambda: compiled("aot_eager"),
    "compile, inductor": lambda: compiled("inductor"),
    "make_graphed_callables": graphed,
    "refusals": refusals,
    "gather_nvfp4": gather,
}

if __name__ == "__main__":
    parts.run("opcheck_compile", PARTS, timeout=120)
