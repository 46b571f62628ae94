#include "storage/checksum.hpp"

#include <bit>
#include <cstring>

namespace agentspec {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                        kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

template <class Word>
Word load(const std::byte* at) {
    Word word;
    std::memcpy(&word, at, sizeof(word));
    return word;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }

/// Four lanes over the whole stripes of 32 bytes; `at` is left behind the last.
std::uint64_t stripes(const std::byte*& at, const std::byte* end) {
    std::uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; end - at >= 32; at += 32) {
        for (int lane = 0; lane < 4; ++lane) lanes[lane] = round(lanes[lane], load<std::uint64_t>(at + 8 * lane));
    }
    std::uint64_t hash =
        std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
    return hash;
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes) {
    const std::byte* at = bytes.data();
    const std::byte* end = at + bytes.size();
    std::uint64_t hash = (bytes.size() >= 32 ? stripes(at, end) : kPrime5) + bytes.size();
    for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
    for (; end - at >= 4; at += 4) hash = std::rotl(hash ^ load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    for (; at < end; ++at) hash = std::rotl(hash ^ std::to_integer<std::uint64_t>(*at) * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

}  // namespace agentspec
