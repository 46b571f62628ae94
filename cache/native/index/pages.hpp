// Memory of large arrays, taken from the system and returned to it: freed arrays do not stay in the process's heap,
// where merges would otherwise leave up to as much unused memory as the index takes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

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
        void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

}  // namespace agentspec
