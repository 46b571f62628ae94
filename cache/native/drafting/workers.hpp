// Threads that stay, and share the items of a batch with whoever asks for them.
#pragma once

#include <cstddef>
#include <functional>

namespace agentspec {

/// Do `task` on each of the items from 0 to `count` - 1, in this thread and in up to `threads - 1` others: whichever is
/// free takes the next. No item waits for a thread that does not run. What the first item that failed threw is thrown,
/// once all are done. The threads are started when they are first needed and stay; a forked process starts its own.
/// The task asks for no lock that a caller holds.
void share_out(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task);

/// End the threads, for the end of the process: from now on the callers do all work themselves.
void end_workers();

}  // namespace agentspec
