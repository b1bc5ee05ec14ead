# SPDX-License-Identifier: Apache-2.0
"""Holdfast for PyTorch: query buffers and KV scratch as tensors whose memory stays put under CUDA graphs.

    lane = holdfast_torch.Lane()                       # one for work that never overlaps in time
    q_pad = holdfast_torch.PaddedQuery(16, 64, 512, torch.bfloat16, lane)
    q_pad.reserve(2048)                                # before the engine measures memory for its KV pool

    q = q_pad.acquire(rows)                            # [rows, 64, 512], padding heads zero; capturing or not
    holdfast_torch.pad_queries(q_packed, q)            # or any kernel of yours that writes q[:, :16]
    attention(q, ...)

Lifetime. A tensor from acquire(), and every view of it, keeps its memory; so does every graph that it was acquired
under (torch.cuda.graph, make_graphed_callables), whatever is deleted, flushed or grown meanwhile. Nothing has to be
locked or released. A tensor acquired before a capture began is pinned by `pin(tensor)`, and by the operators below,
which pin what they are given if it is ours; other kernels can't tell.

Order. acquire() is for work on the current stream of the lane's device. Tensors alias: each acquire gives the same rows
again, to be used in stream order, as layer after layer does. An acquire on another stream waits for the work queued on
the last one, if both are eager or both in one capture. Graphs, or a graph and eager work, that may run at the same time
need a lane each. Tensor.record_stream does nothing for these tensors: acquire on the stream that uses them.

KvScratch is one tensor at a time if it is resident (a second acquire is an error while the first tensor lives), else as
many as you like; `over_read` says how far its consumer reads past the last row, and finds zeros there.

Operators, with out-arguments, under torch.compile as well: acquire outside of what is compiled, and pass the tensor in.
    pad_queries(q, out)                  q [rows, heads, dim] into the first heads of out [rows, more heads, dim]
    unpad_output(padded, out)            the first heads of padded into out
    gather_nvfp4(data, scales, global_scale, indices, out, tail_rows=0)
        rows of an NVFP4 pool ([rows, 256] and [rows, 32] bytes, or with pages in front) as FP8 rows, out [pairs, 512];
        an index out of range gives zeros. tail_rows: written behind out in the same launch, for a whole tensor of
        KvScratch(resident=False).acquire(rows, fill_tail=False)

Only bfloat16 and float8_e4m3fn, and no gradients: this is for inference. A tensor that requires one is refused.

Memory. Lane(memory="torch") takes it from torch's allocator, so that torch.cuda.memory_allocated() counts it; buffers
that grow move then, and graphs keep the old memory. "default" is holdfast's own virtual memory, which grows where it
is. Resident KvScratch is virtual memory of its own in any case.

HOLDFAST_TORCH_EXTENSION names a module that was built before (CMake's target holdfast_torch_C); else it is built on
import.
"""

import importlib.util
import os
import pathlib
import sys

import torch

__all__ = ["KvScratch", "Lane", "OverRead", "PaddedQuery", "collect", "gather_nvfp4", "kept_bytes", "pad_queries",
           "pin", "unpad_output"]


def _load():
    name = "holdfast_torch_C"
    if built := os.environ.get("HOLDFAST_TORCH_EXTENSION"):
        spec = importlib.util.spec_from_file_location(name, built)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    from torch.utils import cpp_extension

    here = pathlib.Path(__file__).resolve().parents[1]
    return cpp_extension.load(
        name=name,
        sources=[str(here / "module.cpp"), str(here / "kernels.cu")],
        extra_include_paths=[str(here.parents[1] / "include")],
        extra_cflags=["-std=c++20", "-O2", f"-isystem {cpp_extension.CUDA_HOME}/include/cccl"],
        extra_cuda_cflags=["-std=c++20", "-O2"])


_C = _load()

OverRead = _C.OverRead
collect = _C.collect
kept_bytes = _C.kept_bytes
pin = _C.pin
pad_queries = torch.ops.holdfast.pad_queries.default
unpad_output = torch.ops.holdfast.unpad_output.default
gather_nvfp4 = torch.ops.holdfast.gather_nvfp4.default

for _op in ("pad_queries", "unpad_output", "gather_nvfp4"):
    # They return nothing: there is no shape to infer.
    torch.library.register_fake(f"holdfast::{_op}", lambda *args, **kwargs: None)


class Lane(_C.Lane):
    """What work that never overlaps in time shares: memory, a buffer for each shape, scratch in captures."""

    def __init__(self, device=None, memory="torch"):
        torch.cuda.init()
        index = torch.cuda.current_device() if device is None else torch.device(device).index or 0
        super().__init__(index, memory)


class PaddedQuery(_C.PaddedQuery):
    """acquire(rows) -> Tensor [rows, padded_heads, head_dim]. Those of one lane, shape and dtype share their rows."""

    def __init__(self, heads, padded_heads, head_dim, dtype=torch.bfloat16, lane=None):
        super().__init__(lane or Lane(), heads, padded_heads, head_dim, dtype)


class KvScratch(_C.KvScratch):
    """acquire(rows, fill_tail=True) -> Tensor [rows, row_elements], with a tail behind it.

    over_read: rows beyond the last one, or an OverRead. resident: anchored scratch, whose tail costs nothing, and which
    keeps its size; else memory for each call, and a memset of the tail (unless fill_tail is False, and gather_nvfp4
    writes it)."""

    def __init__(self, row_elements, over_read, dtype=torch.float8_e4m3fn, lane=None, resident=True):
        if isinstance(over_read, int):
            over_read = OverRead.rows_beyond(over_read)
        super().__init__(lane or Lane(), row_elements, over_read, dtype, resident)
