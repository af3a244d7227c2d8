// The one thread pool: runs the ops of a step in order, each cut into pieces that threads take.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

class Pool {
 public:
  // `threads` counts the caller of `run`. A worker spins for about `spin_us` after a step, then
  // sleeps.
  Pool(int threads, int spin_us, const Kernels* kernels);
  ~Pool();

  int threads() const { return threads_; }
  const Kernels* kernels() const { return kernels_; }

  // Returns when all ops are done. One caller at a time.
  void run(const Op* ops, int count, const Step& step);

 private:
  // Threads that come late find the pieces of an op taken and go on to the next.
  struct alignas(64) Progress {
    std::atomic<int32_t> taken{0};
    std::atomic<int32_t> done{0};
    int32_t pieces = 0;
  };

  void work();  // the ops of the current step
  void serve();
  void plan(const Op* ops, int count, const Step& step);
  const std::vector<Span>& spans_of(const Op& op) const {
    return op.flags & kOfHead ? head_spans_ : spans_;
  }

  const int threads_;
  const int spin_us_;
  const Kernels* const kernels_;

  std::vector<Op> ops_;
  Step step_{};
  std::vector<Span> spans_;
  std::vector<Span> head_spans_;  // of the tokens in head_rows
  std::unique_ptr<Progress[]> progress_;
  size_t progress_size_ = 0;
  int64_t scratch_floats_ = 0;

  alignas(64) std::atomic<uint32_t> turn_{0};  // odd while a step runs
  std::atomic<int32_t> inside_{0};             // workers that may touch the current step
  std::atomic<int32_t> asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};
