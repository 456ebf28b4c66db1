/* The segment: see dm_shm_segment.h. */
#include "backend/shm/dm_shm_segment.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dm_alloc.h"

enum {
    MAGIC = 0x736d6d64, /* "dmms" */
    VERSION = 1,
    PAGE = 4096,
    SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
};

/* All rings of a group together: address space, not memory. */
#define RINGS_TOTAL ((size_t)1 << 30)

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "words shared between processes must not need a lock");
_Static_assert(sizeof(dm_shm_cell) == DM_SHM_LINE, "a cell is a cache line");

static size_t
round_up(size_t size, size_t step)
{
    return (size + step - 1) / step * step;
}

void
dm_shm_plan_for(int32_t members, dm_shm_plan *plan)
{
    assert(members >= 1 && members <= DM_SHM_MEMBERS_MAX);
    size_t n = (size_t)members;

    size_t chunk = round_up(DM_SHM_LARGE_TOTAL / n, PAGE);
    plan->chunk = chunk < DM_SHM_LARGE_MIN ? DM_SHM_LARGE_MIN : chunk;
    plan->ring = DM_SHM_RING_MAX;
    while (plan->ring > DM_SHM_RING_MIN && plan->ring * n * n > RINGS_TOTAL) {
        plan->ring /= 2;
    }
    plan->link_row = round_up(n, DM_SHM_LINE);
    plan->pair = round_up(sizeof(dm_shm_pair) + plan->ring, PAGE);

    plan->members = round_up(sizeof(dm_shm_head), DM_SHM_LINE);
    plan->links = plan->members + n * sizeof(dm_shm_member);
    plan->small = round_up(plan->links + n * plan->link_row, PAGE);
    plan->large = round_up(
        plan->small + n * DM_SHM_SMALL_SLOTS * (size_t)DM_SHM_SMALL_STRIDE, PAGE);
    plan->pairs = plan->large + n * DM_SHM_LARGE_SLOTS * plan->chunk;
    plan->total = plan->pairs + n * n * plan->pair;
}

/* Maps `fd`, which becomes the segment's. */
static dm_status
map(int fd, int32_t members, dm_shm_segment **segment, dm_error *err)
{
    dm_shm_segment *s = dm_calloc(1, sizeof(*s));
    if (s == NULL) {
        return dm_error_set_no_memory(err, "a shared segment");
    }
    dm_shm_plan_for(members, &s->plan);
    void *base = mmap(NULL, s->plan.total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        int errnum = errno;
        dm_free(s);
        return dm_error_set_errno(err, errnum,
                                  "cannot map the group's shared memory (%zu bytes)",
                                  s->plan.total);
    }
    /* Advice, all three; the large slots are the only part worth huge pages. */
    madvise(base, s->plan.total, MADV_DONTFORK);
    madvise(base, s->plan.total, MADV_DONTDUMP);
    madvise((char *)base + s->plan.large, s->plan.pairs - s->plan.large, MADV_HUGEPAGE);
    s->base = base;
    s->members = members;
    s->fd = fd;
    atomic_init(&s->refs, 1);
    *segment = s;
    return DM_OK;
}

dm_status
dm_shm_segment_new(int32_t members, dm_shm_segment **segment, dm_error *err)
{
    dm_shm_plan plan;
    dm_shm_plan_for(members, &plan);
    int fd = memfd_create("devicemesh", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return dm_error_set_errno(err, errno, "cannot make shared memory (memfd)");
    }
    dm_status status;
    if (ftruncate(fd, (off_t)plan.total) < 0 || fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        status = dm_error_set_errno(
            err, errno, "cannot size and seal shared memory (%zu bytes)", plan.total);
        goto close_fd;
    }
    dm_shm_segment *s;
    DM_TRY_GOTO(status, map(fd, members, &s, err), close_fd);
    dm_shm_head *head = dm_shm_segment_head(s);
    head->magic = MAGIC;
    head->version = VERSION;
    head->members = (uint32_t)members;
    head->size = plan.total;
    *segment = s;
    return DM_OK;

close_fd:
    close(fd);
    return status;
}

dm_status
dm_shm_segment_open(int fd, int32_t members, dm_shm_segment **segment, dm_error *err)
{
    dm_shm_plan plan;
    dm_shm_plan_for(members, &plan);
    dm_status status;
    struct stat st = {0};
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &st) < 0 || seals < 0 || (seals & SEALS) != SEALS ||
        (size_t)st.st_size != plan.total) {
        status = dm_error_set(err, DM_ERR_PROTOCOL,
                              "what came instead of the group's shared memory is not "
                              "that: %lld bytes, seals %#x, expected %zu and %#x",
                              (long long)st.st_size, (unsigned)seals, plan.total,
                              (unsigned)SEALS);
        goto close_fd;
    }
    dm_shm_segment *s;
    DM_TRY_GOTO(status, map(fd, members, &s, err), close_fd);
    const dm_shm_head *head = dm_shm_segment_head(s);
    if (head->magic != MAGIC || head->version != VERSION ||
        head->members != (uint32_t)members || head->size != plan.total) {
        status = dm_error_set(err, DM_ERR_PROTOCOL,
                              "the group's shared memory was made by another version "
                              "of devicemesh (%u, not %u) or for another group",
                              (unsigned)head->version, (unsigned)VERSION);
        dm_shm_segment_release(s, false);
        return status;
    }
    *segment = s;
    return DM_OK;

close_fd:
    close(fd);
    return status;
}

dm_shm_segment *
dm_shm_segment_hold(dm_shm_segment *segment)
{
    atomic_fetch_add_explicit(&segment->refs, 1, memory_order_relaxed);
    return segment;
}

void
dm_shm_segment_release(dm_shm_segment *segment, bool forked)
{
    /* Acquire and release: whoever unmaps comes after all that others did here. */
    if (segment == NULL ||
        atomic_fetch_sub_explicit(&segment->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (!forked) {
        munmap(segment->base, segment->plan.total);
    }
    close(segment->fd);
    dm_free(segment);
}

static struct flock
byte_of(int32_t member)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = member, .l_len = 1};
}

dm_status
dm_shm_segment_lock(dm_shm_segment *segment, int32_t member, dm_error *err)
{
    struct flock lock = byte_of(member);
    if (fcntl(segment->fd, F_SETLK, &lock) < 0) {
        return dm_error_set_errno(err, errno, "cannot lock the group's shared memory");
    }
    return DM_OK;
}

bool
dm_shm_segment_is_locked(const dm_shm_segment *segment, int32_t member)
{
    struct flock lock = byte_of(member);
    return fcntl(segment->fd, F_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}
