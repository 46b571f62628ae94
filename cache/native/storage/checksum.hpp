// XXH64 of Yann Collet's xxHash (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) with seed 0: finds damage, not
// forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace agentspec {

std::uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace agentspec
