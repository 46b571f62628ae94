// A file mapped into memory, to be read. POSIX.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace agentspec {

class Mapping {
public:
    /// Map the first `bytes` bytes of an open file, which must be that long. All processes share its pages. Throws
    /// std::bad_alloc.
    Mapping(int file, std::size_t bytes) : size_(bytes) {
        void* all = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
        if (all == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(all);
    }
    ~Mapping() { munmap(data_, size_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    const std::byte* data() const { return data_; }

private:
    std::byte* data_;
    std::size_t size_;
};

}  // namespace agentspec
