// Every host header of Holdfast. CUDA launchers are in kernel/*.cuh and need nvcc.
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/gather_rows.hpp>
#include <holdfast/kernel/gather_selected.hpp>
#include <holdfast/kernel/pad_queries.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/kernel/unpad_output.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/padded_head_vector.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/cub_caching.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/resource/tail_padded.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/version.hpp>
#include <holdfast/view.hpp>
