/* Messages between the processes of one host, through memory they share.
 *
 * docs/notes/shared_memory.md says why this is right. In short: for every ordered pair of ranks
 * the segment has a table of slots, and for every rank an arena that only it allocates from. A
 * sender copies into its arena and publishes a slot; the receiver finds the slot by its tag,
 * copies out and gives it back. States change in one direction, each by one side only:
 *
 *   FREE -> FILLING -> READY      by the sender
 *   READY -> TAKEN -> DONE        by the receiver
 *   DONE -> FREE                  by the sender, when it next looks
 *
 * READY and DONE are stored with release and read with acquire order: who sees READY sees the
 * bytes, who sees DONE may overwrite them.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 1024 /* messages from one rank to another that nobody has waited for */
#define GRAIN 64   /* bytes; a line of the cache */
#define PAGE 4096
#define ELSEWHERE UINT64_MAX /* an offset: the bytes travel by gloo */

enum { FREE, FILLING, READY, TAKEN, DONE };
enum { SENT = -1, FULL = -2 };                        /* of rm_segment_send, else a ticket */
enum { RECEIVED, LATE, BY_GLOO, OTHER_SIZE };         /* of rm_segment_receive */

typedef struct {
    _Atomic uint32_t state;
    uint32_t tag;
    uint64_t serial, size, offset;
    char line_end[GRAIN - 32];
} slot;

typedef struct {
    _Atomic uint32_t bell;    /* counts what was published: receivers sleep on it */
    _Atomic uint32_t waiters; /* that sleep, or are about to */
    _Atomic uint32_t high;    /* slots that were ever used; grows only */
    char line_end[GRAIN - 12];
    slot slots[SLOTS];
} pair;

typedef struct {
    uint64_t offset, size;
} extent;

/* One process's end. Its threads exclude each other by locks of their own, not in the segment: a
 * process that dies takes nobody's lock with it. */
typedef struct {
    char *base;
    int32_t num_ranks, me;
    uint64_t arena_bytes;
    pthread_mutex_t sending, receiving;
    uint64_t serial;
    extent *holes; /* of the arena, in order, no two adjacent */
    int64_t num_holes;
} endpoint;

int32_t rm_segment_interface(void) { return 1; }

static uint64_t tables_bytes(int32_t num_ranks) {
    uint64_t bytes = sizeof(pair) * (uint64_t)num_ranks * (uint64_t)num_ranks;
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

int64_t rm_segment_bytes(int32_t num_ranks, int64_t arena_bytes) {
    return (int64_t)tables_bytes(num_ranks) + num_ranks * arena_bytes;
}

/* A segment of zeros is an empty one: nothing in it needs to be initialised. */
endpoint *rm_segment_open(void *base, int32_t num_ranks, int32_t me, int64_t arena_bytes) {
    endpoint *e = calloc(1, sizeof(endpoint));
    if (!e) return NULL;
    e->holes = malloc(sizeof(extent) * ((size_t)num_ranks * SLOTS + 2));
    if (!e->holes) {
        free(e);
        return NULL;
    }
    e->base = base, e->num_ranks = num_ranks, e->me = me, e->arena_bytes = (uint64_t)arena_bytes;
    e->holes[0] = (extent){0, (uint64_t)arena_bytes}, e->num_holes = 1;
    pthread_mutex_init(&e->sending, NULL), pthread_mutex_init(&e->receiving, NULL);
    return e;
}

void rm_segment_close(endpoint *e) {
    pthread_mutex_destroy(&e->sending), pthread_mutex_destroy(&e->receiving);
    free(e->holes);
    free(e);
}

static pair *pair_of(const endpoint *e, int32_t from, int32_t to) {
    return (pair *)e->base + (int64_t)from * e->num_ranks + to;
}

static char *arena_of(const endpoint *e, int32_t rank) {
    return e->base + tables_bytes(e->num_ranks) + (uint64_t)rank * e->arena_bytes;
}

static uint64_t rounded(uint64_t size) { return (size + GRAIN - 1) / GRAIN * GRAIN; }

/* First fit: what was just used is used again, and may still be in the cache. */
static uint64_t allocate(endpoint *e, uint64_t size) {
    for (int64_t i = 0; i < e->num_holes; i++) {
        extent *hole = &e->holes[i];
        if (hole->size < size) continue;
        uint64_t offset = hole->offset;
        hole->offset += size, hole->size -= size;
        if (!hole->size) memmove(hole, hole + 1, sizeof(extent) * (size_t)(--e->num_holes - i));
        return offset;
    }
    return ELSEWHERE;
}

static void give_back(endpoint *e, uint64_t offset, uint64_t size) {
    int64_t i = 0;
    while (i < e->num_holes && e->holes[i].offset < offset) i++;
    extent *next = &e->holes[i], *last = next - 1;
    int joins_last = i > 0 && last->offset + last->size == offset;
    int joins_next = i < e->num_holes && offset + size == next->offset;
    if (joins_last && joins_next) {
        last->size += size + next->size;
        memmove(next, next + 1, sizeof(extent) * (size_t)(--e->num_holes - i));
    } else if (joins_last) {
        last->size += size;
    } else if (joins_next) {
        next->offset = offset, next->size += size;
    } else {
        memmove(next + 1, next, sizeof(extent) * (size_t)(e->num_holes++ - i));
        *next = (extent){offset, size};
    }
}

/* Take back what the receiver has done with. Returns the first free slot, or SLOTS. */
static uint32_t reclaim(endpoint *e, pair *p) {
    uint32_t high = atomic_load_explicit(&p->high, memory_order_relaxed), first = high;
    for (uint32_t i = high; i-- > 0;) {
        slot *s = &p->slots[i];
        uint32_t state = atomic_load_explicit(&s->state, memory_order_acquire);
        if (state == DONE) {
            if (s->offset != ELSEWHERE) give_back(e, s->offset, rounded(s->size));
            atomic_store_explicit(&s->state, FREE, memory_order_relaxed);
            state = FREE;
        }
        if (state == FREE) first = i;
    }
    return first;
}

static void ring(pair *p) {
    atomic_fetch_add(&p->bell, 1);
    if (atomic_load(&p->waiters)) syscall(SYS_futex, &p->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Copy a message and publish it; never waits. If the arena has no room the slot says that the
 * bytes come by gloo, and the result is a ticket for rm_segment_is_settled. */
int64_t rm_segment_send(endpoint *e, int32_t to, uint32_t tag, const void *data, int64_t size) {
    pair *p = pair_of(e, e->me, to);
    pthread_mutex_lock(&e->sending);
    uint32_t i = reclaim(e, p);
    if (i == SLOTS) {
        pthread_mutex_unlock(&e->sending);
        return FULL;
    }
    slot *s = &p->slots[i];
    s->offset = allocate(e, rounded((uint64_t)size));
    if (s->offset == ELSEWHERE) {
        for (int32_t rank = 0; rank < e->num_ranks; rank++) reclaim(e, pair_of(e, e->me, rank));
        s->offset = allocate(e, rounded((uint64_t)size));
    }
    uint64_t offset = s->offset, serial = s->serial = e->serial++;
    s->tag = tag, s->size = (uint64_t)size;
    atomic_store_explicit(&s->state, FILLING, memory_order_relaxed);
    if (i == atomic_load_explicit(&p->high, memory_order_relaxed))
        atomic_store_explicit(&p->high, i + 1, memory_order_release);
    pthread_mutex_unlock(&e->sending);
    if (offset != ELSEWHERE) memcpy(arena_of(e, e->me) + offset, data, (size_t)size);
    atomic_store_explicit(&s->state, READY, memory_order_release);
    ring(p);
    return offset == ELSEWHERE ? (int64_t)(serial * SLOTS + i) : SENT;
}

/* Whether the receiver has what went by gloo under this ticket. */
int32_t rm_segment_is_settled(endpoint *e, int32_t to, int64_t ticket) {
    slot *s = &pair_of(e, e->me, to)->slots[ticket % SLOTS];
    pthread_mutex_lock(&e->sending);
    uint32_t state = atomic_load_explicit(&s->state, memory_order_acquire);
    int32_t settled = s->serial != (uint64_t)ticket / SLOTS || state == DONE || state == FREE;
    pthread_mutex_unlock(&e->sending);
    return settled;
}

static slot *take(endpoint *e, pair *p, uint32_t tag) {
    slot *found = NULL;
    pthread_mutex_lock(&e->receiving);
    uint32_t high = atomic_load_explicit(&p->high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        slot *s = &p->slots[i];
        if (atomic_load_explicit(&s->state, memory_order_acquire) != READY || s->tag != tag) continue;
        if (!found || s->serial < found->serial) found = s;
    }
    if (found) atomic_store_explicit(&found->state, TAKEN, memory_order_relaxed);
    pthread_mutex_unlock(&e->receiving);
    return found;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void rm_segment_release(endpoint *e, int32_t from, int64_t number) {
    slot *s = &pair_of(e, from, e->me)->slots[number];
    atomic_store_explicit(&s->state, DONE, memory_order_release);
}

/* Receive into data, waiting for at most limit_ns, or less if a signal comes: spin, then sleep.
 * found is the size of a message of another size, or the slot of one that comes by gloo. */
int32_t rm_segment_receive(endpoint *e, int32_t from, uint32_t tag, void *data, int64_t size,
                           int64_t spin_ns, int64_t limit_ns, int64_t *found) {
    pair *p = pair_of(e, from, e->me);
    int64_t start = now_ns(), spent = 0;
    slot *s;
    for (;;) {
        uint32_t seen = atomic_load(&p->bell);
        if ((s = take(e, p, tag))) break;
        while ((spent = now_ns() - start) < spin_ns && atomic_load(&p->bell) == seen)
            for (int i = 0; i < 16; i++) pause_briefly();
        if (spent < spin_ns) continue;
        if (spent >= limit_ns) return LATE;
        int64_t rest = limit_ns - spent;
        struct timespec t = {rest / 1000000000, rest % 1000000000};
        atomic_fetch_add(&p->waiters, 1);
        long failed = syscall(SYS_futex, &p->bell, FUTEX_WAIT, seen, &t, NULL, 0);
        int why = errno;
        atomic_fetch_sub(&p->waiters, 1);
        if (failed && why == EINTR) return LATE;
    }
    int64_t number = s - p->slots;
    int32_t result = (int64_t)s->size != size ? OTHER_SIZE : s->offset == ELSEWHERE ? BY_GLOO : RECEIVED;
    *found = result == OTHER_SIZE ? (int64_t)s->size : number;
    if (result == RECEIVED) memcpy(data, arena_of(e, from) + s->offset, (size_t)size);
    if (result != BY_GLOO) rm_segment_release(e, from, number);
    return result;
}

/* A lock on one byte of the file is this rank's sign of life: the kernel takes it away when the
 * process ends, however it ends, and children do not inherit it. */
int32_t rm_segment_hold(int32_t file, int64_t rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(file, F_SETLK, &lock);
}

/* Whether another process holds it; -1 if that cannot be told. */
int32_t rm_segment_is_held(int32_t file, int64_t rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(file, F_GETLK, &lock) ? -1 : lock.l_type != F_UNLCK;
}
