#include "pool.h"

#include <stdlib.h>

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpinsBeforeYield = 2000;  // some tens of microseconds

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits of a step are short unless the system took a core away: then it gets this one.
template <class Ready> void wait_for(Ready ready) {
  for (int spins = 0; !ready(); ++spins) {
    spins < kSpinsBeforeYield ? pause() : std::this_thread::yield();
  }
}

// Numbers below 2^-126 count as zero while a step runs: on x86 they cost a hundred cycles each.
class FlushTiny {
 public:
#if defined(__x86_64__)
  FlushTiny() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushTiny() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Queries that attention takes together: consecutive positions of one sequence. Of `count` tokens;
// `tokens` names them, null: the first of the step.
void cut_spans(const Step& step, const int32_t* tokens, int count, std::vector<Span>* spans) {
  const int most = queries_a_task(step);
  spans->clear();
  for (int first = 0, next = 0; first < count; first = next) {
    const int token = tokens ? tokens[first] : first;
    for (next = first + 1; next < count && next - first < most; ++next) {
      const int other = token + next - first;
      if (tokens && tokens[next] != other) break;
      if (step.rows[other] != step.rows[token]) break;
      if (step.positions[other] != step.positions[token] + next - first) break;
    }
    spans->push_back({token, next - first});
  }
}

// Scratch of this thread, kept from step to step.
float* scratch_of_thread(int64_t floats) {
  static thread_local std::vector<float> memory;
  const size_t wanted = static_cast<size_t>(floats) + 16;
  if (memory.size() < wanted) memory.resize(wanted);
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - at % 64) % 64 / sizeof(float);
}

}  // namespace

Pool::Pool(int threads, int spin_us, const Kernels* kernels)
    : threads_(threads), spin_us_(spin_us), kernels_(kernels) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::serve() {
  uint32_t seen = 0;
  while (true) {
    const auto began = std::chrono::steady_clock::now();
    for (int spins = 1; turn_ == seen && !stop_; ++spins) {
      pause();
      if (spins % 64 == 0 &&
          std::chrono::steady_clock::now() - began > std::chrono::microseconds(spin_us_)) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++asleep_;
        wake_.wait(lock, [&] { return turn_ != seen || stop_; });
        --asleep_;
      }
    }
    if (stop_) return;
    // Enter, then look again: `run` changes the step only when nobody is inside an even turn.
    ++inside_;
    seen = turn_;
    if (seen % 2 == 1) work();
    --inside_;
  }
}

void Pool::plan(const Op* ops, int count, const Step& step) {
  ops_.assign(ops, ops + count);
  step_ = step;
  bool attends = false;
  for (const Op& op : ops_) attends |= op.kind == kAttend;
  scratch_floats_ = attends ? scratch_floats(step) : 0;
  if (attends) {
    cut_spans(step, nullptr, step.tokens, &spans_);
    cut_spans(step, step.head_rows, step.head_rows ? step.head_count : 0, &head_spans_);
  }
  if (progress_size_ < ops_.size()) {
    progress_size_ = ops_.size();
    progress_ = std::make_unique<Progress[]>(progress_size_);
  }
  for (int i = 0; i < count; ++i) {
    progress_[i].taken = 0;
    progress_[i].done = 0;
    progress_[i].pieces =
        pieces_of(ops_[i], step_, static_cast<int>(spans_of(ops_[i]).size()), threads_);
  }
}

void Pool::work() {
  const FlushTiny flush;
  Work work{};
  work.step = &step_;
  work.threads = threads_;
  work.scratch = scratch_of_thread(scratch_floats_);
  for (size_t i = 0; i < ops_.size(); ++i) {
    Progress& progress = progress_[i];
    work.op = &ops_[i];
    work.spans = spans_of(ops_[i]).data();
    while ((work.piece = progress.taken.fetch_add(1, std::memory_order_relaxed)) <
           progress.pieces) {
      switch (ops_[i].kind) {
        case kEmbed: kernels_->embed(work); break;
        case kQuantise: kernels_->quantise(work); break;
        case kLinear:
        case kGated: kernels_->linear(work); break;
        case kRotate: kernels_->rotate(work); break;
        case kAttend: kernels_->attend(work); break;
        case kGather: kernels_->gather(work); break;
        case kAddNormed: kernels_->add_normed(work); break;
        default: kernels_->peaks(work); break;
      }
      progress.done.fetch_add(1, std::memory_order_release);
    }
    wait_for([&] { return progress.done.load(std::memory_order_acquire) >= progress.pieces; });
  }
}

void Pool::run(const Op* ops, int count, const Step& step) {
  // Workers still leaving the step before this one read its ops.
  wait_for([&] { return inside_ == 0; });
  plan(ops, count, step);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++turn_;
  }
  if (asleep_ > 0) wake_.notify_all();
  work();
  ++turn_;
}
