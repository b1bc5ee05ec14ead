// Attributes that functions and kernels need when nvcc compiles them, and that mean nothing to plain g++ and clang++.
#pragma once

/// In front of a function that both devices run.
#if defined(__CUDACC__)
#define HOLDFAST_HOST_DEVICE __host__ __device__
#else
#define HOLDFAST_HOST_DEVICE
#endif

/// Kernels, and the functions that launch them, belong to the shared object that compiled them: were the loader to merge
/// two objects' copies, one would launch through a module that the other's dlclose unloads.
#define HOLDFAST_HIDDEN __attribute__((visibility("hidden")))
