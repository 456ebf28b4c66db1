/* The segment: the memory that the members of one group share.
 *
 * A memfd, mapped once by each member. It has its full size from the beginning and is
 * sealed against resizing, so that no member can pull pages from under another; pages
 * come into being when they are first touched, so a group that moves only small data
 * costs a few KiB. Nothing has a name in the file system: when the last member closes
 * or dies, the memory is gone. The mapping is not inherited by forked children.
 *
 *     head       identity, and how many members sleep
 *     members    one block for each: sleep, progress, state, history, cells
 *     links      for each member: who has ever sent it a message
 *     small      DM_SHM_SMALL_SLOTS slots of DM_SHM_SMALL_BYTES for each member
 *     large      DM_SHM_LARGE_SLOTS slots of `chunk` bytes for each member
 *     pairs      a message ring for each ordered pair of members
 *
 * What the words mean and who writes them: README.md of this folder.
 */
#ifndef DM_SHM_SEGMENT_H
#define DM_SHM_SEGMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_status.h"
#include "backend/shm/dm_shm_tune.h"

#define DM_SHM_ALIGNED __attribute__((aligned(DM_SHM_LINE)))

/* A flag and what it announces, in one cache line. */
typedef struct dm_shm_cell {
    _Atomic uint64_t flag;
    unsigned char data[DM_SHM_INLINE];
} DM_SHM_ALIGNED dm_shm_cell;

/* One operation as its caller asked for it. Atomic words: others may read while the
 * owner already writes the next. */
typedef struct dm_shm_entry {
    _Atomic uint64_t chain; /* fingerprint of everything up to and with this one */
    _Atomic uint64_t what;  /* packed: kind, dtype, reduce, root */
    _Atomic uint64_t count;
    _Atomic uint64_t counts; /* hash of the uneven counts, 0 where there are none */
} dm_shm_entry;

/* What one member writes and the others read (but for `bell` and `waiting`). */
typedef struct dm_shm_member {
    /* Sleep: `bell` is what the member's futex waits on; others count it up to wake it.
     * `waiting` is whom it sleeps for (group rank + 1, DM_SHM_ANYBODY), 0 when awake. */
    _Atomic uint32_t bell DM_SHM_ALIGNED;
    _Atomic uint32_t waiting;

    /* Progress: rounds up to `done` are finished, their slots may be reused. */
    _Atomic uint64_t done DM_SHM_ALIGNED;

    /* Life: see dm_shm_peers.h. */
    _Atomic uint64_t state DM_SHM_ALIGNED;
    _Atomic int32_t pid;
    _Atomic uint64_t cpus[DM_SHM_CPU_WORDS]; /* where it may run */

    /* The last collectives that the member has begun: entry k at k % DM_SHM_HISTORY. */
    _Atomic uint64_t begun DM_SHM_ALIGNED;
    dm_shm_entry history[DM_SHM_HISTORY];

    /* Round t uses cell t % DM_SHM_CELLS. */
    dm_shm_cell cells[DM_SHM_CELLS];
} DM_SHM_ALIGNED dm_shm_member;

/* The way of messages from one member to another. */
typedef struct dm_shm_pair {
    /* Written by the sender. */
    _Atomic uint64_t sent DM_SHM_ALIGNED; /* bytes put into the ring so far */
    _Atomic uint32_t blocked;             /* it waits for room */

    /* Written by the receiver. */
    _Atomic uint64_t taken DM_SHM_ALIGNED; /* bytes taken out of the ring so far */
    _Atomic uint64_t opened;               /* messages whose cell is free again */

    /* Message m announces itself in cell m % DM_SHM_PAIR_CELLS with flag m. */
    dm_shm_cell cells[DM_SHM_PAIR_CELLS];
    unsigned char ring[] DM_SHM_ALIGNED; /* `ring` bytes of the segment's plan */
} DM_SHM_ALIGNED dm_shm_pair;

typedef struct dm_shm_head {
    uint32_t magic;
    uint32_t version;
    uint32_t members;
    uint64_t size;
    /* How many members sleep: read by everybody who publishes, written by sleepers
     * only, so it stays in everybody's cache. */
    _Atomic uint32_t sleepers DM_SHM_ALIGNED;
} DM_SHM_ALIGNED dm_shm_head;

/* Where everything lies, in bytes from the beginning: a function of the group's size. */
typedef struct dm_shm_plan {
    size_t members;
    size_t links;
    size_t link_row; /* bytes of one member's row in links */
    size_t small;
    size_t large;
    size_t chunk; /* bytes of one large slot */
    size_t pairs;
    size_t pair; /* bytes of one pair */
    size_t ring; /* bytes of its ring, a power of two */
    size_t total;
} dm_shm_plan;

typedef struct dm_shm_segment {
    unsigned char *base;
    dm_shm_plan plan;
    int32_t members;
    int fd;
    atomic_int refs; /* communicators of this process that use the mapping */
} dm_shm_segment;

/* The plan for a group of `members`, at most DM_SHM_MEMBERS_MAX. */
void
dm_shm_plan_for(int32_t members, dm_shm_plan *plan);

/* A new segment, sealed and mapped, with one reference. DM_ERR_SYSTEM,
 * DM_ERR_NO_MEMORY. */
dm_status
dm_shm_segment_new(int32_t members, dm_shm_segment **segment, dm_error *err);

/* Maps the segment behind `fd`, which another process made for a group of `members`;
 * takes the descriptor over, also on failure. DM_ERR_PROTOCOL when it is no such
 * segment or not sealed. */
dm_status
dm_shm_segment_open(int fd, int32_t members, dm_shm_segment **segment, dm_error *err);

dm_shm_segment *
dm_shm_segment_hold(dm_shm_segment *segment);

/* The last release unmaps and closes. `forked`: there is no mapping here, only the
 * descriptor is closed. */
void
dm_shm_segment_release(dm_shm_segment *segment, bool forked);

/* Life signs. Each member keeps a lock on its byte of the memfd; the kernel drops it
 * when the process ends, however it ends, and forked children do not inherit it. */
dm_status
dm_shm_segment_lock(dm_shm_segment *segment, int32_t member, dm_error *err);

/* Whether another process holds the lock of `member`. This process's own locks do not
 * show. */
bool
dm_shm_segment_is_locked(const dm_shm_segment *segment, int32_t member);

static inline dm_shm_head *
dm_shm_segment_head(const dm_shm_segment *segment)
{
    return (dm_shm_head *)(void *)segment->base;
}

static inline dm_shm_member *
dm_shm_segment_members(const dm_shm_segment *segment)
{
    return (dm_shm_member *)(void *)(segment->base + segment->plan.members);
}

#endif
