#include "drafting/draft_batch.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

namespace agentspec {
namespace {

constexpr std::size_t kTokensPerThread = 256;  // drafting these takes several times as long as starting a thread

std::size_t threads_for(std::size_t jobs, std::size_t tokens) {
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());  // slow to ask for
    return std::min({cores, jobs, std::max<std::size_t>(1, tokens / kTokensPerThread)});
}

/// Start up to `count` threads, or as many as are to be had. No signal is handled in them: a program's handlers expect
/// threads of the program. Faults are not held back.
template <class Work>
std::vector<std::thread> started(std::size_t count, const Work& work) {
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
    std::vector<std::thread> threads;
    threads.reserve(count);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (threads.size() < count) threads.emplace_back(std::cref(work));
    } catch (const std::system_error&) {  // those there are do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return threads;
}

}  // namespace

std::vector<DraftTree> draft_batch(std::span<const DraftJob> jobs, const Deadline& until) {
    std::vector<DraftTree> trees(jobs.size());
    std::vector<std::exception_ptr> failures(jobs.size());
    std::atomic<std::size_t> next{0};  // whichever thread is free takes the next
    const auto work = [&]() noexcept {
        for (std::size_t i; (i = next++) < jobs.size();) {
            const auto& [drafter, indexes, context, max_tokens, min_probability, chain] = jobs[i];
            try {
                trees[i] = drafter->draft(indexes, context, max_tokens, min_probability, chain, until);
            } catch (...) {
                failures[i] = std::current_exception();
            }
        }
    };
    std::size_t tokens = 0;
    for (const DraftJob& job : jobs) tokens += std::min(job.max_tokens, kTokensPerThread) / (job.chain ? 2 : 1);
    const std::size_t threads = threads_for(jobs.size(), tokens);
    std::vector<std::thread> others;
    if (threads > 1) others = started(threads - 1, work);
    work();
    for (std::thread& other : others) other.join();
    for (const std::exception_ptr& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    return trees;
}

}  // namespace agentspec
