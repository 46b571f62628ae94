// A file mapped into memory, copy-on-write page by page, with zeroed room after its end. POSIX.
#pragma once

#include <cstddef>

namespace agentspec {

class Mapping {
public:
    /// Map the first `bytes` bytes of an open file, which must be that long, and at least `room` bytes after them. All
    /// processes share the pages not written to; room takes no memory until it is written. Throws std::bad_alloc.
    Mapping(int file, std::size_t bytes, std::size_t room);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    /// Bytes of file and room together, as mapped.
    std::size_t size() const { return size_; }

private:
    std::byte* data_;
    std::size_t size_;
};

}  // namespace agentspec
