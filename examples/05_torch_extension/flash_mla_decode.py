# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse decode reads our padded query: its outputs equal those on a plain zero-padded tensor, bit for bit.

    python3 flash_mla_decode.py   needs a FlashMLA wheel that runs with this PyTorch: sgl-flash-mla or flash-mla
"""

import parts

HEADS, PADDED, DIM, V_DIM, ROW = 16, 64, 576, 512, 656  # DeepSeek-V3.2
PAGES, PAGE, TOPK = 64, 64, 256


def kv_cache(torch):
    """Rows of 512 e4m3 values, 4 scales in fp32, 64 bf16 values for RoPE."""
    rows = PAGES * PAGE
    cache = torch.empty(rows, ROW, dtype=torch.uint8, device="cuda")
    cache[:, :512] = torch.randn(rows, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, 512:528] = torch.rand(rows, 4, device="cuda").add_(0.5).view(torch.uint8)
    cache[:, 528:] = torch.randn(rows, 64, device="cuda").to(torch.bfloat16).view(torch.uint8)
    return cache.view(PAGES, PAGE, 1, ROW)


def sparse_decode():
    import torch

    try:
        import flash_mla
    except Exception as error:  # there is none, or it was built for another PyTorch
        raise parts.Skip(f"no FlashMLA that runs here: {str(error).splitlines()[0]}") from error
    import inspect

    import holdfast_torch

    torch.manual_seed(0)
    cache = kv_cache(torch)
    q_pad = holdfast_torch.PaddedQuery(HEADS, PADDED, DIM)
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    legacy = {"use_legacy": True} if "use_legacy" in parameters else {}  # this format is old to sgl-flash-mla

    def attend(q, indices, plan):
        """`plan` is made by the first call with it."""
        return flash_mla.flash_mla_with_kvcache(q.unsqueeze(1), cache, None, None, V_DIM, plan, is_fp8_kvcache=True,
                                                indices=indices, **legacy)

    def same_bits(seen, wanted):
        pairs = [(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)) for a, b in zip(seen, wanted)]
        return all(torch.equal(a, b) for a, b in pairs)

    def plan():
        return flash_mla.get_mla_metadata()[0]

    for rows in (1, 33, 128):
        packed = torch.randn(rows, HEADS, DIM, device="cuda").to(torch.bfloat16)
        indices = torch.randint(0, PAGES * PAGE, (rows, 1, TOPK), dtype=torch.int32, device="cuda")
        indices[:, :, -5:] = -1
        padded = torch.zeros(rows, PADDED, DIM, dtype=torch.bfloat16, device="cuda")
        padded[:, :HEADS] = packed
        try:
            wanted = attend(padded, indices, plan())
            torch.cuda.synchronize()
        except Exception as error:
            raise parts.Skip(f"FlashMLA doesn't run here: {str(error).splitlines()[0]}") from error

        q = q_pad.acquire(rows)
        holdfast_torch.pad_queries(packed, q)
        seen = attend(q, indices, plan())
        parts.check(same_bits(seen, wanted), f"{rows} rows, eager")
        parts.check(bool(seen[0].isfinite().all()), f"{rows} rows: not finite")

        captured_plan = plan()
        attend(q, indices, captured_plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = q_pad.acquire(rows)
            holdfast_torch.pad_queries(packed, q)
            captured = attend(q, indices, captured_plan)
        q_pad.acquire(2 * q_pad.capacity)  # grown under the graph
        torch.cuda.empty_cache()
        graph.replay()
        parts.check(same_bits(captured, wanted), f"{rows} rows, replayed")
        parts.check(not bool(q_pad.acquire(rows)[:, HEADS:].any()), "padding")
    return f"flash_mla {getattr(flash_mla, '__version__', '?')}, bit for bit"


if __name__ == "__main__":
    parts.run("flash_mla_decode", {"sparse decode over our padded query": sparse_decode})
