/* A group: the communicator of an ordered list of ranks.
 *
 * Made without communication; connects at its first operation. Operations run one
 * at a time, in the order in which they were given, and carry a number from 1 up
 * that all members agree on. States: new -> connecting -> ready, and from any of
 * them -> broken (a failed operation; refuses work, naming the first failure) or
 * closed. Counted: hold and release from any thread; a work holds its group.
 *
 * Every error of an operation is prefixed "all_reduce #12 on group 'tp'
 * (ranks 2, 3): ..." (long rank lists are abbreviated).
 */
#ifndef DM_GROUP_H
#define DM_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/dm_backend.h"
#include "base/dm_clock.h"
#include "base/dm_status.h"
#include "group/dm_world.h"

typedef struct dm_group dm_group;
typedef struct dm_work dm_work;

typedef struct dm_group_spec {
    const int32_t *ranks; /* global ranks in group order; copied */
    int32_t size;
    const char *identity; /* unique among the world's groups, equal on all members:
                             a mesh's identity plus what tells its groups apart */
    const char *dim_name; /* for people: "tp"; copied */
    const char *backend;  /* "gloo", "fake", ...; groups of one use "fake" whatever
                             is asked for, and still report the name asked for */
    int64_t timeout_ns;   /* negative: none */
} dm_group_spec;

/* This rank must be in the list. DM_ERR_VALUE, DM_ERR_LIBRARY, DM_ERR_CLOSED (world).
 */
dm_status
dm_group_new(dm_world *world, const dm_group_spec *spec, dm_group **group,
             dm_error *err);

dm_group *
dm_group_hold(dm_group *group);

/* NULL is fine. The last release of a group that was not closed aborts it; it never
 * waits. */
void
dm_group_release(dm_group *group);

int32_t
dm_group_rank(const dm_group *group);

int32_t
dm_group_size(const dm_group *group);

/* Borrowed, dm_group_size entries. */
const int32_t *
dm_group_ranks(const dm_group *group);

/* The identity of the spec. Borrowed. */
const char *
dm_group_name(const dm_group *group);

const char *
dm_group_dim_name(const dm_group *group);

const char *
dm_group_backend(const dm_group *group);

/* Whether operations need no other rank (fake backend, groups of one): they end at
 * once, and may be run without releasing the GIL. */
bool
dm_group_is_local(const dm_group *group);

const char *
dm_group_transport(dm_group *group);

int64_t
dm_group_timeout(const dm_group *group);

void
dm_group_set_timeout(dm_group *group, int64_t timeout_ns);

dm_world *
dm_group_world(const dm_group *group);

bool
dm_group_is_closed(const dm_group *group);

/* Operations given so far. */
uint64_t
dm_group_seq(dm_group *group);

/* What is checked of an operation before it gets a number: kind, dtype, reduce op, root.
 * Run and submit do so themselves. DM_ERR_VALUE, DM_ERR_UNSUPPORTED, DM_ERR_FORKED. */
dm_status
dm_group_check(dm_group *group, const dm_op *op, dm_error *err);

/* Runs one operation and waits for it (op->seq is filled in). Blocks; the caller's
 * thread does the work where nothing is queued before it. The deadline is the
 * group's time-out unless the wait's is sooner. */
dm_status
dm_group_run(dm_group *group, dm_op *op, const dm_wait *wait, dm_error *err);

/* Queues one operation (a copy of *op); the group's worker thread runs it, in a local
 * group this thread does. Works of one group run in the order in which they were given,
 * each with the group's time-out from its start. `done`, where not NULL, is called
 * once, from any thread, with no lock held, when the operation no longer touches the
 * buffers (also on failure, which `status` tells); it must not block and must not take the GIL. It is not
 * called when submit itself fails. */
dm_status
dm_group_submit(dm_group *group, const dm_op *op,
                void (*done)(void *arg, dm_status status), void *arg, dm_work **work,
                dm_error *err);

/* A barrier through the store that names who is missing: the first of them or, with `all`,
 * all. DM_ERR_TIMEOUT on every member that came, also on those that come too late; the
 * group lives on. Blocks. Members call it equally often. */
dm_status
dm_group_monitored_barrier(dm_group *group, bool all, const dm_wait *wait,
                           dm_error *err);

/* One of several operations that are given together. */
typedef struct dm_order {
    dm_op op;
    void (*done)(void *arg, dm_status status); /* as dm_group_submit's */
    void *arg;
    dm_work *work; /* output */
} dm_order;

/* As dm_group_submit for each of them: all are checked before the first is given, and
 * nobody else's operation gets in between. An error means that none was given. */
dm_status
dm_group_submit_all(dm_group *group, dm_order *orders, size_t count, dm_error *err);

/* Ends what runs or is queued with DM_ERR_CLOSED, stops the worker, frees the
 * connections. Idempotent. Waits for no other rank, but for this process's threads to
 * leave the group (so not with the GIL held), except when called from inside an
 * operation: then that operation frees the connections when it ends. */
dm_status
dm_group_close(dm_group *group, dm_error *err);

/* As close, from any thread, never blocking, with DM_ERR_ABORTED. */
void
dm_group_abort(dm_group *group);

/* --- works ------------------------------------------------------------------------ */

dm_work *
dm_work_hold(dm_work *work);

void
dm_work_release(dm_work *work);

/* Finished, well or not. Never blocks. */
bool
dm_work_is_done(const dm_work *work);

/* Waits until the work has finished and returns its result (err: its error). A
 * DM_ERR_TIMEOUT or DM_ERR_INTERRUPTED of this wait leaves the work running. */
dm_status
dm_work_wait(dm_work *work, const dm_wait *wait, dm_error *err);

/* Something that wants to know when a work has ended; the caller's. */
typedef struct dm_notice {
    struct dm_notice *next;
    /* Called once, from any thread, with no lock held. Must not block and must not take
     * the GIL. The work does not touch the notice any more. */
    void (*call)(struct dm_notice *notice);
} dm_notice;

/* False where the work has ended already: then nothing is called. Several are called in
 * the order in which they came. */
bool
dm_work_notify(dm_work *work, dm_notice *notice);

uint64_t
dm_work_seq(const dm_work *work);

dm_op_kind
dm_work_kind(const dm_work *work);

/* Of a recv that went well: the group rank that the message came from. */
int32_t
dm_work_source(const dm_work *work);

/* Borrowed. */
dm_group *
dm_work_group(const dm_work *work);

/* --- one Python object for each group ------------------------------------------- */

/* A slot that the layer above may use; the core never looks at it. Guarded by the
 * GIL. */
void **
dm_group_slot(dm_group *group);

#endif
