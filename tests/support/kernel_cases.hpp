// What pad_queries, unpad_output and the executor must do, wherever they run.
//
// Typed suites over a world (kernel_host_world.hpp, kernel_cuda_world.cuh): each kind of test file instantiates them, so
// the behaviours and their names are the same on both devices. Every byte of every buffer is compared: outputs start
// poisoned, lie between canaries, and all that the kernel was not asked to write must still be poison.
#pragma once

#if defined(__CUDACC__)
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/kernel/unpad_output.cuh>
#else
#include <holdfast/kernel/pad_queries.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/kernel/unpad_output.hpp>
#endif
#include <holdfast/error.hpp>
#include <holdfast/view.hpp>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kernel_test {

using triple = std::array<std::int64_t, 3>;
using byte_vector = std::vector<std::byte>;

// --- buffers -----------------------------------------------------------------------------------------------------------

inline byte_vector random_bytes(std::size_t count, std::uint64_t seed) {
  byte_vector made(count);
  std::mt19937_64 generator(seed);
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t word = generator();
    std::memcpy(made.data() + i, &word, std::min<std::size_t>(8, count - i));
  }
  return made;
}

/// A view somewhere in a buffer: extents and strides in elements, and where element [0, 0, 0] is.
template <class T>
struct placed_view {
  triple extents;
  triple strides;
  std::int64_t first = 0;  // bytes from the buffer's start
  std::size_t buffer_bytes = 0;

  [[nodiscard]] std::size_t at(std::int64_t row, std::int64_t head, std::int64_t element) const {
    return static_cast<std::size_t>(first + (row * strides[0] + head * strides[1] + element * strides[2]) *
                                                std::int64_t{sizeof(T)});
  }

  template <class Element>
  [[nodiscard]] holdfast::strided_view<Element, 3> over(std::byte* buffer) const {
    return holdfast::make_strided_view<Element, 3>(reinterpret_cast<Element*>(buffer + first),
                                                   {extents[0], extents[1], extents[2]},
                                                   {strides[0], strides[1], strides[2]});
  }
};

/// Canaries on both sides; `shift` bytes off the 256-byte alignment.
template <class T>
placed_view<T> place(const triple& extents, const triple& strides, std::int64_t shift = 0) {
  constexpr std::int64_t canary = 256;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < 3; ++i) last += std::max<std::int64_t>(extents[i] - 1, 0) * strides[i];
  return {extents, strides, canary + shift,
          static_cast<std::size_t>(canary + shift + (last + 1) * std::int64_t{sizeof(T)} + canary)};
}

inline triple packed(const triple& extents) { return {extents[1] * extents[2], extents[2], 1}; }

/// What `out` must hold afterwards, by the plainest loop there is.
template <class T>
void copy_by_hand(const byte_vector& in, const placed_view<T>& from, byte_vector& out, const placed_view<T>& to) {
  const bool together = from.strides[2] == 1 && to.strides[2] == 1;
  const std::int64_t step = together ? to.extents[2] : 1;
  for (std::int64_t row = 0; row < to.extents[0]; ++row)
    for (std::int64_t head = 0; head < to.extents[1]; ++head)
      for (std::int64_t i = 0; i < to.extents[2]; i += step)
        std::memcpy(out.data() + to.at(row, head, i), in.data() + from.at(row, head, i),
                    static_cast<std::size_t>(step) * sizeof(T));
}

inline ::testing::AssertionResult same(const byte_vector& is, const byte_vector& should) {
  if (is == should) return ::testing::AssertionSuccess();
  const auto at =
      static_cast<std::size_t>(std::mismatch(is.begin(), is.end(), should.begin(), should.end()).first - is.begin());
  return ::testing::AssertionFailure() << "byte " << at << " of " << is.size() << " is " << std::to_integer<int>(is[at])
                                       << ", should be " << std::to_integer<int>(should[at]);
}

/// Buffers with a random input and a poisoned output, on a world.
template <class World, class T>
struct copy_buffers {
  World& world;
  placed_view<T> from, to;
  std::shared_ptr<std::byte> in = world.allocate(from.buffer_bytes);
  std::shared_ptr<std::byte> out = world.allocate(to.buffer_bytes);
  byte_vector in_bytes{}, out_bytes{};

  void fill(std::uint64_t seed, std::byte poison) {
    in_bytes = random_bytes(from.buffer_bytes, seed);
    out_bytes.assign(to.buffer_bytes, poison);
    world.upload(in.get(), in_bytes.data(), in_bytes.size());
    world.upload(out.get(), out_bytes.data(), out_bytes.size());
  }

  [[nodiscard]] auto in_view() const { return from.template over<const T>(in.get()); }
  [[nodiscard]] auto out_view() const { return to.template over<T>(out.get()); }

  /// Every element there, and every other byte of both buffers as it was.
  [[nodiscard]] ::testing::AssertionResult copied() {
    copy_by_hand(in_bytes, from, out_bytes, to);
    return unchanged();
  }

  [[nodiscard]] ::testing::AssertionResult unchanged() {
    byte_vector now(to.buffer_bytes);
    world.download(now.data(), out.get(), now.size());
    if (auto result = same(now, out_bytes); !result) return result << " (output)";
    now.resize(from.buffer_bytes);
    world.download(now.data(), in.get(), now.size());
    if (auto result = same(now, in_bytes); !result) return result << " (input)";
    return ::testing::AssertionSuccess();
  }
};

inline constexpr std::byte poisons[] = {std::byte{0xff}, std::byte{0x7f}};

template <class T, class World>
void expect_pad(World& world, const placed_view<T>& from, const placed_view<T>& to, std::uint64_t seed) {
  copy_buffers<World, T> buffers{world, from, to};
  buffers.fill(seed, poisons[seed % 2]);
  holdfast::pad_queries(world.stream(), buffers.in_view(), buffers.out_view());
  world.synchronize();
  EXPECT_TRUE(buffers.copied());
}

template <class T, class World>
void expect_unpad(World& world, const placed_view<T>& from, const placed_view<T>& to, std::uint64_t seed) {
  copy_buffers<World, T> buffers{world, from, to};
  buffers.fill(seed, poisons[seed % 2]);
  holdfast::unpad_output(world.stream(), buffers.in_view(), buffers.out_view());
  world.synchronize();
  EXPECT_TRUE(buffers.copied());
}

inline std::string name_of(std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  return "[" + std::to_string(rows) + ", " + std::to_string(heads) + ", " + std::to_string(head_dim) + "]";
}

// --- per element type ----------------------------------------------------------------------------------------------------

template <class World, class T>
struct subject {
  using world = World;
  using element = T;
};

template <class World>
using every_element = ::testing::Types<subject<World, __nv_fp8_e4m3>, subject<World, __nv_bfloat16>,
                                       subject<World, float>, subject<World, double>>;

template <class Subject>
class CopyOf : public ::testing::Test {
 public:
  using world_type = typename Subject::world;
  using element = typename Subject::element;

 protected:
  void SetUp() override {
    if (const char* why = world_type::unavailable()) GTEST_SKIP() << "no GPU: " << why;
    world_ = std::make_unique<world_type>();
  }
  world_type& world() { return *world_; }

 private:
  std::unique_ptr<world_type> world_;
};
TYPED_TEST_SUITE_P(CopyOf);

/// Fewer of the wide types, to save the sanitizers' time.
template <class T>
inline const std::vector<std::int64_t> all_rows = sizeof(T) <= 2 ? std::vector<std::int64_t>{0, 1, 3, 33}
                                                                 : std::vector<std::int64_t>{0, 1, 3};
inline constexpr std::int64_t all_heads[] = {1, 8, 16, 17, 32, 63, 64};
inline constexpr std::int64_t all_head_dims[] = {8, 512, 576, 584};
inline constexpr std::int64_t padded_heads = 64;

TYPED_TEST_P(CopyOf, PadWritesTheRealHeadsAndNothingElse) {
  using T = typename TestFixture::element;
  std::uint64_t seed = 0;
  for (const auto rows : all_rows<T>)
    for (const auto heads : all_heads)
      for (const auto head_dim : all_head_dims) {
        SCOPED_TRACE(name_of(rows, heads, head_dim));
        const triple shape{rows, heads, head_dim};
        expect_pad(this->world(), place<T>(shape, packed(shape)),
                   place<T>(shape, {padded_heads * head_dim, head_dim, 1}), ++seed);
      }
}

TYPED_TEST_P(CopyOf, UnpadWritesTheRealHeadsAndNothingElse) {
  using T = typename TestFixture::element;
  std::uint64_t seed = 0;
  for (const auto rows : all_rows<T>)
    for (const auto heads : all_heads)
      for (const auto head_dim : all_head_dims) {
        SCOPED_TRACE(name_of(rows, heads, head_dim));
        const triple shape{rows, heads, head_dim}, padded{rows, padded_heads, head_dim};
        expect_unpad(this->world(), place<T>(padded, packed(padded)), place<T>(shape, packed(shape)), ++seed);
      }
}

TYPED_TEST_P(CopyOf, AnyStrides) {
  using T = typename TestFixture::element;
  constexpr std::int64_t rows = 5, heads = 3, head_dim = 24;
  const triple shape{rows, heads, head_dim};
  const triple layouts[] = {
      packed(shape),
      {head_dim, rows * head_dim, 1},             // heads outermost
      {1, rows, rows * heads},                    // rows innermost
      {heads, 1, rows * heads},                   // heads innermost
      {heads * head_dim, 1, heads},               // heads innermost, rows outermost
      {2 * heads * head_dim, 2 * head_dim, 2},    // every second element
      {heads * head_dim + 7, head_dim, 1},        // odd gaps between rows
      {heads * (head_dim + 1), head_dim + 1, 1},  // odd gaps between heads
      {64 * head_dim, head_dim, 1},               // padded
      {head_dim * 64, 4 * head_dim, 1},           // every fourth head
  };
  std::uint64_t seed = 0;
  for (const auto& from : layouts)
    for (const auto& to : layouts) {
      SCOPED_TRACE("from strides " + name_of(from[0], from[1], from[2]) + " to " + name_of(to[0], to[1], to[2]));
      expect_pad(this->world(), place<T>(shape, from), place<T>(shape, to), ++seed);
      expect_unpad(this->world(), place<T>({rows, heads, head_dim}, from), place<T>({rows, heads - 1, head_dim}, to),
                   ++seed);
    }
  // one row, or one head, for all: strides of 0 are fine to read through
  expect_pad(this->world(), place<T>(shape, {0, head_dim, 1}), place<T>(shape, packed(shape)), ++seed);
  expect_pad(this->world(), place<T>(shape, {head_dim, 0, 1}), place<T>(shape, packed(shape)), ++seed);
  expect_pad(this->world(), place<T>(shape, {heads, 1, 0}), place<T>(shape, packed(shape)), ++seed);
}

TYPED_TEST_P(CopyOf, AnyAlignment) {
  using T = typename TestFixture::element;
  constexpr std::int64_t size = sizeof(T);
  const triple shape{3, 2, 40};
  std::uint64_t seed = 0;
  for (std::int64_t from = 0; from <= 16; from += size)
    for (std::int64_t to = 0; to <= 16; to += size) {
      SCOPED_TRACE("bytes off: " + std::to_string(from) + " and " + std::to_string(to));
      expect_pad(this->world(), place<T>(shape, packed(shape), from), place<T>(shape, {7 * 40, 40, 1}, to), ++seed);
      expect_pad(this->world(), place<T>(shape, packed(shape), from), place<T>(shape, {2 * 41, 41, 1}, to), ++seed);
    }
}

TYPED_TEST_P(CopyOf, NothingToPadIsAPlainCopy) {
  using T = typename TestFixture::element;
  const triple shape{33, 64, 72};
  expect_pad(this->world(), place<T>(shape, packed(shape)), place<T>(shape, packed(shape)), 1);
  expect_unpad(this->world(), place<T>(shape, packed(shape)), place<T>(shape, packed(shape)), 2);
}

REGISTER_TYPED_TEST_SUITE_P(CopyOf, PadWritesTheRealHeadsAndNothingElse, UnpadWritesTheRealHeadsAndNothingElse,
                            AnyStrides, AnyAlignment, NothingToPadIsAPlainCopy);

// --- whatever the element ----------------------------------------------------------------------------------------------

/// An mdspan of nobody's library, with a negative stride.
template <class T>
class backwards_view {
 public:
  using element_type = T;
  using extents_type = void;
  using layout_type = void;
  using accessor_type = void;
  using data_handle_type = T*;

  backwards_view(T* first, const triple& extents) : first_(first), extents_(extents) {}
  static constexpr std::size_t rank() { return 3; }
  static constexpr bool is_always_strided() { return true; }
  [[nodiscard]] T* data_handle() const { return first_; }
  [[nodiscard]] std::int64_t extent(std::size_t i) const { return extents_[i]; }
  [[nodiscard]] std::int64_t stride(std::size_t i) const {
    return std::array{-extents_[1] * extents_[2], extents_[2], std::int64_t{1}}[i];
  }

 private:
  T* first_;
  triple extents_;
};

/// What refused views point to.
inline std::max_align_t somewhere;

/// Counts how often each packet of each unit was stored, and keeps what was loaded for it.
struct counting_op {
  std::uint32_t* counts;
  std::uint64_t* values;
  std::int64_t unit_count;
  std::int32_t part_count;

  [[nodiscard]] std::int64_t units() const { return unit_count; }
  [[nodiscard]] std::int32_t parts() const { return part_count; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::uint64_t load(std::int64_t unit, std::int32_t part) const {
    return static_cast<std::uint64_t>(unit) << 32 | static_cast<std::uint32_t>(part);
  }
  HOLDFAST_HOST_DEVICE void store(std::int64_t unit, std::int32_t part, std::uint64_t value) const {
    const std::int64_t at = unit * part_count + part;
    values[at] = value;
#if defined(__CUDA_ARCH__)
    atomicAdd(counts + at, 1u);
#else
    ++counts[at];
#endif
  }
};

template <class World>
class Kernels : public ::testing::Test {
 protected:
  using element = __nv_bfloat16;

  void SetUp() override {
    if (const char* why = World::unavailable()) GTEST_SKIP() << "no GPU: " << why;
    world_ = std::make_unique<World>();
  }
  World& world() { return *world_; }

  /// Nothing of `work` reaches the stream, and it throws a logic_error that holds all of `words`.
  template <class Work>
  void expect_refused(const Work& work, const std::vector<std::string>& words) {
    auto recorded = world().record([&] {
      try {
        work();
        ADD_FAILURE() << "not refused";
      } catch (const holdfast::logic_error& error) {
        for (const auto& word : words)
          EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks: " << word;
      }
    });
    EXPECT_EQ(recorded.nodes(), 0u);
  }

  template <holdfast::row_op_shape Shape>
  void expect_each_packet_once(std::int64_t units, std::int32_t parts) {
    SCOPED_TRACE(std::to_string(units) + " units of " + std::to_string(parts));
    const auto count = static_cast<std::size_t>(units * parts);
    std::vector<std::uint32_t> counts(count, 0);
    std::vector<std::uint64_t> values(count, 0);
    const auto device_counts = world().allocate(count * 4), device_values = world().allocate(count * 8);
    world().upload(device_counts.get(), counts.data(), count * 4);
    world().upload(device_values.get(), values.data(), count * 8);
    const counting_op op{reinterpret_cast<std::uint32_t*>(device_counts.get()),
                         reinterpret_cast<std::uint64_t*>(device_values.get()), units, parts};
    holdfast::run_row_op<Shape>(world().stream(), op);
    world().synchronize();
    world().download(counts.data(), device_counts.get(), count * 4);
    world().download(values.data(), device_values.get(), count * 8);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(counts[i], 1u) << "packet " << i;
      ASSERT_EQ(values[i], op.load(static_cast<std::int64_t>(i) / parts,
                                   static_cast<std::int32_t>(static_cast<std::int64_t>(i) % parts)))
          << "packet " << i;
    }
  }

 private:
  std::unique_ptr<World> world_;
};
TYPED_TEST_SUITE_P(Kernels);

TYPED_TEST_P(Kernels, EveryPacketOnce) {
  constexpr holdfast::row_op_shape usual{};
  constexpr holdfast::row_op_shape odd{.threads = 96, .packets = 3};
  constexpr holdfast::row_op_shape looping{.threads = 32, .packets = 2, .max_blocks = 3};
  for (const std::int32_t parts : {1, 2, 7, 64, 72, 1023, 1024, 1025, 4097})
    for (const std::int64_t units : {1, 2, 33, 130}) {
      this->template expect_each_packet_once<usual>(units, parts);
      this->template expect_each_packet_once<odd>(units, parts);
      this->template expect_each_packet_once<looping>(units, parts);
    }
}

TYPED_TEST_P(Kernels, ProgrammaticLaunchKeepsTheOrderOfNeighbours) {
  constexpr holdfast::row_op_shape programmatic{.threads = 256, .packets = 4, .programmatic = true};
  for (int i = 0; i < 3; ++i) this->template expect_each_packet_once<programmatic>(33, 1025);
}

TYPED_TEST_P(Kernels, NoUnitsOrNoPartsIsNoNode) {
  auto& world = this->world();
  auto recorded = world.record([&] {
    holdfast::run_row_op(world.stream(), counting_op{nullptr, nullptr, 0, 5});
    holdfast::run_row_op(world.stream(), counting_op{nullptr, nullptr, 5, 0});
  });
  EXPECT_EQ(recorded.nodes(), 0u);
}

TYPED_TEST_P(Kernels, UncountableUnitsAreRefused) {
  auto& world = this->world();
  const auto run = [&](std::int64_t units, std::int32_t parts) {
    return [&world, units, parts] {
      holdfast::run_row_op(world.stream(), counting_op{nullptr, nullptr, units, parts});
    };
  };
  this->expect_refused(run(-1, 1), {"row operation", "-1 units"});
  this->expect_refused(run(1, -1), {"row operation", "-1 packets"});
  this->expect_refused(run(1, (1 << 30) + 1), {"row operation", "1073741825 packets"});
  this->expect_refused(run(std::int64_t{1} << 62, 2), {"row operation", "2^63"});
  this->expect_refused(run(std::numeric_limits<std::int64_t>::max(), 1), {"row operation", "2^63"});
}

TYPED_TEST_P(Kernels, ZeroSizesLeaveNoNode) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  for (const triple shape : {triple{0, 8, 512}, triple{8, 0, 512}, triple{8, 8, 0}}) {
    const auto from = place<T>(shape, packed(shape)), to = place<T>(shape, {64 * 512, 512, 1});
    copy_buffers<TypeParam, T> buffers{world, from, to};
    buffers.fill(1, poisons[0]);
    auto recorded = world.record([&] {
      holdfast::pad_queries(world.stream(), buffers.in_view(), buffers.out_view());
      holdfast::unpad_output(world.stream(), buffers.in_view(), buffers.out_view());
      const auto nothing = holdfast::make_strided_view<T, 3>(nullptr, {shape[0], shape[1], shape[2]}, {0, 0, 1});
      holdfast::pad_queries(world.stream(), nothing, nothing);
      holdfast::unpad_output(world.stream(), nothing, nothing);
    });
    EXPECT_EQ(recorded.nodes(), 0u);
    holdfast::pad_queries(world.stream(), buffers.in_view(), buffers.out_view());  // eagerly, too
    world.synchronize();
    EXPECT_TRUE(buffers.unchanged());
  }
}

TYPED_TEST_P(Kernels, ReplayReadsTheInputOfTheDay) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  const triple shape{33, 16, 512}, padded{33, 64, 512};
  copy_buffers<TypeParam, T> pad{world, place<T>(shape, packed(shape)), place<T>(shape, packed(padded))};
  copy_buffers<TypeParam, T> unpad{world, place<T>(padded, packed(padded)), place<T>(shape, packed(shape))};
  pad.fill(1, poisons[0]);
  unpad.fill(2, poisons[0]);
  auto recorded = world.record([&] {
    holdfast::pad_queries(world.stream(), pad.in_view(), pad.out_view());
    holdfast::unpad_output(world.stream(), unpad.in_view(), unpad.out_view());
  });
  EXPECT_EQ(recorded.nodes(), 2u);
  EXPECT_TRUE(pad.unchanged()) << "recording must not run it";
  for (std::uint64_t day = 3; day < 6; ++day) {
    pad.fill(day, poisons[day % 2]);
    unpad.fill(day + 10, poisons[day % 2]);
    recorded.replay();
    EXPECT_TRUE(pad.copied());
    EXPECT_TRUE(unpad.copied());
  }
}

TYPED_TEST_P(Kernels, OffsetsPass32Bits) {
  auto& world = this->world();
  using T = std::uint8_t;
  constexpr std::int64_t far = (std::int64_t{1} << 31) + 64;
  const triple shape{3, 3, 64};
  const auto vast = world.allocate_vast(static_cast<std::size_t>(2 * far + (1 << 20)));
  if (vast == nullptr) GTEST_SKIP() << "fewer than 8 GiB are free";
  for (const triple strides : {triple{far, 128, 1}, triple{128, far, 1}})
    for (const bool far_output : {true, false}) {
      SCOPED_TRACE((far_output ? "far output, strides " : "far input, strides ") +
                   name_of(strides[0], strides[1], strides[2]));
      const placed_view<T> far_place{shape, strides, 256, 0}, near_place = place<T>(shape, packed(shape));
      const byte_vector poison(256, poisons[0]);
      const auto near = world.allocate(near_place.buffer_bytes);
      const byte_vector random = random_bytes(near_place.buffer_bytes, 7);
      const byte_vector near_poison(near_place.buffer_bytes, poisons[1]);
      const byte_vector& near_before = far_output ? random : near_poison;
      world.upload(near.get(), near_before.data(), near_before.size());
      for (std::int64_t row = 0; row < 3; ++row)
        for (std::int64_t head = 0; head < 3; ++head)
          world.upload(vast.get() + far_place.at(row, head, 0) - 32,
                       far_output ? poison.data() : random.data() + row * 3 + head, 128);
      if (far_output)
        holdfast::pad_queries(world.stream(), near_place.template over<const T>(near.get()),
                              far_place.template over<T>(vast.get()));
      else
        holdfast::pad_queries(world.stream(), far_place.template over<const T>(vast.get()),
                              near_place.template over<T>(near.get()));
      world.synchronize();
      byte_vector near_now(near_place.buffer_bytes), far_now(128);
      world.download(near_now.data(), near.get(), near_now.size());
      if (far_output) {
        EXPECT_TRUE(same(near_now, near_before));
      }
      byte_vector near_should = near_before;
      for (std::int64_t row = 0; row < 3; ++row)
        for (std::int64_t head = 0; head < 3; ++head) {
          world.download(far_now.data(), vast.get() + far_place.at(row, head, 0) - 32, 128);
          const std::byte* near_head = near_now.data() + near_place.at(row, head, 0);
          EXPECT_TRUE(std::equal(near_head, near_head + 64, far_now.data() + 32)) << row << ", " << head;
          if (far_output) {
            EXPECT_TRUE(std::equal(far_now.begin(), far_now.begin() + 32, poison.begin()));
            EXPECT_TRUE(std::equal(far_now.begin() + 96, far_now.end(), poison.begin()));
          } else {
            std::copy_n(random.data() + row * 3 + head + 32, 64, near_should.data() + near_place.at(row, head, 0));
          }
        }
      if (!far_output) {
        EXPECT_TRUE(same(near_now, near_should));
      }
    }
}

TYPED_TEST_P(Kernels, RefusalsNameWhatIsWrong) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  const auto view = [](const triple& extents, const triple& strides, void* data = &somewhere) {
    return holdfast::make_strided_view<T, 3>(static_cast<T*>(data), {extents[0], extents[1], extents[2]},
                                             {strides[0], strides[1], strides[2]});
  };
  const auto pad = [&](const auto& in, const auto& out) {
    return [&world, in, out] { holdfast::pad_queries(world.stream(), in, out); };
  };
  const auto unpad = [&](const auto& padded, const auto& out) {
    return [&world, padded, out] { holdfast::unpad_output(world.stream(), padded, out); };
  };
  const triple strides{8192, 512, 1};
  const auto good = view({4, 16, 512}, strides);

  this->expect_refused(pad(view({3, 16, 512}, strides), good),
                       {"pad_queries", "rows differ", "in is [3, 16, 512]", "out is [4, 16, 512]", "[8192, 512, 1]"});
  this->expect_refused(pad(view({4, 17, 512}, strides), good), {"pad_queries", "16 heads asked of out", "in has 17"});
  this->expect_refused(pad(view({4, 15, 512}, strides), good), {"pad_queries", "16 heads asked of out", "in has 15"});
  this->expect_refused(pad(view({4, 16, 576}, strides), good), {"pad_queries", "head dimensions differ", "576", "512"});
  this->expect_refused(pad(view({4, 16, 512}, strides, nullptr), good), {"pad_queries", "data of in is null"});
  this->expect_refused(pad(good, view({4, 16, 512}, strides, nullptr)), {"pad_queries", "data of out is null"});
  this->expect_refused(pad(view({-1, 16, 512}, strides), view({-1, 16, 512}, strides)),
                       {"pad_queries", "in has a negative extent"});
  this->expect_refused(pad(view({0, 16, 512}, strides), view({0, 16, -512}, strides)),
                       {"pad_queries", "out has a negative extent"});
  this->expect_refused(unpad(good, view({4, 17, 512}, strides)),
                       {"unpad_output", "17 heads asked of out", "padded has 16"});
  this->expect_refused(unpad(good, view({3, 16, 512}, strides)), {"unpad_output", "rows differ", "padded is"});
  this->expect_refused(unpad(view({4, 16, 512}, strides, nullptr), good), {"unpad_output", "data of padded is null"});

  constexpr std::int64_t vast = std::int64_t{1} << 62;
  this->expect_refused(pad(view({4, 16, 512}, {vast, 512, 1}), good), {"pad_queries", "offsets of in", "2^63"});
  this->expect_refused(pad(good, view({4, 16, 512}, {vast / 2, 512, 1})), {"pad_queries", "offsets of out", "2^63"});
  this->expect_refused(pad(view({4, 16, 512}, {vast / 4, vast / 32, 1}), good), {"pad_queries", "offsets of in"});
  this->expect_refused(pad(view({1, 2, vast / 8}, {0, 0, 1}), view({1, 2, vast / 8}, {vast / 4, vast / 8, 1})),
                       {"pad_queries", "more than 1073741824 packets of"});
}

TYPED_TEST_P(Kernels, AcceptsEveryKindOfView) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  namespace stl = cuda::std;
  const triple shape{5, 3, 24};
  const auto place_packed = place<T>(shape, packed(shape));
  copy_buffers<TypeParam, T> buffers{world, place_packed, place_packed};
  const auto in = reinterpret_cast<T*>(buffers.in.get() + place_packed.first);
  const auto out = reinterpret_cast<T*>(buffers.out.get() + place_packed.first);

  const auto expect = [&](const auto& from, const auto& to) {
    buffers.fill(5, poisons[0]);
    holdfast::pad_queries(world.stream(), from, to);
    world.synchronize();
    EXPECT_TRUE(buffers.copied());
  };
  expect(holdfast::view<const T, 3>(in, 5, 3, 24), holdfast::view<T, 3>(out, 5, 3, 24));
  expect(stl::mdspan<T, stl::extents<int, 5, 3, 24>>(in),
         stl::mdspan<T, stl::extents<unsigned, stl::dynamic_extent, 3, 24>>(out, 5));

  // rows from the last to the first, on both sides: the same copy
  const std::int64_t last = 4 * 3 * 24;
  expect(backwards_view<const T>(in + last, shape), backwards_view<T>(out + last, shape));

  // layout_left: the packed buffers seen from the other end
  using left = stl::mdspan<T, stl::dextents<std::int64_t, 3>, stl::layout_left>;
  expect(left(in, 24, 3, 5), left(out, 24, 3, 5));
}

TYPED_TEST_P(Kernels, AcceptsWhatConvertsToAStream) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  const triple shape{3, 16, 512};
  const auto placed = place<T>(shape, packed(shape));
  const typename TypeParam::convertible_stream stream{world.stream()};
  copy_buffers<TypeParam, T> pad{world, placed, placed}, unpad{world, placed, placed};
  pad.fill(1, poisons[0]);
  unpad.fill(2, poisons[1]);
  holdfast::pad_queries(stream, pad.in_view(), pad.out_view());
  holdfast::unpad_output(stream, unpad.in_view(), unpad.out_view());
  world.synchronize();
  EXPECT_TRUE(pad.copied());
  EXPECT_TRUE(unpad.copied());
}

TYPED_TEST_P(Kernels, LeavesTheCurrentDeviceAlone) {
  using T = typename TestFixture::element;
  const int current = TypeParam::current_device();
  for (int ordinal = 0; ordinal < TypeParam::devices(); ++ordinal) {
    auto world = TypeParam::on_device(ordinal);
    const triple shape{3, 16, 512};
    const auto placed = place<T>(shape, packed(shape));
    copy_buffers<TypeParam, T> buffers{world, placed, placed};
    buffers.fill(1, poisons[0]);
    holdfast::pad_queries(world.stream(), buffers.in_view(), buffers.out_view());
    EXPECT_EQ(TypeParam::current_device(), current);
    world.synchronize();
    EXPECT_TRUE(buffers.copied());
  }
}

TYPED_TEST_P(Kernels, AFailedLaunchThrows) {
  auto& world = this->world();
  using T = typename TestFixture::element;
  const triple shape{3, 16, 512};
  const auto placed = place<T>(shape, packed(shape));
  copy_buffers<TypeParam, T> buffers{world, placed, placed};
  buffers.fill(1, poisons[0]);
  world.in_broken_capture([&] {
    try {
      holdfast::pad_queries(world.stream(), buffers.in_view(), buffers.out_view());
      ADD_FAILURE() << "an invalidated capture takes no launch";
    } catch (const holdfast::device_error& error) {
      EXPECT_EQ(error.code(), 901) << error.what();
    }
  });
  EXPECT_TRUE(buffers.unchanged());
}

REGISTER_TYPED_TEST_SUITE_P(Kernels, EveryPacketOnce, ProgrammaticLaunchKeepsTheOrderOfNeighbours,
                            NoUnitsOrNoPartsIsNoNode, UncountableUnitsAreRefused, ZeroSizesLeaveNoNode,
                            ReplayReadsTheInputOfTheDay, OffsetsPass32Bits, RefusalsNameWhatIsWrong,
                            AcceptsEveryKindOfView, AcceptsWhatConvertsToAStream, LeavesTheCurrentDeviceAlone,
                            AFailedLaunchThrows);

}  // namespace kernel_test
