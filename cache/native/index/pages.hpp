// Memory of large arrays, taken from the system and returned to it: freed arrays do not stay in the process's heap,
// where merges would otherwise leave up to as much unused memory as the index takes.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "index/sizes.hpp"

namespace agentspec {

/// A standard allocator. Arrays too small to have pages of their own come from the heap.
template <class T>
struct PageAllocator {
    using value_type = T;

    PageAllocator() = default;
    template <class U>
    PageAllocator(const PageAllocator<U>&) {}

    T* allocate(std::size_t count) const {
        const std::size_t bytes = count * sizeof(T);
        if (bytes < kPagedBytes) return static_cast<T*>(::operator new(bytes));
        void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED) throw std::bad_alloc();
        return static_cast<T*>(pages);
    }

    void deallocate(T* array, std::size_t count) const noexcept {
        const std::size_t bytes = count * sizeof(T);
        if (bytes < kPagedBytes) {
            ::operator delete(array);
        } else {
            munmap(array, bytes);
        }
    }

    bool operator==(const PageAllocator&) const = default;
};

/// Its memory is taken as it is filled, where it has pages of its own.
template <class T>
using PagedVector = std::vector<T, PageAllocator<T>>;

/// Bytes that a vector takes, of which the first `filled` items are there.
template <class T>
std::size_t bytes_of(const PagedVector<T>& items, std::size_t filled) {
    return (items.capacity() * sizeof(T) >= kPagedBytes ? filled : items.capacity()) * sizeof(T);
}

/// Let the system have the pages that lie wholly between two addresses. Nobody may read them any more.
inline void give_back(const void* begin, const void* end) {
    static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
    const auto last = reinterpret_cast<std::uintptr_t>(end) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace agentspec
