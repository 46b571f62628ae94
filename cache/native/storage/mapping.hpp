// A file in memory, copied page by page as it is written to, with zeroed room behind it. POSIX.
#pragma once

#include <cstddef>

namespace agentspec {

class Mapping {
public:
    /// Map the first `bytes` of an open file, which must have as many, and at least `room` more. Untouched pages are
    /// those of the file, shared by all processes; room takes none until it is written. Throws std::bad_alloc.
    Mapping(int file, std::size_t bytes, std::size_t room);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    /// Bytes of file and room together.
    std::size_t size() const { return size_; }

private:
    std::byte* data_;
    std::size_t size_;
};

}  // namespace agentspec
