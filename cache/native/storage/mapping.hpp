// A file mapped into memory, to be read. POSIX.
#pragma once

#include <cstddef>

namespace agentspec {

class Mapping {
public:
    /// Map the first `bytes` bytes of an open file, which must be that long. All processes share its pages. Throws
    /// std::bad_alloc.
    Mapping(int file, std::size_t bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    const std::byte* data() const { return data_; }

private:
    std::byte* data_;
    std::size_t size_;
};

}  // namespace agentspec
