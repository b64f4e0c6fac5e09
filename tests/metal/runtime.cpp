// The simulator: runs a compiled kernel on a CPU, one fiber per GPU thread.
//
// A fiber runs until it needs its simdgroup (an exchange) or its threadgroup (a barrier) and then hands over. Waiting at
// different places is what a GPU forbids, so it ends the launch with a report.
//
// With CHECKED, kernels are compiled with -fsanitize=thread but linked to the __tsan_* functions below instead of the
// sanitizer's: every load and store comes by here. It must lie in a buffer, read what was written, be ordered by a
// barrier with what other threads did to the same byte, and is counted: bytes, and 128-byte lines per simdgroup.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint32_t kLanes = 32, kMaxThreads = 1024;
// An odd number of lines between stacks, so that the same local of all lanes does not fall into one cache set.
constexpr size_t kStack = 64 * 1024 + 64 * 17;

enum class State : uint8_t { kReady, kExchange, kSimdBarrier, kBarrier, kDone };
enum Memory : uint32_t { kDevice = 0, kThreadgroup = 1 };
// kPastShared: the gap after a threadgroup array.
enum class Kind : uint64_t { kInput = 0, kOutput = 1, kShared = 2, kPastShared = 3 };

// Where a thread stands; simulator.py knows this order.
struct Coordinates {
  uint32_t thread_in_grid[3], thread_in_threadgroup[3], threadgroup[3], threadgroup_size[3], threadgroups[3], grid[3];
  uint32_t index, lane, simdgroup, simdgroups;
};

struct Fiber {
  void* stack_pointer;
  char* stack;
  State state;
  uint32_t index, lane, simdgroup, turn, operation, memory;
  void* place;
  Coordinates at;
};

struct Simdgroup {
  alignas(16) unsigned char slots[2][kLanes * 8];
  uint32_t epoch[2];
};

struct Region {
  uint64_t begin, end;
  Kind kind;
  uint64_t argument, loaded, stored, unwritten, lines, ideal;
};

typedef void (*Entry)(const uint64_t* arguments, const uint32_t* coordinates);

Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / kLanes];
Fiber* current;
void* scheduler;
Entry entry;
const uint64_t* arguments;
uint32_t threads, threadgroup_index, epoch[2], last_of_simdgroup;
std::vector<Region> regions;
std::string reports;
std::set<std::pair<std::string, void*>> reported;
sigjmp_buf escape;
bool running;

void report(const char* kind, void* place, const char* format, ...) {
  if (!reported.insert({kind, place}).second || reported.size() > 20) return;
  char text[400], line[500];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  snprintf(line, sizeof line, "%s\t%lx\t%s\n", kind, (unsigned long)place, text);
  reports += line;
}

}  // namespace

// ---- fibers ----

extern "C" void switch_stack(void** save, void* to);
asm(R"(
.text
.globl switch_stack
.hidden switch_stack
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace {

void hand_over() {
  Fiber* self = current;
  for (uint32_t i = self->index + 1; i < last_of_simdgroup; ++i) {
    if (fibers[i].state == State::kReady) {
      current = &fibers[i];
      switch_stack(&self->stack_pointer, current->stack_pointer);
      return;
    }
  }
  switch_stack(&self->stack_pointer, scheduler);
}

void fiber_main() {
  entry(arguments, (const uint32_t*)&current->at);
  current->state = State::kDone;
  hand_over();
  abort();
}

void prepare(Fiber& f) {
  auto top = (uint64_t*)(((uint64_t)f.stack + kStack) & ~63ull);
  *--top = 0;  // keeps the alignment a call would leave
  *--top = (uint64_t)&fiber_main;
  for (int i = 0; i < 6; ++i) *--top = 0;
  f.stack_pointer = top;
  f.state = State::kReady;
  f.turn = 0;
}

void wait(State state, uint32_t operation, uint32_t memory, void* place) {
  current->state = state;
  current->operation = operation;
  current->memory = memory;
  current->place = place;
  hand_over();
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

EXPORTED void simulator_threadgroup_barrier(uint32_t memory) { wait(State::kBarrier, 0, memory, CALLER); }
EXPORTED void simulator_simdgroup_barrier(uint32_t memory) { wait(State::kSimdBarrier, 0, memory, CALLER); }
EXPORTED uint32_t simulator_lane() { return current->lane; }
EXPORTED const unsigned char* simulator_exchange(const void* value, uint32_t size, uint32_t operation) {
  // Two tables in turn: a lane may publish its next value while others still read this one.
  unsigned char* slots = simdgroups[current->simdgroup].slots[current->turn];
  current->turn ^= 1;
  memcpy(slots + 8 * current->lane, value, size);
  wait(State::kExchange, operation, 0, CALLER);
  return slots;
}

// ---- accesses ----

#ifdef CHECKED
namespace {

constexpr uint32_t kLine = 128;

enum class Readers : uint8_t { kNone, kOne, kSimdgroup, kThreadgroup, kGrid };
struct Touch {
  uint32_t thread, epoch, simd_epoch;  // thread: 1 + index in the grid; 0: nobody
};
struct Shadow {
  Touch write, read;
  Readers readers;
  bool written;
};
struct Access {  // the same execution of one instruction by the lanes of a simdgroup
  uint32_t lines[2 * kLanes], count, bytes;
};
struct Site {
  std::vector<Access> accesses;
  uint32_t executions[kLanes];
  Region* region;
};

std::vector<std::vector<Shadow>> shadows;
std::map<std::pair<void*, uint32_t>, Site> sites;

uint32_t group_of(uint32_t thread) { return (thread - 1) / kMaxThreads; }
uint32_t simdgroup_of(uint32_t thread) { return (thread - 1) / kLanes; }

bool ordered(const Touch& before, const Touch& now) {
  if (before.thread == now.thread) return true;
  if (group_of(before.thread) != group_of(now.thread)) return false;
  if (before.epoch != now.epoch) return true;
  return simdgroup_of(before.thread) == simdgroup_of(now.thread) && before.simd_epoch != now.simd_epoch;
}

bool reads_ordered(const Shadow& s, const Touch& now) {
  if (s.readers == Readers::kNone) return true;
  if (s.readers == Readers::kOne) return ordered(s.read, now);
  if (s.readers == Readers::kGrid || group_of(s.read.thread) != group_of(now.thread)) return false;
  if (s.read.epoch != now.epoch) return true;
  return s.readers == Readers::kSimdgroup && simdgroup_of(s.read.thread) == simdgroup_of(now.thread) &&
         s.read.simd_epoch != now.simd_epoch;
}

void remember_read(Shadow& s, const Touch& now) {
  if (s.readers == Readers::kGrid) return;
  const bool fresh = s.readers == Readers::kNone;
  if (!fresh && group_of(s.read.thread) != group_of(now.thread)) {
    s.readers = Readers::kGrid;
  } else if (fresh || s.read.epoch != now.epoch) {
    s.readers = Readers::kOne;
  } else if (simdgroup_of(s.read.thread) != simdgroup_of(now.thread)) {
    s.readers = Readers::kThreadgroup;
  } else if (s.readers != Readers::kThreadgroup) {
    if (s.read.simd_epoch != now.simd_epoch) s.readers = Readers::kOne;
    else if (s.read.thread != now.thread) s.readers = Readers::kSimdgroup;
  }
  s.read = now;
}

void count(Region& region, uint64_t address, uint32_t size, bool store, void* place) {
  (store ? region.stored : region.loaded) += size;
  if (region.kind == Kind::kShared) return;
  Site& site = sites[{place, current->simdgroup}];
  site.region = &region;
  const uint32_t nth = site.executions[current->lane]++;
  if (site.accesses.size() <= nth) site.accesses.resize(nth + 1);
  Access& access = site.accesses[nth];
  access.bytes += size;
  for (uint64_t line = address / kLine; line <= (address + size - 1) / kLine; ++line) {
    uint32_t* end = access.lines + access.count;
    if (std::find(access.lines, end, (uint32_t)line) == end) access.lines[access.count++] = (uint32_t)line;
  }
}

void sum_up_sites() {
  for (auto& [key, site] : sites) {
    for (const Access& access : site.accesses) {
      site.region->lines += access.count;
      site.region->ideal += (access.bytes + kLine - 1) / kLine;
    }
  }
  sites.clear();
}

bool ours(uint64_t address) {
  const auto stacks = (uint64_t)fibers[0].stack, tables = (uint64_t)simdgroups;
  if (address - stacks < kStack * kMaxThreads || address - tables < sizeof simdgroups) return true;
  Dl_info info;  // a constant of the kernel's object
  return dladdr((void*)address, &info) && info.dli_fbase;
}

const char* const kKinds[] = {"buffer", "buffer", "threadgroup array", "threadgroup array"};

void access(uint64_t address, uint32_t size, bool store, void* place) {
  if (!running) return;
  const char* what = store ? "store" : "load";
  size_t which = 0;
  while (which < regions.size() && !(address >= regions[which].begin && address < regions[which].end)) ++which;
  if (which == regions.size()) {
    if (ours(address)) return;
    uint64_t near = ~0ull, name = 0, kind = 0;
    for (const Region& r : regions) {
      const uint64_t distance = address < r.begin ? r.begin - address : address - r.end;
      if (distance < near) near = distance, name = r.argument, kind = (uint64_t)r.kind;
    }
    report("bounds", place, "%s of %u bytes outside every buffer, nearest is %s %lu; thread %u of threadgroup %u", what,
           size, kKinds[kind], (unsigned long)name, current->index, threadgroup_index);
    siglongjmp(escape, 1);
  }
  Region& region = regions[which];
  const char* kind = kKinds[(int)region.kind];
  const auto name = (unsigned long)region.argument;
  if (address + size > region.end || region.kind == Kind::kPastShared) {
    report("bounds", place, "%s of %u bytes runs past the end of %s %lu; thread %u of threadgroup %u", what, size, kind,
           name, current->index, threadgroup_index);
    siglongjmp(escape, 1);
  }
  if (store && region.kind == Kind::kInput) {
    report("const", place, "store to buffer %lu, an input", name);
    siglongjmp(escape, 1);
  }
  count(region, address, size, store, place);
  const Memory memory = region.kind == Kind::kShared ? kThreadgroup : kDevice;
  const Touch now{threadgroup_index * kMaxThreads + current->index + 1, epoch[memory],
                  simdgroups[current->simdgroup].epoch[memory]};
  for (uint32_t i = 0; i < size && region.kind != Kind::kInput; ++i) {
    const uint64_t offset = address + i - region.begin;
    Shadow& shadow = shadows[which][offset];
    if (!store && !shadow.written) {
      report("uninitialised", place, "load of %s %lu, byte %lu, that nothing wrote; thread %u of threadgroup %u", kind,
             name, (unsigned long)offset, current->index, threadgroup_index);
    }
    const bool clean = (!shadow.write.thread || ordered(shadow.write, now)) && (!store || reads_ordered(shadow, now));
    if (!clean) {
      report("race", place, "%s of %s %lu, byte %lu, by thread %u of threadgroup %u is not ordered with another thread's",
             what, kind, name, (unsigned long)offset, current->index, threadgroup_index);
      return;
    }
    if (store) {
      shadow.write = now;
      shadow.written = true;
      shadow.readers = Readers::kNone;
    } else {
      remember_read(shadow, now);
    }
  }
}

void checked_access(void* p, uint32_t size, bool store, bool aligned, void* place) {
  if (aligned && (uint64_t)p % size) {
    report("alignment", place, "%u-byte access at an address %lu past a multiple of it", size, (uint64_t)p % size);
  }
  access((uint64_t)p, size, store, place);
}

}  // namespace

#define ACCESSES(size)                                                                                  \
  EXPORTED void __tsan_read##size(void* p) { checked_access(p, size, false, true, CALLER); }            \
  EXPORTED void __tsan_write##size(void* p) { checked_access(p, size, true, true, CALLER); }            \
  EXPORTED void __tsan_unaligned_read##size(void* p) { checked_access(p, size, false, false, CALLER); } \
  EXPORTED void __tsan_unaligned_write##size(void* p) { checked_access(p, size, true, false, CALLER); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
EXPORTED void __tsan_init() {}
EXPORTED void* __tsan_memcpy(void* to, const void* from, size_t size) {
  access((uint64_t)from, size, false, CALLER);
  access((uint64_t)to, size, true, CALLER);
  return memcpy(to, from, size);
}
EXPORTED void* __tsan_memset(void* to, int value, size_t size) {
  access((uint64_t)to, size, true, CALLER);
  return memset(to, value, size);
}
#endif

// ---- scheduling ----

namespace {

// Runs a simdgroup until every lane is at a threadgroup barrier or done; false if its lanes part ways.
bool run_simdgroup(uint32_t which) {
  const uint32_t begin = which * kLanes, end = std::min(begin + kLanes, threads);
  last_of_simdgroup = end;
  for (;;) {
    for (uint32_t i = begin; i < end; ++i) {
      if (fibers[i].state != State::kReady) continue;
      current = &fibers[i];
      switch_stack(&scheduler, current->stack_pointer);
      break;
    }
    Fiber& one = fibers[begin];
    for (uint32_t i = begin; i < end; ++i) {
      const Fiber& other = fibers[i];
      // Only inside a simdgroup operation need all lanes agree here; barriers are judged for the whole threadgroup.
      const bool together = one.state == State::kExchange || one.state == State::kSimdBarrier ||
                            other.state == State::kExchange || other.state == State::kSimdBarrier;
      if (!together) continue;
      if (other.state != one.state || other.place != one.place || other.operation != one.operation) {
        void* place = one.state == State::kExchange || one.state == State::kSimdBarrier ? one.place : other.place;
        report("divergence", place, "lanes of simdgroup %u in threadgroup %u do not meet at this simdgroup operation",
               which, threadgroup_index);
        return false;
      }
    }
    if (one.state != State::kExchange && one.state != State::kSimdBarrier) return true;
    if (one.state == State::kSimdBarrier) {
      for (uint32_t m : {kDevice, kThreadgroup}) simdgroups[which].epoch[m] += (one.memory >> m) & 1;
    }
    for (uint32_t i = begin; i < end; ++i) fibers[i].state = State::kReady;
  }
}

bool run_threadgroup(std::vector<uint32_t>& order, std::mt19937* shuffle) {
  for (;;) {
    if (shuffle) std::shuffle(order.begin(), order.end(), *shuffle);
    for (uint32_t which : order) {
      if (!run_simdgroup(which)) return false;
    }
    const Fiber& one = fibers[0];
    for (uint32_t i = 1; i < threads; ++i) {
      if (fibers[i].state == one.state && (one.state == State::kDone || fibers[i].place == one.place)) continue;
      report("divergence", one.state == State::kBarrier ? one.place : fibers[i].place,
             "threads 0 and %u of threadgroup %u do not meet at this barrier", i, threadgroup_index);
      return false;
    }
    if (one.state == State::kDone) return true;
    for (uint32_t m : {kDevice, kThreadgroup}) epoch[m] += (one.memory >> m) & 1;
    for (uint32_t i = 0; i < threads; ++i) fibers[i].state = State::kReady;
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!running) {
    ::signal(signal, SIG_DFL);
    return;
  }
  auto* place = (char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
  report(signal == SIGFPE ? "arithmetic" : "bounds", place, "signal %d at address %p; thread %u of threadgroup %u", signal,
         info->si_addr, current->index, threadgroup_index);
  siglongjmp(escape, 1);
}

}  // namespace

struct Launch {
  uint64_t entry;
  const uint64_t* arguments;
  uint32_t grid[3], threadgroup[3];
  uint64_t region_count;
  const uint64_t* regions;  // begin, end, kind, argument of each
  uint64_t order;           // of simdgroups: 0 ascending, 1 descending, 2 shuffled anew at every barrier
};

EXPORTED const char* simulator_launch(const Launch* launch) {
  if (!fibers[0].stack) {
    auto* stacks = (char*)mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (uint32_t i = 0; i < kMaxThreads; ++i) fibers[i].stack = stacks + kStack * i;
  }
  // A fault may come from a fiber whose stack is what is broken.
  static char signal_stack[64 * 1024];
  stack_t own{}, before_stack{};
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &before_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction action{}, before[3];
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &before[i]);

  reports.clear();
  reported.clear();
  regions.clear();
  entry = (Entry)launch->entry;
  arguments = launch->arguments;
  for (uint64_t i = 0; i < launch->region_count; ++i) {
    const uint64_t* r = launch->regions + 4 * i;
    regions.push_back(Region{r[0], r[1], (Kind)r[2], r[3], 0, 0, 0, 0, 0});
  }
#ifdef CHECKED
  sites.clear();
  shadows.assign(regions.size(), {});
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].kind != Kind::kInput) shadows[i].resize(regions[i].end - regions[i].begin);
  }
#endif

  const uint32_t* size = launch->threadgroup;
  uint32_t groups[3];
  for (int i = 0; i < 3; ++i) groups[i] = launch->grid[i] / size[i];
  threads = size[0] * size[1] * size[2];
  std::vector<uint32_t> order(threads / kLanes);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = launch->order == 1 ? (uint32_t)order.size() - 1 - i : i;
  std::mt19937 random(1);
  running = true;
  if (!sigsetjmp(escape, 1)) {
    const uint32_t total = groups[0] * groups[1] * groups[2];
    for (threadgroup_index = 0; threadgroup_index < total; ++threadgroup_index) {
      const uint32_t group[3] = {threadgroup_index % groups[0], threadgroup_index / groups[0] % groups[1],
                                 threadgroup_index / groups[0] / groups[1]};
      for (Simdgroup& s : simdgroups) s.epoch[0] = s.epoch[1] = 1;
      epoch[0] = epoch[1] = 1;
      for (size_t i = 0; i < regions.size(); ++i) {
        if (regions[i].kind != Kind::kShared) continue;
        memset((void*)regions[i].begin, 0xff, regions[i].end - regions[i].begin);  // NaN
#ifdef CHECKED
        std::fill(shadows[i].begin(), shadows[i].end(), Shadow{});
#endif
      }
      for (uint32_t i = 0; i < threads; ++i) {
        Fiber& f = fibers[i];
        f.index = i;
        f.lane = i % kLanes;
        f.simdgroup = i / kLanes;
        const uint32_t in[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
        for (int k = 0; k < 3; ++k) {
          f.at.thread_in_grid[k] = group[k] * size[k] + in[k];
          f.at.thread_in_threadgroup[k] = in[k];
          f.at.threadgroup[k] = group[k];
          f.at.threadgroup_size[k] = size[k];
          f.at.threadgroups[k] = groups[k];
          f.at.grid[k] = launch->grid[k];
        }
        f.at.index = i;
        f.at.lane = f.lane;
        f.at.simdgroup = f.simdgroup;
        f.at.simdgroups = (uint32_t)order.size();
        prepare(f);
      }
      const bool whole = run_threadgroup(order, launch->order == 2 ? &random : nullptr);
#ifdef CHECKED
      sum_up_sites();
#endif
      if (!whole) break;
    }
  }
  running = false;
#ifdef CHECKED
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].kind != Kind::kOutput) continue;
    for (const Shadow& s : shadows[i]) regions[i].unwritten += !s.written;
  }
#endif
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&before_stack, nullptr);
  return reports.c_str();
}

EXPORTED void simulator_traffic(uint64_t which, uint64_t* out) {
  const Region& r = regions[which];
  const uint64_t values[] = {r.loaded, r.stored, r.unwritten, r.lines, r.ideal};
  std::copy(values, values + 5, out);
}
