// Python bindings: conversions only. The interpreter lock is released around every call into the index.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "drafting/draft_batch.hpp"
#include "drafting/drafter.hpp"
#include "drafting/passages.hpp"
#include "index/suffix_index.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace agentspec;

namespace {

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using Indexes = std::vector<std::pair<SuffixIndex*, int>>;

template <class T>
std::span<const T> view(const Input<T>& array) {
    return {array.data(), array.size()};
}

/// The items as an array, records of plain numbers as their bytes.
template <class T, class Allocator>
auto array_of(std::vector<T, Allocator> items) {
    using Item = std::conditional_t<std::is_arithmetic_v<T>, T, std::uint8_t>;
    auto* owned = new std::vector<T, Allocator>(std::move(items));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T, Allocator>*>(p); });
    return Output<Item>(reinterpret_cast<Item*>(owned->data()), {owned->size() * (sizeof(T) / sizeof(Item))}, owner);
}

template <class Call>
auto unlocked(Call&& call) {
    const Released scope;
    return call();
}

/// A method of an index as a function that returns an array.
template <class Item, class Argument>
auto arrays_by(std::vector<Item> (SuffixIndex::*method)(Argument) const) {
    return [method](const SuffixIndex& self, Argument argument) {
        return array_of(unlocked([&] { return (self.*method)(argument); }));
    };
}

std::vector<SourcedIndex> sourced(const Indexes& indexes) {
    std::vector<SourcedIndex> out;
    for (const auto& [index, source] : indexes) out.push_back({index, source});
    return out;
}

/// A column of a tree, which the array keeps alive.
template <class T>
auto column(std::vector<T> DraftTree::* member) {
    return [member](DraftTree& tree) { return Output<T>((tree.*member).data(), {(tree.*member).size()}); };
}

using Job = std::tuple<const Drafter*, Indexes, Input<Token>, std::size_t, double, bool>;

/// In `patience` seconds from now, a million at most: the clock knows no infinity.
Deadline within(std::optional<double> patience) {
    using std::chrono::steady_clock, std::chrono::duration_cast;
    if (!patience) return {};
    const std::chrono::duration<double> seconds(std::min(*patience, 1e6));
    return steady_clock::now() + duration_cast<steady_clock::duration>(seconds);
}

std::vector<DraftTree> drafts_of(const std::vector<Job>& asked, std::optional<double> patience) {
    std::vector<DraftJob> jobs;
    for (const auto& [drafter, indexes, context, max_tokens, min_probability, chain] : asked) {
        jobs.push_back({drafter, sourced(indexes), view(context), max_tokens, min_probability, chain});
    }
    return unlocked([&] { return draft_batch(jobs, within(patience)); });
}

using Search = std::tuple<Passages*, std::optional<const Drafter*>, Indexes, std::vector<Token>>;

Output<Token> passages_of(const std::vector<Search>& asked, std::size_t nodes, Token vocabulary) {
    std::vector<PassageJob> jobs;
    for (const auto& [passages, drafter, indexes, first] : asked) {
        jobs.push_back({passages, drafter.value_or(nullptr), sourced(indexes), first});
    }
    return array_of(unlocked([&] { return find_passages(jobs, nodes, vocabulary); }));
}

void bind_index(nb::module_& m) {
    using Unlocked = nb::call_guard<Released>;
    nb::class_<SuffixIndex>(m, "SuffixIndex")
        .def(nb::init<std::size_t, std::size_t, bool, Position, bool>(), nb::kw_only(), "tail"_a = SuffixIndex::kTail,
             "ratio"_a = SuffixIndex::kRatio, "deferred"_a = false, "capacity"_a = SuffixIndex::kCapacity,
             "shapes"_a = false)
        .def(
            "append",
            [](SuffixIndex& self, SequenceId sequence, const Input<Token>& tokens,
               const std::optional<Input<Token>>& context) {
                const auto before = context ? view(*context) : std::span<const Token>();
                unlocked([&] { self.append(sequence, view(tokens), before); });
            },
            "sequence"_a, "tokens"_a.noconvert(), "context"_a.noconvert() = nb::none())
        .def("truncate", &SuffixIndex::truncate, "sequence"_a, "length"_a, Unlocked())
        .def(
            "remove",
            [](SuffixIndex& self, const Input<SequenceId>& sequences) {
                unlocked([&] { self.remove(view(sequences)); });
            },
            "sequences"_a.noconvert())
        .def("tokens", arrays_by(&SuffixIndex::tokens), "sequence"_a)
        .def("prefix", arrays_by(&SuffixIndex::prefix), "sequence"_a)
        .def("length", &SuffixIndex::length, "sequence"_a, Unlocked())
        .def(
            "common_prefix",
            [](const SuffixIndex& self, SequenceId id, const Input<Token>& tokens) {
                return unlocked([&] { return self.common_prefix(id, view(tokens)); });
            },
            "sequence"_a, "tokens"_a.noconvert())
        .def(
            "successors",
            [](const SuffixIndex& self, const Input<Token>& context) {
                Successors found = unlocked([&] { return self.successors(view(context)); });
                return std::tuple(array_of(std::move(found.tokens)), array_of(std::move(found.counts)),
                                  found.most_recent);
            },
            "context"_a.noconvert())
        .def_prop_ro("sequence_count", &SuffixIndex::sequence_count, Unlocked())
        .def_prop_ro("token_count", &SuffixIndex::token_count, Unlocked())
        .def_prop_ro("run_count", &SuffixIndex::run_count, Unlocked())
        .def("merge_step", &SuffixIndex::merge_step, Unlocked())
        .def_prop_ro("merging_due", &SuffixIndex::merging_due, Unlocked())
        .def("oldest", arrays_by(&SuffixIndex::oldest), "tokens"_a)
        .def("work",
             [](const SuffixIndex& self) {
                 const Work work = unlocked([&] { return self.work(); });
                 return std::tuple(work.locked, work.longest_hold);
             })
        .def("memory_bytes", &SuffixIndex::memory_bytes, Unlocked())
        .def("reclaimable_bytes", &SuffixIndex::reclaimable_bytes, Unlocked())
        .def("mapped_bytes", &SuffixIndex::mapped_bytes, Unlocked())
        .def(
            "freeze",
            [](const SuffixIndex& self, const Input<SequenceId>& kept) {
                Frozen frozen = unlocked([&] { return self.freeze(view(kept)); });
                return std::tuple(array_of(std::move(frozen.sequences)), array_of(std::move(frozen.pieces)),
                                  array_of(std::move(frozen.run)), array_of(std::move(frozen.log)));
            },
            "kept"_a.noconvert())
        .def_static(
            "load",
            [](int file, std::uint64_t offset, const std::array<std::uint64_t, 4>& counts, bool deferred) {
                return unlocked([&] { return SuffixIndex::load(file, {offset, counts}, deferred); });
            },
            "file"_a, "offset"_a, "counts"_a, "deferred"_a = false)
        .def("check_integrity", &SuffixIndex::check_integrity, Unlocked());
    nb::class_<IndexView>(m, "IndexView").def(nb::init<const SuffixIndex&>(), "index"_a);  // tests hold one
}

void bind_drafter(nb::module_& m) {
    nb::class_<Drafter>(m, "Drafter")
        .def(nb::init<std::uint32_t>(), nb::kw_only(), "scan_limit"_a = 64)
        .def(
            "observe",
            [](Drafter& self, const Indexes& indexes, const Input<Token>& context, const Input<Token>& tokens) {
                unlocked([&] { self.observe(sourced(indexes), view(context), view(tokens)); });
            },
            "indexes"_a, "context"_a.noconvert(), "tokens"_a.noconvert())
        .def("observe_end", &Drafter::observe_end, "token"_a, nb::call_guard<Released>())
        .def(
            "keep_ends",
            [](Drafter& self, const Input<Token>& tokens) { unlocked([&] { self.keep_ends(view(tokens)); }); },
            "tokens"_a.noconvert())
        .def("state", [](Drafter& self) { return array_of(unlocked([&] { return self.state(); })); })
        .def(
            "restore",
            [](Drafter& self, const Input<std::uint8_t>& state) { unlocked([&] { self.restore(view(state)); }); },
            "state"_a.noconvert())
        .def("ends", [](const Drafter& self) { return array_of(unlocked([&] { return self.ends(); })); })
        .def("memory_bytes", &Drafter::memory_bytes, nb::call_guard<Released>());
    nb::class_<Drafter::Reading>(m, "DrafterReading").def(nb::init<const Drafter&>(), "drafter"_a);  // tests hold one
    m.def(
        "are_tokens",
        [](nb::handle value) {
            Input<Token> array;
            return nb::try_cast(value, array, false) && array.size() > 0 && are_tokens(view(array));
        },
        "value"_a);
    nb::class_<DraftTree>(m, "DraftTree")
        .def("__len__", [](const DraftTree& tree) { return tree.tokens.size(); })
        .def_prop_ro("tokens", column(&DraftTree::tokens))
        .def_prop_ro("parents", column(&DraftTree::parents))
        .def_prop_ro("probabilities", column(&DraftTree::probabilities))
        .def_prop_ro("match_length", column(&DraftTree::match_length))
        .def_prop_ro("source", column(&DraftTree::sources))
        .def(
            "path_length",
            [](const DraftTree& tree, const Input<Token>& output) {
                return path_length(tree.tokens, tree.parents, view(output));
            },
            "output"_a.noconvert());
    m.def("draft_batch", &drafts_of, "jobs"_a, "patience"_a = nb::none());
}

void bind_passages(nb::module_& m) {
    nb::class_<Passages>(m, "Passages")
        .def(
            "__init__",
            [](Passages* self, const Input<Token>& text, std::size_t rows, std::size_t overlap, std::size_t width) {
                new (self) Passages(view(text), {rows, overlap, width});
            },
            "text"_a.noconvert(), nb::kw_only(), "rows"_a, "overlap"_a, "width"_a)
        .def(
            "advance", [](Passages& self, const Input<Token>& fresh) { self.advance(view(fresh)); },
            "fresh"_a.noconvert())
        .def_prop_ro("left", &Passages::left);
    m.def("find_passages", &passages_of, "jobs"_a, "nodes"_a, "vocabulary"_a = kMostToken + 1);
}

/// The errors of the core as those of the package.
void raise_own(const std::exception_ptr& thrown, void*) {
    const auto raise = [](const char* name, const std::exception& error) {
        PyErr_SetString(nb::module_::import_("agentspec.errors").attr(name).ptr(), error.what());
    };
    try {
        std::rethrow_exception(thrown);
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_KeyError, error.what());
    } catch (const std::domain_error& error) {
        raise("CacheFormatError", error);
    } catch (const std::logic_error& error) {
        raise("InvalidRequestError", error);
    }
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native suffix index and drafter; use them through agentspec.cache.index.";
    nb::register_exception_translator(raise_own);
    Released::forget_at_fork();
    m.def("quiesce", [] {
        Released::quiesce();
        nb::set_leak_warnings(false);  // daemon threads keep what their frames hold; the process ends with them
    });
    bind_index(m);
    bind_drafter(m);
    bind_passages(m);
}
