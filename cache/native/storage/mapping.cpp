#include "storage/mapping.hpp"

#include <sys/mman.h>

#include <new>

namespace agentspec {

Mapping::Mapping(int file, std::size_t bytes) : size_(bytes) {
    void* all = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(all);
}

Mapping::~Mapping() { munmap(data_, size_); }

}  // namespace agentspec
