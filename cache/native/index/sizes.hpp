// Sizes that decide about memory and work, and about no draft.
#pragma once

#include <cstddef>
#include <cstdint>

namespace agentspec {

inline constexpr int kChunkBits = 16;  // positions that lie together in memory, as a power of two
inline constexpr std::size_t kPiece = std::size_t{1} << 16;  // positions merged at a time
inline constexpr std::size_t kSlack = 8 * 1024;  // places that a log may hold in vain, however small it is
inline constexpr std::size_t kPagedBytes = std::size_t{1} << 17;  // of an array that has pages of its own

}  // namespace agentspec
