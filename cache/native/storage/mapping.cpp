#include "storage/mapping.hpp"

#include <sys/mman.h>

#include <new>

namespace agentspec {

Mapping::Mapping(int file, std::size_t bytes, std::size_t room) : size_(bytes + room) {
    constexpr int kAccess = PROT_READ | PROT_WRITE;
    void* all = mmap(nullptr, size_, kAccess, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(all);
    // The kernel zeroes the rest of the file's last page, so that the room begins right behind the last byte.
    if (mmap(all, bytes, kAccess, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED) {
        munmap(all, size_);
        throw std::bad_alloc();
    }
}

Mapping::~Mapping() { munmap(data_, size_); }

}  // namespace agentspec
