# SPDX-License-Identifier: Apache-2.0
"""Runs a PyTorch program, unchanged, with every tensor against unmapped addresses or in front of zeros.

    HOLDFAST_TAIL_MODE=guard python3 tail_guard.py program.py ...     over-reads fault, at once
    HOLDFAST_TAIL_MODE=cure python3 tail_guard.py program.py ...      over-reads find zeros

or, in a program, before its first CUDA tensor: tail_guard.install(). What the modes mean, and cost, is in
tail_guard.cpp. HOLDFAST_TAIL_LIBRARY names the shared library (CMake's target holdfast_tail); else it is built here.
"""

import ctypes
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def library() -> str:
    """The path of libholdfast_tail.so."""
    if built := os.environ.get("HOLDFAST_TAIL_LIBRARY"):
        return built
    from torch.utils.cpp_extension import CUDA_HOME

    include = HERE.parents[1] / "include"
    path = pathlib.Path(tempfile.gettempdir()) / f"holdfast_tail_{os.getuid()}" / "libholdfast_tail.so"
    sources = [HERE / "tail_guard.cpp", *include.rglob("*.hpp")]
    if not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
             HERE / "tail_guard.cpp", f"-I{include}", f"-I{CUDA_HOME}/include", f"-I{CUDA_HOME}/include/cccl",
             f"-L{CUDA_HOME}/lib64", "-lcudart_static", "-ldl", "-lrt", "-pthread", "-o", partial],
            check=True)
        partial.rename(path)  # another process may be loading the former one
    return str(path)


def install() -> None:
    """From now on torch's CUDA memory comes from the library. Torch must not have used any yet."""
    import torch

    path = library()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "holdfast_tail_malloc", "holdfast_tail_free")
    record_stream = ctypes.cast(ctypes.CDLL(path).holdfast_tail_record_stream, ctypes.c_void_p).value
    allocator.allocator().set_record_stream_fn(record_stream)
    torch.cuda.memory.change_current_allocator(allocator)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
