#define NVTX_NO_IMPL  // it is called by NVTX, and calls nothing of it
#include "nvtx_tool.hpp"

#include <nvtx3/nvToolsExtMem.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace support {

nvtx_books& nvtx_told() {
  static nvtx_books books;
  return books;
}

namespace {

template <class Description>
bool good(const Description* description) {
  const bool known =
      description->extCompatID == NVTX_EXT_COMPATID_MEM && description->structSize == sizeof(Description);
  nvtx_told().mistakes += known ? 0 : 1;
  return known;
}

std::mutex mutex;  // tools are told by all threads

nvtxDomainHandle_t create_domain(const char*) {
  static int domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

nvtxMemHeapHandle_t register_heap(nvtxDomainHandle_t, const nvtxMemHeapDesc_t* heap) {
  const std::lock_guard lock{mutex};
  if (!good(heap) || heap->type != NVTX_MEM_TYPE_VIRTUAL_ADDRESS ||
      heap->usage != NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR) {
    return nullptr;
  }
  const auto* const range = static_cast<const nvtxMemVirtualRangeDesc_t*>(heap->typeSpecificDesc);
  auto* const handle = new nvtx_heap{range->ptr, range->size, heap->message.ascii};
  nvtx_told().heaps.emplace(handle, *handle);
  return reinterpret_cast<nvtxMemHeapHandle_t>(handle);
}

void unregister_heap(nvtxDomainHandle_t, nvtxMemHeapHandle_t heap) {
  const std::lock_guard lock{mutex};
  const auto* const handle = reinterpret_cast<const nvtx_heap*>(heap);
  if (nvtx_told().heaps.erase(handle) == 1) {
    delete handle;
  } else {
    ++nvtx_told().mistakes;
  }
}

void register_regions(nvtxDomainHandle_t, const nvtxMemRegionsRegisterBatch_t* batch) {
  const std::lock_guard lock{mutex};
  if (!good(batch)) return;
  const auto* const ranges = static_cast<const nvtxMemVirtualRangeDesc_t*>(batch->regionDescElements);
  for (std::size_t i = 0; i < batch->regionCount; ++i) {
    const nvtx_region region{ranges[i].size, {}, reinterpret_cast<const nvtx_heap*>(batch->heap)};
    nvtx_told().mistakes += nvtx_told().regions.emplace(ranges[i].ptr, region).second ? 0 : 1;
  }
}

void resize_regions(nvtxDomainHandle_t, const nvtxMemRegionsResizeBatch_t* batch) {
  const std::lock_guard lock{mutex};
  if (!good(batch)) return;
  const auto* const ranges = static_cast<const nvtxMemVirtualRangeDesc_t*>(batch->regionDescElements);
  for (std::size_t i = 0; i < batch->regionDescCount; ++i) nvtx_told().regions.at(ranges[i].ptr).bytes = ranges[i].size;
}

void name_regions(nvtxDomainHandle_t, const nvtxMemRegionsNameBatch_t* batch) {
  const std::lock_guard lock{mutex};
  if (!good(batch)) return;
  for (std::size_t i = 0; i < batch->regionCount; ++i) {
    const nvtxMemRegionNameDesc_t& named = batch->regionElements[i];
    nvtx_told().regions.at(named.region.pointer).name = named.name.ascii;
  }
}

void unregister_regions(nvtxDomainHandle_t, const nvtxMemRegionsUnregisterBatch_t* batch) {
  const std::lock_guard lock{mutex};
  if (!good(batch)) return;
  for (std::size_t i = 0; i < batch->refCount; ++i) {
    nvtx_told().mistakes += nvtx_told().regions.erase(batch->refElements[i].pointer) == 1 ? 0 : 1;
  }
}

int attach(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE2_DomainCreateA) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
  return 1;
}

int attach_extension(nvtxExtModuleInfo_t* module) {
  if (module->moduleId != NVTX_EXT_MODULEID_MEM || module->compatId != NVTX_EXT_COMPATID_MEM) return 0;
  std::intptr_t* const slots = module->segments[0].functionSlots;
  slots[NVTX3EXT_CBID_nvtxMemHeapRegister] = reinterpret_cast<std::intptr_t>(&register_heap);
  slots[NVTX3EXT_CBID_nvtxMemHeapUnregister] = reinterpret_cast<std::intptr_t>(&unregister_heap);
  slots[NVTX3EXT_CBID_nvtxMemRegionsRegister] = reinterpret_cast<std::intptr_t>(&register_regions);
  slots[NVTX3EXT_CBID_nvtxMemRegionsResize] = reinterpret_cast<std::intptr_t>(&resize_regions);
  slots[NVTX3EXT_CBID_nvtxMemRegionsUnregister] = reinterpret_cast<std::intptr_t>(&unregister_regions);
  slots[NVTX3EXT_CBID_nvtxMemRegionsName] = reinterpret_cast<std::intptr_t>(&name_regions);
  return 1;
}

}  // namespace
}  // namespace support

// What NVTX looks for in a program.
extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = support::attach;
NvtxExtInitializeInjectionFunc_t InitializeInjectionNvtxExtension_fnptr = support::attach_extension;
}
