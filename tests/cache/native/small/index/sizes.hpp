// In the place of cache/native/index/sizes.hpp in the stress program: so small that little text reaches every limit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace agentspec {

inline constexpr int kChunkBits = 9;
inline constexpr std::size_t kPiece = 300, kSlack = 300, kPagedBytes = 4096;

}  // namespace agentspec
