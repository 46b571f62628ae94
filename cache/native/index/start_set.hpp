// The pairs of tokens after which pieces of the log begin.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "index/pages.hpp"

namespace agentspec {

/// A set of pairs of tokens. One thread adds, while others may ask; what is added in the middle of an answer may be
/// missed.
class StartSet {
public:
    explicit StartSet(std::size_t most) : slots_(std::bit_ceil(2 * most), kNone) {}

    bool contains(std::uint64_t pair) const {
        for (std::size_t at = place(pair);; at = (at + 1) & (slots_.size() - 1)) {
            const std::uint64_t found = __atomic_load_n(&slots_[at], __ATOMIC_RELAXED);
            if (found == pair) return true;
            if (found == kNone) return false;
        }
    }
    void add(std::uint64_t pair) {
        std::size_t at = place(pair);
        while (slots_[at] != kNone && slots_[at] != pair) at = (at + 1) & (slots_.size() - 1);
        if (slots_[at] == kNone) ++size_;
        __atomic_store_n(&slots_[at], pair, __ATOMIC_RELAXED);
    }
    std::size_t memory_bytes() const { return slots_.size() * sizeof(slots_[0]); }
    /// Whether the set is too full for one more.
    bool full() const { return 2 * (size_ + 1) > slots_.size(); }
    std::shared_ptr<StartSet> larger() const {
        auto copied = std::make_shared<StartSet>(2 * size_ + 8);
        for (const std::uint64_t pair : slots_) {
            if (pair != kNone) copied->add(pair);
        }
        return copied;
    }

private:
    static constexpr std::uint64_t kNone = ~std::uint64_t{0};  // two boundaries: before no piece

    std::size_t place(std::uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15 >> 20) & (slots_.size() - 1); }

    PagedVector<std::uint64_t> slots_;
    std::size_t size_ = 0;
};

}  // namespace agentspec
