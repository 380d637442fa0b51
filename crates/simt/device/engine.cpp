// Runs compiled CUDA programs on a CPU: blocks one after another, the threads of a block as fibers
// that switch at barriers and wherever a warp acts together. Every access of a program to memory
// comes through here (the compiler's hooks for finding data races): accesses beyond a buffer, and
// accesses of two threads to one byte of shared memory without a barrier between them, end the
// launch with a message. Instructions mean what the PTX ISA says.

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <vector>

typedef int int4 __attribute__((ext_vector_type(4)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));

namespace {

constexpr unsigned LANES = 32, THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 256 << 10;
// Where dynamic shared memory starts among the 32-bit addresses; declared arrays start at zero.
constexpr unsigned DYNAMIC = 1u << 20;
// Bytes of it behind every program: as in compiler.rs.
constexpr size_t RESERVED = 256 << 10;

// Must be the same as in run.rs.
struct Buffer {
    uintptr_t start, end;
};
struct Launch {
    void (*run)(void *const *);
    void *const *arguments;
    uint64_t groups, size;
    uint64_t seed;
    const Buffer *buffers;   // ascending
    uint64_t buffer_count;
    char *declared, *declared_end, *dynamic;
    uint64_t dynamic_bytes;
    const char *image, *image_end;   // of the program
    char *message;
    uint64_t message_bytes;
    uintptr_t culprit;   // the instruction that failed, relative to the image; 0 if unknown
    uint64_t switches;
};

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };
enum Collective : uint8_t { NONE, WARP_BARRIER, SHUFFLE, REDUCE_MAX, LOAD_MATRICES, MULTIPLY };

struct Copy {
    char *to;
    const char *from;
    unsigned bytes;   // of 16; the rest is zero
    unsigned group;
};

struct Thread {
    void *stack;
    State state;
    // What this lane brings to a collective, and what it takes away.
    unsigned value, source;
    uint4 a, result;
    int4 sums;
    unsigned b[2];
    unsigned group;   // of copies, the one that is open
    std::vector<Copy> copies;
};

struct Warp {
    Collective kind;
    unsigned arrived;
    uint32_t epoch;   // of __syncwarp
};

// The last accesses to a byte of shared memory: by which thread, at which count of barriers of the
// block and of its warp.
struct Access {
    uint32_t epoch, warp_epoch;
    uint16_t thread;
};
struct Cell {
    Access write, read;
    bool in_flight;
};
constexpr uint16_t SOME_OF_WARP = 1u << 14, SOME = 1u << 15;

struct Machine {
    Launch *launch;
    void *scheduler;
    unsigned block, thread;
    uint32_t epoch;   // barriers so far, over all blocks
    bool failed;
    unsigned last_buffer;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Cell> cells;
    std::vector<unsigned> order;
    char *stacks;
};

thread_local Machine machine;

}   // namespace

extern "C" void simt_switch(void **from, void *to);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
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
.size simt_switch, .-simt_switch
)");

namespace {

// Back to the scheduler. `m` is taken anew by whoever continues: the compiler may not know that a
// fiber stays on its thread.
__attribute__((noinline)) void pause(Machine &m, Thread &thread, State state) {
    thread.state = state;
    simt_switch(&thread.stack, m.scheduler);
}

__attribute__((noreturn, noinline, format(printf, 3, 4))) void fail(Machine &m, const void *culprit, const char *format, ...) {
    Launch &launch = *m.launch;
    va_list values;
    va_start(values, format);
    int length = vsnprintf(launch.message, launch.message_bytes, format, values);
    va_end(values);
    if (length > 0 && (uint64_t)length < launch.message_bytes) {
        snprintf(launch.message + length, launch.message_bytes - length, ", thread %u of block %u", m.thread, m.block);
    }
    const char *at = (const char *)culprit;
    launch.culprit = at >= launch.image && at < launch.image_end ? at - launch.image : 0;
    m.failed = true;
    Thread lost;
    simt_switch(&lost.stack, m.scheduler);
    __builtin_unreachable();
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

bool ordered(const Machine &m, const Access &before, unsigned thread) {
    if (before.epoch != m.epoch || before.thread == thread) return true;
    if (before.thread == SOME) return false;
    unsigned warp = before.thread & SOME_OF_WARP ? before.thread & ~SOME_OF_WARP : before.thread / LANES;
    return warp == thread / LANES && before.warp_epoch < m.warps[warp].epoch;
}

void note_read(const Machine &m, Access &read, unsigned thread) {
    uint32_t warp_epoch = m.warps[thread / LANES].epoch;
    uint16_t reader = (uint16_t)thread;
    if (read.epoch == m.epoch && read.thread != thread) {
        unsigned warp = read.thread & SOME_OF_WARP ? read.thread & ~SOME_OF_WARP : read.thread / LANES;
        reader = read.thread != SOME && warp == thread / LANES ? (uint16_t)(SOME_OF_WARP | warp) : SOME;
    }
    read = {m.epoch, warp_epoch, reader};
}

// The cells of `bytes` bytes of shared memory, or null if they are elsewhere.
Cell *shared_cells(Machine &m, const char *at, size_t bytes, const void *culprit) {
    const Launch &launch = *m.launch;
    size_t declared = launch.declared_end - launch.declared;
    if (at >= launch.declared && at < launch.declared_end) {
        if (at + bytes > launch.declared_end) fail(m, culprit, "%zu bytes beyond the end of declared shared memory", bytes);
        return &m.cells[at - launch.declared];
    }
    if (at >= launch.dynamic && at < launch.dynamic + RESERVED) {
        if (at + bytes > launch.dynamic + launch.dynamic_bytes) {
            fail(m, culprit, "%zu bytes at %td of %zu bytes of dynamic shared memory", bytes, at - launch.dynamic,
                 (size_t)launch.dynamic_bytes);
        }
        return &m.cells[declared + (at - launch.dynamic)];
    }
    return nullptr;
}

void check_shared(Machine &m, Cell *cell, size_t bytes, bool write, unsigned thread, const void *culprit) {
    for (size_t i = 0; i < bytes; i++, cell++) {
        if (cell->in_flight) {
            fail(m, culprit, "shared memory is %s while a copy to it has not been waited for", write ? "written" : "read");
        }
        if (!ordered(m, cell->write, thread) || (write && !ordered(m, cell->read, thread))) {
            fail(m, culprit, "race in shared memory: thread %u %s what another thread %s since the last barrier", thread,
                 write ? "writes" : "reads", ordered(m, cell->write, thread) ? "read" : "wrote");
        }
        if (write) cell->write = {m.epoch, m.warps[thread / LANES].epoch, (uint16_t)thread};
        else note_read(m, cell->read, thread);
    }
}

void check_global(Machine &m, uintptr_t at, size_t bytes, bool write, const void *culprit) {
    const Launch &launch = *m.launch;
    const Buffer *buffers = launch.buffers;
    if (m.last_buffer < launch.buffer_count) {
        const Buffer &last = buffers[m.last_buffer];
        if (at >= last.start && at + bytes <= last.end) return;
    }
    size_t low = 0, high = launch.buffer_count;   // the last buffer that starts at or before
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (buffers[middle].start <= at) low = middle + 1;
        else high = middle;
    }
    if (low > 0 && at + bytes <= buffers[low - 1].end) {
        m.last_buffer = low - 1;
        return;
    }
    uintptr_t stacks = (uintptr_t)m.stacks;
    if (at >= stacks && at + bytes <= stacks + THREADS_MAX * STACK_BYTES) return;
    if (!write && at >= (uintptr_t)launch.image && at + bytes <= (uintptr_t)launch.image_end) return;
    if (low > 0 && at < buffers[low - 1].end + (1 << 20)) {
        const Buffer &near = buffers[low - 1];
        fail(m, culprit, "%s out of bounds: %zu bytes at %zu of a buffer of %zu", write ? "write" : "read", bytes,
             (size_t)(at - near.start), (size_t)(near.end - near.start));
    }
    fail(m, culprit, "%s out of bounds: %zu bytes at %p, in no buffer", write ? "write" : "read", bytes, (void *)at);
}

void access(const void *pointer, size_t bytes, bool write, const void *culprit) {
    Machine &m = machine;
    const char *at = (const char *)pointer;
    if (at >= m.stacks && at < m.stacks + THREADS_MAX * STACK_BYTES) return;
    if (!m.launch) return;
    if (Cell *cell = shared_cells(m, at, bytes, culprit)) check_shared(m, cell, bytes, write, m.thread, culprit);
    else check_global(m, (uintptr_t)at, bytes, write, culprit);
}

char *shared_pointer(Machine &m, unsigned address, size_t bytes, const void *culprit) {
    const Launch &launch = *m.launch;
    bool dynamic = address >= DYNAMIC;
    size_t offset = dynamic ? address - DYNAMIC : address;
    size_t size = dynamic ? (size_t)launch.dynamic_bytes : (size_t)(launch.declared_end - launch.declared);
    if (address % bytes) fail(m, culprit, "a shared address that is no multiple of %zu", bytes);
    if (offset + bytes > size) {
        fail(m, culprit, "%zu bytes at %zu of %zu bytes of %s shared memory", bytes, offset, size, dynamic ? "dynamic" : "declared");
    }
    return (dynamic ? launch.dynamic : launch.declared) + offset;
}

// ---------------------------------------------------------------------------------------------------------------------
// Warps

// Waits until all lanes of the warp are here; the last one computes what all of them get.
template <class Compute> void together(Collective kind, unsigned mask, const void *culprit, Compute compute) {
    Machine &m = machine;
    unsigned first = m.thread / LANES * LANES;
    if (mask != 0xffffffffu || m.threads.size() < first + LANES) fail(m, culprit, "part of a warp acts together");
    Warp &warp = m.warps[m.thread / LANES];
    if (warp.arrived != 0 && warp.kind != kind) fail(m, culprit, "lanes of a warp are at different instructions");
    warp.kind = kind;
    if (++warp.arrived < LANES) {
        pause(m, m.threads[m.thread], AT_WARP);
        return;
    }
    warp.arrived = 0;
    compute(m, &m.threads[first], first, warp);
    for (unsigned i = 0; i < LANES; i++) {
        if (m.threads[first + i].state == AT_WARP) m.threads[first + i].state = READY;
    }
}

Thread &self() { return machine.threads[machine.thread]; }

}   // namespace

#define CULPRIT __builtin_return_address(0)

extern "C" {

unsigned simt_thread(void) { return machine.thread; }
unsigned simt_block(void) { return machine.block; }
unsigned simt_threads(void) { return machine.launch->size; }
unsigned simt_blocks(void) { return machine.launch->groups; }

void simt_barrier(void) { pause(machine, self(), AT_BARRIER); }

void simt_warp_barrier(unsigned mask) {
    together(WARP_BARRIER, mask, CULPRIT, [](Machine &, Thread *, unsigned, Warp &warp) { warp.epoch++; });
}

unsigned simt_shuffle(unsigned mask, unsigned value, unsigned source) {
    self().value = value;
    self().source = source;
    together(SHUFFLE, mask, CULPRIT, [](Machine &, Thread *lanes, unsigned, Warp &) {
        for (unsigned i = 0; i < LANES; i++) lanes[i].result.x = lanes[lanes[i].source % LANES].value;
    });
    return self().result.x;
}

unsigned simt_reduce_max(unsigned mask, unsigned value) {
    self().value = value;
    together(REDUCE_MAX, mask, CULPRIT, [](Machine &, Thread *lanes, unsigned, Warp &) {
        unsigned most = 0;
        for (unsigned i = 0; i < LANES; i++) most = lanes[i].value > most ? lanes[i].value : most;
        for (unsigned i = 0; i < LANES; i++) lanes[i].result.x = most;
    });
    return self().result.x;
}

// ldmatrix.x4: lane 8 i + r brings row r of matrix i; lane l gets word l % 4 of row l / 4 of each.
uint4 simt_load_matrices(unsigned address) {
    self().value = address;
    const void *culprit = CULPRIT;
    together(LOAD_MATRICES, 0xffffffffu, culprit, [culprit](Machine &m, Thread *lanes, unsigned first, Warp &) {
        unsigned rows[LANES][4];
        for (unsigned i = 0; i < LANES; i++) {
            const char *row = shared_pointer(m, lanes[i].value, 16, culprit);
            check_shared(m, shared_cells(m, row, 16, culprit), 16, false, first + i, culprit);
            memcpy(rows[i], row, 16);
        }
        for (unsigned i = 0; i < LANES; i++) {
            for (unsigned matrix = 0; matrix < 4; matrix++) lanes[i].result[matrix] = rows[8 * matrix + i / 4][i % 4];
        }
    });
    return self().result;
}

// mma.m16n8k32 on signed bytes. With g = lane / 4 and t = lane % 4, a word of A holds columns 4 t to
// 4 t + 3 of row g, then of row g + 8, then both 16 columns further; a word of B the same rows of
// column g; the sums are columns 2 t and 2 t + 1 of row g, then of row g + 8.
int4 simt_multiply_bytes(int4 sums, uint4 a, unsigned b0, unsigned b1) {
    Thread &own = self();
    own.sums = sums;
    own.a = a;
    own.b[0] = b0;
    own.b[1] = b1;
    together(MULTIPLY, 0xffffffffu, CULPRIT, [](Machine &, Thread *lanes, unsigned, Warp &) {
        int16_t left[16][32], right[8][32];
        for (unsigned i = 0; i < LANES; i++) {
            unsigned g = i / 4, t = i % 4;
            for (unsigned word = 0; word < 4; word++) {
                for (unsigned byte = 0; byte < 4; byte++) {
                    left[g + word % 2 * 8][word / 2 * 16 + 4 * t + byte] = (int8_t)(lanes[i].a[word] >> 8 * byte);
                }
            }
            for (unsigned word = 0; word < 2; word++) {
                for (unsigned byte = 0; byte < 4; byte++) right[g][word * 16 + 4 * t + byte] = (int8_t)(lanes[i].b[word] >> 8 * byte);
            }
        }
        for (unsigned i = 0; i < LANES; i++) {
            unsigned g = i / 4, t = i % 4;
            for (unsigned n = 0; n < 4; n++) {
                const int16_t *row = left[g + n / 2 * 8], *column = right[2 * t + n % 2];
                int sum = 0;
                for (unsigned k = 0; k < 32; k++) sum += row[k] * column[k];
                // Sums wrap, as the instruction's do without .satfinite.
                lanes[i].sums[n] = (int)((unsigned)lanes[i].sums[n] + (unsigned)sum);
            }
        }
    });
    return self().sums;
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies. One is made when it is waited for, so that nothing sees its bytes before; from its start
// on the place counts as written, so that nothing may still read what was there.

void simt_copy(unsigned to, const void *from, unsigned bytes) {
    Machine &m = machine;
    char *place = shared_pointer(m, to, 16, CULPRIT);
    if ((uintptr_t)from % 16 && bytes) fail(m, CULPRIT, "a copy from an address that is no multiple of 16");
    if (bytes) check_global(m, (uintptr_t)from, bytes, false, CULPRIT);
    Cell *cells = shared_cells(m, place, 16, CULPRIT);
    check_shared(m, cells, 16, true, m.thread, CULPRIT);
    for (unsigned i = 0; i < 16; i++) cells[i].in_flight = true;
    self().copies.push_back({place, (const char *)from, bytes, self().group});
}

void simt_copies_end(void) { self().group++; }

void simt_copies_wait(unsigned pending) {
    Machine &m = machine;
    Thread &thread = self();
    size_t kept = 0;
    for (const Copy &copy : thread.copies) {
        if (copy.group + pending >= thread.group) {
            thread.copies[kept++] = copy;
            continue;
        }
        Cell *cells = shared_cells(m, copy.to, 16, CULPRIT);
        for (unsigned i = 0; i < 16; i++) cells[i].in_flight = false;
        check_shared(m, cells, 16, true, m.thread, CULPRIT);
        memset(copy.to, 0, 16);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    thread.copies.resize(kept);
}

unsigned simt_shared_address(const void *pointer) {
    Machine &m = machine;
    const Launch &launch = *m.launch;
    const char *at = (const char *)pointer;
    if (at >= launch.declared && at <= launch.declared_end) return at - launch.declared;
    if (at >= launch.dynamic && at <= launch.dynamic + launch.dynamic_bytes) return DYNAMIC + (at - launch.dynamic);
    fail(m, CULPRIT, "%p is no address in shared memory", pointer);
}

float4 simt_load_floats(unsigned address) {
    Machine &m = machine;
    const char *from = shared_pointer(m, address, 16, CULPRIT);
    check_shared(m, shared_cells(m, from, 16, CULPRIT), 16, false, m.thread, CULPRIT);
    float4 four;
    memcpy(&four, from, 16);
    return four;
}

// ---------------------------------------------------------------------------------------------------------------------
// The compiler's hooks

#define HOOKS(bytes) \
    void __tsan_read##bytes(void *at) { access(at, bytes, false, CULPRIT); } \
    void __tsan_write##bytes(void *at) { access(at, bytes, true, CULPRIT); } \
    void __tsan_unaligned_read##bytes(void *at) { access(at, bytes, false, CULPRIT); } \
    void __tsan_unaligned_write##bytes(void *at) { access(at, bytes, true, CULPRIT); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

// A pointer to a type whose alignment it does not have.
void __ubsan_handle_type_mismatch_v1(void *, uintptr_t at) {
    fail(machine, CULPRIT, "an access at %p, which its type's alignment forbids", (void *)at);
}

void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    if (bytes) access(from, bytes, false, CULPRIT), access(to, bytes, true, CULPRIT);
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    if (bytes) access(from, bytes, false, CULPRIT), access(to, bytes, true, CULPRIT);
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
    if (bytes) access(to, bytes, true, CULPRIT);
    return memset(to, value, bytes);
}

}   // extern "C"

// ---------------------------------------------------------------------------------------------------------------------
// Launches

namespace {

uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

__attribute__((noinline)) void enter(void) {
    machine.launch->run(machine.launch->arguments);
    pause(machine, self(), DONE);
    __builtin_unreachable();
}

void *fresh_stack(char *base) {
    void **top = (void **)(base + STACK_BYTES);
    *--top = nullptr;
    *--top = (void *)enter;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}

// With a seed, threads take turns in an order that changes at every barrier.
void shuffle(Machine &m, uint64_t turn) {
    unsigned size = m.launch->size;
    m.order.resize(size);
    for (unsigned i = 0; i < size; i++) m.order[i] = i;
    if (m.launch->seed == 0) return;
    for (unsigned i = size; i > 1; i--) {
        turn = mixed(turn);
        unsigned other = turn % i, last = m.order[i - 1];
        m.order[i - 1] = m.order[other];
        m.order[other] = last;
    }
}

void start_block(Machine &m) {
    const Launch &launch = *m.launch;
    for (unsigned i = 0; i < launch.size; i++) {
        Thread &thread = m.threads[i];
        thread.stack = fresh_stack(m.stacks + i * STACK_BYTES);
        thread.state = READY;
        thread.group = 0;
        thread.copies.clear();
    }
    for (Warp &warp : m.warps) warp = {NONE, 0, 0};
    // Nothing may depend on what shared memory holds at first.
    int garbage = launch.seed == 0 ? 0xff : (int)(mixed(launch.seed ^ m.block) & 0xff);
    memset(launch.declared, garbage, launch.declared_end - launch.declared);
    memset(launch.dynamic, garbage, launch.dynamic_bytes);
    for (Cell &cell : m.cells) cell.in_flight = false;
    m.epoch++;
}

void run_block(Machine &m) {
    start_block(m);
    shuffle(m, m.launch->seed ^ m.epoch);
    while (!m.failed) {
        bool ran = false;
        unsigned waiting = 0, done = 0;
        for (unsigned index : m.order) {
            Thread &thread = m.threads[index];
            if (thread.state == READY) {
                m.thread = index;
                m.launch->switches++;
                simt_switch(&m.scheduler, thread.stack);
                if (m.failed) return;
                ran = true;
            }
            waiting += thread.state == AT_BARRIER;
            done += thread.state == DONE;
        }
        if (done == m.launch->size) return;
        if (waiting + done == m.launch->size) {
            if (done > 0) {
                m.failed = true;
                snprintf(m.launch->message, m.launch->message_bytes,
                         "%u threads of block %u ended before a barrier that others wait at", done, m.block);
                return;
            }
            for (Thread &thread : m.threads) thread.state = READY;
            m.epoch++;
            shuffle(m, m.launch->seed ^ m.epoch);
        } else if (!ran) {
            m.failed = true;
            snprintf(m.launch->message, m.launch->message_bytes,
                     "block %u waits for ever: some threads are at a barrier, others where their warp acts together", m.block);
        }
    }
}

}   // namespace

// Whether it ran; otherwise the message says why not.
extern "C" int simt_launch(Launch *launch) {
    Machine &m = machine;
    if (!m.stacks) {
        void *stacks = mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            snprintf(launch->message, launch->message_bytes, "no memory for stacks");
            return 0;
        }
        m.stacks = (char *)stacks;
    }
    m.launch = launch;
    m.failed = false;
    m.last_buffer = 0;
    m.threads.resize(launch->size);
    m.warps.resize((launch->size + LANES - 1) / LANES);
    m.cells.resize(launch->declared_end - launch->declared + launch->dynamic_bytes);
    for (uint64_t i = 0; i < launch->groups && !m.failed; i++) {
        m.block = launch->seed == 0 ? i : launch->groups - 1 - i;
        run_block(m);
    }
    m.launch = nullptr;
    return !m.failed;
}
