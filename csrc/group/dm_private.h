/* What the files of group/ share and nobody else sees.
 *
 * A world keeps a list of its groups, without holding them, so that it can close them.
 * Lock order: a world's lock is taken before a group's; neither is held while groups
 * are closed.
 */
#ifndef DM_PRIVATE_H
#define DM_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend/dm_backend.h"
#include "backend/mail/dm_mail.h"
#include "group/dm_group.h"
#include "group/dm_queue.h"
#include "group/dm_world.h"

/* --- a world's list of groups ----------------------------------------------------- */

typedef struct dm_group_link {
    struct dm_group_link *previous;
    struct dm_group_link *next;
} dm_group_link;

/* Lists the group and holds the world for it. DM_ERR_CLOSED. */
dm_status
dm_world_attach(dm_world *world, dm_group_link *link, dm_error *err);

/* Takes the group off the list and releases the world. */
void
dm_world_detach(dm_world *world, dm_group_link *link);

/* DM_ERR_FORKED in a child of the process that made the world, else DM_OK. */
dm_status
dm_world_check_process(const dm_world *world, dm_error *err);

/* --- groups ------------------------------------------------------------------------ */

struct dm_group {
    dm_group_link link; /* the world's; first */
    dm_world *world;    /* held by dm_world_attach */
    atomic_int refs;

    /* Immutable. */
    int32_t *ranks;
    char *dim_name;
    char *backend_name; /* the one asked for */
    const dm_backend *backend;
    dm_comm_config config; /* rank, size, name; borrowed by the communicator */
    bool local;            /* runs need no other rank */

    _Atomic int64_t timeout_ns;
    void *slot; /* dm_group_slot */

    /* DM_OK, DM_ERR_CLOSED or DM_ERR_ABORTED: read between slices by what runs. Set
     * under the lock, read without it (relaxed: it carries no other data). */
    atomic_int stop;

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t changed;
    int waiters; /* threads in a wait for `changed` */
    dm_comm *comm;
    uint64_t given; /* operations 1..given have been given */
    uint64_t ended; /* operations 1..ended have ended: the next one has the turn */
    bool running;   /* `runner` is inside the communicator */
    pthread_t runner;
    bool broken;
    char *why; /* text of the first failure; NULL where there was no memory for it */
    dm_queue *queue;    /* made with the first asynchronous operation */
    dm_mail *mail;      /* made with the first message; lives as long as the group */
    uint64_t monitored; /* monitored barriers begun */
    bool opening_mail;  /* some thread is at it */
    uint64_t messages;  /* sends and receives given: numbered apart, since members give
                          different ones */

    bool connected; /* belongs to who has the turn */
};

/* A reference, unless the last one is gone: then false. */
bool
dm_group_try_hold(dm_group *group);

/* Ends what runs or is queued and refuses further work, with `why` (DM_ERR_CLOSED or
 * DM_ERR_ABORTED). Never blocks. Idempotent: the first reason stays. */
void
dm_group_stop(dm_group *group, dm_status why);

/* DM_ERR_CLOSED, DM_ERR_ABORTED when the group takes no work. The lock is held. */
dm_status
dm_group_admit_locked(dm_group *group, dm_error *err);

/* What is done with the result before anybody can see that the operation has ended: on
 * the thread that ran it, with no lock held. */
typedef struct dm_settle {
    void (*settle)(void *arg, dm_status status, const dm_error *err);
    void *arg;
} dm_settle;

/* Waits for the turn of op->seq, runs the operation, settles it (NULL: nothing to do)
 * and passes the turn on. */
dm_status
dm_group_perform(dm_group *group, const dm_op *op, const dm_wait *wait,
                 const dm_settle *settle, dm_error *err);

/* Whether an operation that ended so has left the others without it. */
bool
dm_group_breaks(dm_status status);

/* Breaks the group because of `err`: ends its messages and what runs, refuses further
 * work, and lets the other members know. */
void
dm_group_fail(dm_group *group, const dm_error *err);

/* Whether the operation goes by mail. */
bool
dm_group_mails(const dm_group *group, const dm_op *op);

/* Numbers the message and posts it; the caller has filled in the item but for its op. Blocks
 * for a call to the store the first time. */
dm_status
dm_group_post(dm_group *group, dm_op *op, dm_mail_item *item, dm_error *err);

/* A checked message from end to end: posts it and waits. A wait that ends early breaks the
 * group, since the buffers must be free when this returns. */
dm_status
dm_group_run_message(dm_group *group, dm_op *op, const dm_wait *wait, dm_error *err);

/* dm_mail_stop, if there is a mail. */
void
dm_group_stop_mail(dm_group *group, dm_status why, const char *text,
                   const dm_error *tell);

/* Waits for `changed` for at most a slice of `wait`. The lock is held, and released
 * meanwhile. */
void
dm_group_wait_changed_locked(dm_group *group, const dm_wait *wait);

/* Puts "all_reduce #12 on group 'tp' (ranks 2, 3)" in front of err's text. */
void
dm_group_error_context(const dm_group *group, const dm_op *op, dm_error *err);

#endif
