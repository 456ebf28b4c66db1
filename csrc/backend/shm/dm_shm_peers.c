/* Members that leave, and the texts about it: see dm_shm_peers.h. */
#include "backend/shm/dm_shm_peers.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/shm/dm_shm_op.h"

enum {
    OP_TEXT_SIZE = 160,
    MISSING_NAMED = 8,
};

static dm_shm_reason
reason_of(uint64_t record)
{
    return (dm_shm_reason)(record & 0xff);
}

static int32_t
first_of(uint64_t record)
{
    return (int32_t)(record >> 8 & 0xfffffff);
}

static int32_t
second_of(uint64_t record)
{
    return (int32_t)(record >> 36 & 0xfffffff);
}

void
dm_shm_leave(dm_comm *comm, uint64_t record)
{
    uint64_t now = atomic_load(&comm->self->state);
    while (now <= DM_SHM_JOINED) {
        /* Sequentially consistent, as a publisher's word: sleepers look at it before
         * they sleep again. */
        if (atomic_compare_exchange_weak(&comm->self->state, &now, record)) {
            dm_shm_ring_all(comm);
            return;
        }
    }
}

/* --- texts ----------------------------------------------------------------------- */

const char *
dm_shm_who(const dm_comm *comm, int32_t member, char text[DM_SHM_WHO_SIZE])
{
    int pid = atomic_load_explicit(&comm->members[member].pid, memory_order_relaxed);
    int rank = (int)comm->ranks[member];
    if (pid == 0) {
        snprintf(text, DM_SHM_WHO_SIZE, "rank %d", rank);
    }
    else {
        snprintf(text, DM_SHM_WHO_SIZE, "rank %d (pid %d)", rank, pid);
    }
    return text;
}

/* One entry of a member's history, read while the member may be writing: false when it
 * has been overwritten, or when it is yet to come. */
static bool
read_entry(const dm_shm_member *member, uint64_t index, dm_shm_request *request,
           uint64_t *chain)
{
    /* Acquire: the entry's words were stored before `begun`. */
    uint64_t begun = atomic_load_explicit(&member->begun, memory_order_acquire);
    if (index == 0 || index > begun || begun - index >= DM_SHM_HISTORY - 1) {
        return false;
    }
    const dm_shm_entry *entry = &member->history[index % DM_SHM_HISTORY];
    /* Acquire: none of these is read after `begun` is read again. One slot less than
     * there are is trusted, since the next entry is written before it is counted. */
    *chain = atomic_load_explicit(&entry->chain, memory_order_acquire);
    request->what = atomic_load_explicit(&entry->what, memory_order_acquire);
    request->count = atomic_load_explicit(&entry->count, memory_order_acquire);
    request->counts = atomic_load_explicit(&entry->counts, memory_order_acquire);
    begun = atomic_load_explicit(&member->begun, memory_order_acquire);
    return begun - index < DM_SHM_HISTORY - 1;
}

/* Finds the first collective that the two called differently. */
static bool
find_difference(const dm_comm *comm, int32_t a, int32_t b, dm_shm_request *of_a,
                dm_shm_request *of_b)
{
    const dm_shm_member *one = &comm->members[a];
    const dm_shm_member *other = &comm->members[b];
    uint64_t last = atomic_load_explicit(&one->begun, memory_order_acquire);
    uint64_t theirs = atomic_load_explicit(&other->begun, memory_order_acquire);
    last = last < theirs ? last : theirs;

    bool found = false;
    for (uint64_t i = last; i > 0 && last - i < DM_SHM_HISTORY; i--) {
        uint64_t chain_a;
        uint64_t chain_b;
        dm_shm_request request_a;
        dm_shm_request request_b;
        if (!read_entry(one, i, &request_a, &chain_a) ||
            !read_entry(other, i, &request_b, &chain_b) || chain_a == chain_b) {
            break;
        }
        *of_a = request_a;
        *of_b = request_b;
        found = true;
    }
    return found;
}

static dm_status
say_different(dm_comm *comm, int32_t a, int32_t b, dm_error *err)
{
    char who_a[DM_SHM_WHO_SIZE];
    char who_b[DM_SHM_WHO_SIZE];
    dm_shm_who(comm, a, who_a);
    dm_shm_who(comm, b, who_b);
    dm_shm_request request_a;
    dm_shm_request request_b;
    if (!find_difference(comm, a, b, &request_a, &request_b)) {
        return dm_error_set(err, DM_ERR_MISMATCH,
                            "%s and %s called different operations some time ago",
                            who_a, who_b);
    }
    char text_a[OP_TEXT_SIZE];
    char text_b[OP_TEXT_SIZE];
    dm_shm_describe(comm, &request_a, text_a, sizeof(text_a));
    dm_shm_describe(comm, &request_b, text_b, sizeof(text_b));
    return dm_error_set(err, DM_ERR_MISMATCH, "%s called %s, %s called %s", who_a,
                        text_a, who_b, text_b);
}

/* What a record says, in words. */
static dm_status
explain(dm_comm *comm, uint64_t record, dm_error *err)
{
    char who_a[DM_SHM_WHO_SIZE];
    char who_b[DM_SHM_WHO_SIZE];
    int32_t a = first_of(record) % comm->size;
    int32_t b = second_of(record) % comm->size;
    dm_shm_who(comm, a, who_a);
    dm_shm_who(comm, b, who_b);
    comm->parting = record;
    switch (reason_of(record)) {
    case DM_SHM_LEFT:
        return dm_error_set(err, DM_ERR_PEER, "%s has closed the group", who_a);
    case DM_SHM_ABORTED:
        return dm_error_set(err, DM_ERR_PEER,
                            "%s aborted or closed the group during an operation",
                            who_a);
    case DM_SHM_INTERRUPTED:
        return dm_error_set(err, DM_ERR_PEER, "%s was interrupted in an operation",
                            who_a);
    case DM_SHM_TIMED_OUT:
        return dm_error_set(err, DM_ERR_PEER, "%s timed out waiting for %s", who_a,
                            who_b);
    case DM_SHM_DIED:
        return dm_error_set(err, DM_ERR_PEER, "%s exited", who_a);
    case DM_SHM_MISMATCHED:
        return say_different(comm, a, b, err);
    case DM_SHM_MISFIT:
        return dm_error_set(err, DM_ERR_MISMATCH,
                            "what %s sent did not fit what %s had asked for", who_a,
                            who_b);
    case DM_SHM_HERE:
    case DM_SHM_FAILED:
        break;
    }
    return dm_error_set(err, DM_ERR_PEER, "an operation of %s failed", who_a);
}

/* --- checks ------------------------------------------------------------------------ */

bool
dm_shm_process_ended(pid_t pid, int patience_ms)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) {
        return errno == ESRCH || (errno != EPERM && kill(pid, 0) < 0 && errno == ESRCH);
    }
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    int n = poll(&ended, 1, patience_ms);
    close(fd);
    return n == 1;
}

static bool
is_dead(const dm_comm *comm, int32_t member, uint64_t state)
{
    pid_t pid = atomic_load_explicit(&comm->members[member].pid, memory_order_relaxed);
    if (pid == getpid()) {
        return false;
    }
    if (state == 0) {
        return pid != 0 && dm_shm_process_ended(pid, 0);
    }
    return !dm_shm_segment_is_locked(comm->segment, member);
}

dm_status
dm_shm_check_member(dm_comm *comm, int32_t member, bool look_hard, dm_error *err)
{
    const _Atomic uint64_t *state = &comm->members[member].state;
    /* Sequentially consistent: see dm_shm_leave. */
    uint64_t now = atomic_load(state);
    if (now <= DM_SHM_JOINED && look_hard && is_dead(comm, member, now)) {
        /* Whoever closes the group writes its record before it drops its lock. */
        now = atomic_load(state);
        if (now <= DM_SHM_JOINED) {
            now = dm_shm_record(DM_SHM_DIED, member, member);
        }
    }
    return now <= DM_SHM_JOINED ? DM_OK : explain(comm, now, err);
}

dm_status
dm_shm_check_trouble(dm_comm *comm, dm_error *err)
{
    for (int32_t i = 0; i < comm->size; i++) {
        uint64_t now = atomic_load(&comm->members[i].state);
        if (i != comm->rank && reason_of(now) > DM_SHM_LEFT) {
            return explain(comm, now, err);
        }
    }
    return DM_OK;
}

dm_status
dm_shm_check_any(dm_comm *comm, bool look_hard, dm_error *err)
{
    int32_t left = 0;
    for (int32_t i = 0; i < comm->size; i++) {
        if (i == comm->rank) {
            continue;
        }
        dm_status status = dm_shm_check_member(comm, i, look_hard, err);
        if (status == DM_OK) {
            continue;
        }
        if (reason_of(comm->parting) != DM_SHM_LEFT) {
            return status;
        }
        left++;
    }
    return left < comm->size - 1 ? DM_OK : DM_ERR_PEER;
}

dm_status
dm_shm_check_history(dm_comm *comm, int32_t member, dm_error *err)
{
    dm_shm_request request;
    uint64_t chain;
    if (member != comm->rank &&
        read_entry(&comm->members[member], comm->begun, &request, &chain) &&
        chain != comm->chain) {
        return dm_shm_say_mismatch(comm, member, err);
    }
    return DM_OK;
}

dm_status
dm_shm_say_mismatch(dm_comm *comm, int32_t member, dm_error *err)
{
    int32_t a = comm->rank < member ? comm->rank : member;
    int32_t b = comm->rank < member ? member : comm->rank;
    return explain(comm, dm_shm_record(DM_SHM_MISMATCHED, a, b), err);
}

/* --- time-outs ---------------------------------------------------------------------- */

/* Appends what is known about why `member` has not come. */
static void
describe_late(const dm_comm *comm, int32_t member, const dm_shm_goal *goal, char *text,
              size_t size)
{
    const dm_shm_member *m = &comm->members[member];
    uint64_t begun = atomic_load_explicit(&m->begun, memory_order_acquire);
    char who[DM_SHM_WHO_SIZE];
    dm_shm_who(comm, member, who);
    dm_shm_request last;
    uint64_t chain;
    char op[OP_TEXT_SIZE];
    if (atomic_load(&m->state) == 0) {
        snprintf(text, size, "%s, which has not joined the group", who);
    }
    else if (goal->collective && begun >= comm->begun) {
        snprintf(text, size, "%s, which has begun the operation but does not go on",
                 who);
    }
    else if (read_entry(m, begun, &last, &chain)) {
        dm_shm_describe(comm, &last, op, sizeof(op));
        snprintf(text, size, "%s, whose last collective here was %s", who, op);
    }
    else {
        snprintf(text, size, "%s, which has called no collective here yet", who);
    }
}

void
dm_shm_say_timeout(dm_comm *comm, const dm_shm_goal *goal, int32_t missing,
                   dm_error *err)
{
    comm->parting = dm_shm_record(DM_SHM_TIMED_OUT, comm->rank, missing);
    if (goal->reached != NULL) {
        comm->parting = dm_shm_record(DM_SHM_FAILED, comm->rank, comm->rank);
        dm_error_set(err, DM_ERR_TIMEOUT, "timed out waiting for a message");
        return;
    }
    char text[1024];
    size_t used = 0;
    int32_t count = 0;
    for (int32_t i = missing; i >= 0; i = dm_shm_first_missing(comm, goal, i + 1)) {
        if (count < MISSING_NAMED && used < sizeof(text)) {
            char one[OP_TEXT_SIZE + 128];
            describe_late(comm, i, goal, one, sizeof(one));
            int n = snprintf(text + used, sizeof(text) - used, "%s%s",
                             count > 0 ? "; for " : "", one);
            used += n > 0 ? (size_t)n : 0;
        }
        count++;
    }
    if (count > MISSING_NAMED) {
        dm_error_set(err, DM_ERR_TIMEOUT, "timed out waiting for %s; and for %d more",
                     text, (int)count - MISSING_NAMED);
    }
    else {
        dm_error_set(err, DM_ERR_TIMEOUT, "timed out waiting for %s", text);
    }
}
