// The version of Holdfast (the one source of it: CMake reads it from here) and the name of the inline namespace that
// every header opens: `namespace holdfast::inline HOLDFAST_ABI`. Users never name it.
#pragma once

#define HOLDFAST_VERSION_MAJOR 0
#define HOLDFAST_VERSION_MINOR 1
#define HOLDFAST_VERSION_PATCH 0

// The null stream means another stream under nvcc --default-stream per-thread, in inline functions too: translation
// units of both kinds can meet in one program only because their names differ.
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define HOLDFAST_ABI v0_ptds
#else
#define HOLDFAST_ABI v0
#endif
