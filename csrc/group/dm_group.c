/* Groups: see dm_group.h.
 *
 * Operations take turns by their number: operation n runs when n-1 have ended, on the
 * thread that gave it, or on the queue's thread when it is asynchronous. Whoever has
 * the turn is alone in the communicator and touches it without the lock. `stop` ends
 * what runs (it is read between slices); the communicator is freed by whoever finds
 * the group stopped and nobody running: close, or the operation that was the last one
 * out. An operation that fails half way, or that gives up its turn, breaks the group:
 * the other members count on it.
 */
#include "group/dm_group.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/reduce/dm_premul.h"
#include "base/dm_alloc.h"
#include "group/dm_private.h"
#include "group/dm_text.h"

/* How often a group that waits for its members looks for a disagreement. */
#define MARK_INTERVAL_NS (250 * DM_NS_PER_MS)
/* Members that are on their way are not worth a look. */
#define MARK_DELAY_NS (50 * DM_NS_PER_MS)

/* --- life ------------------------------------------------------------------------- */

static int
compare_ranks(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a;
    int32_t y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* No rank is there twice. */
static dm_status
check_unique(const int32_t *ranks, int32_t n, dm_error *err)
{
    bool ascending = true;
    for (int32_t i = 1; i < n && ascending; i++) {
        ascending = ranks[i - 1] < ranks[i];
    }
    if (ascending) {
        return DM_OK;
    }
    int32_t *sorted = dm_malloc_array((size_t)n, sizeof(*sorted));
    if (sorted == NULL) {
        return dm_error_set_no_memory(err, "a group");
    }
    memcpy(sorted, ranks, (size_t)n * sizeof(*sorted));
    qsort(sorted, (size_t)n, sizeof(*sorted), compare_ranks);
    dm_status status = DM_OK;
    for (int32_t i = 1; i < n; i++) {
        if (sorted[i - 1] == sorted[i]) {
            status = dm_error_set(err, DM_ERR_VALUE,
                                  "the ranks of a group must differ: %d is there twice",
                                  (int)sorted[i]);
            break;
        }
    }
    dm_free(sorted);
    return status;
}

static dm_status
check_ranks(const dm_world *world, const dm_group_spec *spec, int32_t *group_rank,
            dm_error *err)
{
    int32_t rank = dm_world_rank(world);
    int32_t size = dm_world_size(world);
    char text[DM_RANKS_TEXT_SIZE];

    if (spec->size < 1) {
        return dm_error_set(err, DM_ERR_VALUE, "a group needs at least one rank");
    }
    int32_t place = -1;
    for (int32_t i = 0; i < spec->size; i++) {
        int32_t member = spec->ranks[i];
        if (member < 0 || member >= size) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "rank %d is not in the world of size %d", (int)member,
                                (int)size);
        }
        if (member == rank) {
            place = i;
        }
    }
    DM_TRY(check_unique(spec->ranks, spec->size, err));
    if (place < 0) {
        dm_text_ranks(spec->ranks, spec->size, text);
        return dm_error_set(err, DM_ERR_VALUE,
                            "this rank (%d) is not a member of the group of %s",
                            (int)rank, text);
    }
    *group_rank = place;
    return DM_OK;
}

static void
destroy_comm(dm_group *group, bool forked)
{
    if (group->comm != NULL) {
        group->backend->comm_free(group->comm, forked);
        group->comm = NULL;
    }
}

/* Frees what the group has besides; the fields that are NULL were not reached. */
static void
destroy(dm_group *group, bool forked)
{
    dm_queue_free(group->queue, forked);
    dm_free(group->why);
    dm_free((void *)group->config.name);
    dm_free(group->backend_name);
    dm_free(group->dim_name);
    dm_free(group->ranks);
    if (!forked) {
        pthread_cond_destroy(&group->changed);
        pthread_mutex_destroy(&group->lock);
    }
    dm_free(group);
}

dm_status
dm_group_new(dm_world *world, const dm_group_spec *spec, dm_group **group,
             dm_error *err)
{
    int32_t rank = 0;
    DM_TRY(dm_world_check_process(world, err));
    DM_TRY(check_ranks(world, spec, &rank, err));
    DM_TRY(dm_backend_check_name(spec->backend, err));
    const dm_backend *backend = &dm_backend_fake;
    if (spec->size > 1 && !dm_world_is_simulated(world)) {
        DM_TRY(dm_backend_find(spec->backend, &backend, err));
    }

    dm_group *g = dm_calloc(1, sizeof(*g));
    if (g == NULL) {
        return dm_error_set_no_memory(err, "a group");
    }
    atomic_init(&g->refs, 1);
    atomic_init(&g->stop, DM_OK);
    atomic_init(&g->timeout_ns, spec->timeout_ns);
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attributes);
    pthread_condattr_destroy(&attributes);

    dm_status status;
    g->ranks = dm_memdup(spec->ranks, (size_t)spec->size * sizeof(*spec->ranks));
    g->dim_name = dm_strdup(spec->dim_name != NULL ? spec->dim_name : "");
    g->backend_name = dm_strdup(spec->backend);
    char *name = dm_strdup(spec->identity);
    g->config = (dm_comm_config){
        .rank = rank,
        .size = spec->size,
        .ranks = g->ranks,
        .name = name,
        .store = dm_world_store(world),
        .timeout_ns = spec->timeout_ns,
    };
    g->backend = backend;
    g->local = (backend->flags & DM_BACKEND_LOCAL) != 0;
    if (g->ranks == NULL || g->dim_name == NULL || g->backend_name == NULL ||
        name == NULL) {
        status = dm_error_set_no_memory(err, "a group");
        goto destroy_group;
    }
    DM_TRY_GOTO(status, backend->comm_new(&g->config, &g->comm, err), destroy_group);
    DM_TRY_GOTO(status, dm_world_attach(world, &g->link, err), destroy_group);
    g->world = world;
    *group = g;
    return DM_OK;

destroy_group:
    destroy_comm(g, false);
    destroy(g, false);
    return status;
}

dm_group *
dm_group_hold(dm_group *group)
{
    atomic_fetch_add_explicit(&group->refs, 1, memory_order_relaxed);
    return group;
}

bool
dm_group_try_hold(dm_group *group)
{
    int refs = atomic_load_explicit(&group->refs, memory_order_relaxed);
    while (refs > 0) {
        /* Relaxed: the list's lock has shown us the group. */
        if (atomic_compare_exchange_weak_explicit(&group->refs, &refs, refs + 1,
                                                  memory_order_relaxed,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

void
dm_group_release(dm_group *group)
{
    if (group == NULL) {
        return;
    }
    /* Release and acquire: see dm_world_release. */
    if (atomic_fetch_sub_explicit(&group->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    /* Works and operations hold the group: nothing runs any more. */
    bool forked = dm_world_check_process(group->world, NULL) != DM_OK;
    destroy_comm(group, forked); /* it may use the world's store */
    dm_world_detach(group->world, &group->link);
    destroy(group, forked);
}

/* --- facts ------------------------------------------------------------------------ */

int32_t
dm_group_rank(const dm_group *group)
{
    return group->config.rank;
}

int32_t
dm_group_size(const dm_group *group)
{
    return group->config.size;
}

const int32_t *
dm_group_ranks(const dm_group *group)
{
    return group->ranks;
}

const char *
dm_group_name(const dm_group *group)
{
    return group->config.name;
}

const char *
dm_group_dim_name(const dm_group *group)
{
    return group->dim_name;
}

const char *
dm_group_backend(const dm_group *group)
{
    return group->backend_name;
}

bool
dm_group_is_local(const dm_group *group)
{
    return group->local;
}

const char *
dm_group_transport(dm_group *group)
{
    const char *transport = "none";
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        return transport;
    }
    pthread_mutex_lock(&group->lock);
    if (group->comm != NULL) {
        transport = group->backend->comm_transport(group->comm);
    }
    pthread_mutex_unlock(&group->lock);
    return transport;
}

int64_t
dm_group_timeout(const dm_group *group)
{
    return atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
}

void
dm_group_set_timeout(dm_group *group, int64_t timeout_ns)
{
    atomic_store_explicit(&group->timeout_ns, timeout_ns, memory_order_relaxed);
}

dm_world *
dm_group_world(const dm_group *group)
{
    return group->world;
}

bool
dm_group_is_closed(const dm_group *group)
{
    return atomic_load_explicit(&group->stop, memory_order_relaxed) != DM_OK;
}

uint64_t
dm_group_seq(dm_group *group)
{
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        return group->given;
    }
    pthread_mutex_lock(&group->lock);
    uint64_t given = group->given;
    pthread_mutex_unlock(&group->lock);
    return given;
}

void **
dm_group_slot(dm_group *group)
{
    return &group->slot;
}

/* --- checks before anything is sent ------------------------------------------------ */

/* "group 'tp' (ranks 2, 3)" */
static void
describe(const dm_group *group, char *text, size_t size)
{
    char ranks[DM_RANKS_TEXT_SIZE];
    dm_text_ranks(group->ranks, group->config.size, ranks);
    bool named = group->dim_name[0] != '\0';
    snprintf(text, size, named ? "group '%.64s' (%s)" : "group%.0s (%s)",
             group->dim_name, ranks);
}

enum { DESCRIPTION_SIZE = DM_RANKS_TEXT_SIZE + 80 };

void
dm_group_error_context(const dm_group *group, const dm_op *op, dm_error *err)
{
    char text[DESCRIPTION_SIZE];
    describe(group, text, sizeof(text));
    if (op->seq == 0) {
        dm_error_context(err, "%s on %s", dm_op_name(op->kind), text);
    }
    else {
        dm_error_context(err, "%s #%" PRIu64 " on %s", dm_op_name(op->kind), op->seq,
                         text);
    }
}

static bool
is_reduction(dm_op_kind kind)
{
    return kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
           kind == DM_OP_REDUCE_SCATTER;
}

typedef struct list {
    char text[512];
    size_t used;
} list;

static void
list_add(list *names, const char *name)
{
    size_t room = sizeof(names->text) - names->used;
    int n = snprintf(names->text + names->used, room, "%s%s",
                     names->used == 0 ? "" : ", ", name);
    assert(n >= 0 && (size_t)n < room);
    names->used += (size_t)n;
}

/* What was asked for and what there is instead. */
static dm_status
refuse(const dm_group *group, const dm_op *op, dm_error *err)
{
    const char *name = dm_op_name(op->kind);
    const char *dtype = dm_dtype_name(op->dtype);
    list there = {"", 0};

    if (!is_reduction(op->kind)) {
        for (int i = 0; i < DM_OP_KIND_COUNT; i++) {
            if (group->backend->supports((dm_op_kind)i, op->dtype, DM_SUM)) {
                list_add(&there, dm_op_name((dm_op_kind)i));
            }
        }
        return dm_error_set(err, DM_ERR_UNSUPPORTED,
                            "backend '%s' has no %s of %s; it has: %s",
                            group->backend_name, name, dtype, there.text);
    }

    for (int i = 0; i < DM_REDUCE_OP_COUNT; i++) {
        if (group->backend->supports(op->kind, op->dtype, (dm_reduce_op)i)) {
            list_add(&there, dm_reduce_op_name((dm_reduce_op)i));
        }
    }
    if (there.used != 0) {
        return dm_error_set(
            err, DM_ERR_UNSUPPORTED,
            "backend '%s' has no %s with op '%s' for %s; for this dtype "
            "it has: %s",
            group->backend_name, name, dm_reduce_op_name(op->reduce), dtype,
            there.text);
    }
    for (int i = 0; i < DM_DTYPE_COUNT; i++) {
        if (group->backend->supports(op->kind, (dm_dtype)i, op->reduce)) {
            list_add(&there, dm_dtype_name((dm_dtype)i));
        }
    }
    return dm_error_set(err, DM_ERR_UNSUPPORTED,
                        "backend '%s' has no %s of %s; with op '%s' it has: %s",
                        group->backend_name, name, dtype, dm_reduce_op_name(op->reduce),
                        there.used != 0 ? there.text : "nothing");
}

static dm_status
check_root(const dm_group *group, const dm_op *op, dm_error *err)
{
    int32_t size = group->config.size;
    const char *what = NULL;
    switch (op->kind) {
    case DM_OP_BROADCAST:
    case DM_OP_REDUCE:
    case DM_OP_GATHER:
    case DM_OP_SCATTER:
        what = "root";
        break;
    case DM_OP_SEND:
        what = "dst";
        break;
    case DM_OP_RECV:
        if (op->root == DM_ANY_RANK) {
            return DM_OK;
        }
        what = "src";
        break;
    default:
        return DM_OK;
    }
    if (op->root < 0 || op->root >= size) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "%s must be a group rank, 0..%d in a group of %d, got %d",
                            what, (int)size - 1, (int)size, (int)op->root);
    }
    if (what[0] != 'r' && op->root == group->config.rank) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "%s is this rank itself (group rank %d): a rank cannot "
                            "exchange messages with itself",
                            what, (int)op->root);
    }
    return DM_OK;
}

dm_status
dm_group_validate(dm_group *group, const dm_op *op, dm_error *err)
{
    dm_status status = dm_world_check_process(group->world, err);
    if (status == DM_OK && !group->backend->supports(op->kind, op->dtype, op->reduce)) {
        status = refuse(group, op, err);
    }
    if (status == DM_OK) {
        status = check_root(group, op, err);
    }
    if (status != DM_OK) {
        dm_group_error_context(group, op, err);
    }
    return status;
}

/* The group was closed or aborted. */
static dm_status
say_stopped(const dm_group *group, const char *when, dm_error *err)
{
    dm_status why = atomic_load_explicit(&group->stop, memory_order_relaxed);
    return dm_error_set(err, why, "the group was %s%s",
                        why == DM_ERR_CLOSED ? "closed" : "aborted", when);
}

dm_status
dm_group_admit_locked(dm_group *group, dm_error *err)
{
    if (dm_group_is_closed(group)) {
        return say_stopped(group, "", err);
    }
    if (group->broken) {
        return dm_error_set(err, DM_ERR_CLOSED,
                            "the group is broken by an earlier failure: %s",
                            group->why != NULL ? group->why : "(its text is lost)");
    }
    return DM_OK;
}

/* --- stopping ---------------------------------------------------------------------- */

static void
wake_locked(dm_group *group)
{
    if (group->waiters != 0) {
        pthread_cond_broadcast(&group->changed);
    }
}

void
dm_group_stop(dm_group *group, dm_status why)
{
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        int none = DM_OK;
        atomic_compare_exchange_strong(&group->stop, &none, why);
        return;
    }
    pthread_mutex_lock(&group->lock);
    if (!dm_group_is_closed(group)) {
        atomic_store_explicit(&group->stop, why, memory_order_relaxed);
        if (group->comm != NULL) {
            group->backend->comm_abort(group->comm);
        }
        if (group->queue != NULL) {
            dm_queue_stop(group->queue);
        }
        wake_locked(group);
    }
    pthread_mutex_unlock(&group->lock);
}

void
dm_group_abort(dm_group *group)
{
    dm_group_stop(group, DM_ERR_ABORTED);
}

/* Frees the communicator of a stopped group once nobody is inside it. */
static void
clean(dm_group *group)
{
    dm_comm *comm = NULL;
    pthread_mutex_lock(&group->lock);
    if (dm_group_is_closed(group) && !group->running) {
        comm = group->comm;
        group->comm = NULL;
    }
    pthread_mutex_unlock(&group->lock);
    if (comm != NULL) {
        group->backend->comm_free(comm, false);
    }
}

dm_status
dm_group_close(dm_group *group, dm_error *err)
{
    (void)err;
    dm_group_stop(group, DM_ERR_CLOSED);
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        return DM_OK;
    }

    dm_wait forever = DM_WAIT_FOREVER;
    pthread_mutex_lock(&group->lock);
    dm_queue *queue = group->queue;
    /* Called from inside an operation (by a signal handler, by a `done` function): the
     * operation itself cleans up when it gets out. */
    while (group->running && !pthread_equal(group->runner, pthread_self())) {
        dm_group_wait_changed_locked(group, &forever);
    }
    pthread_mutex_unlock(&group->lock);
    if (queue != NULL) {
        dm_queue_join(queue);
    }
    clean(group);
    return DM_OK;
}

/* --- operations -------------------------------------------------------------------- */

void
dm_group_wait_changed_locked(dm_group *group, const dm_wait *wait)
{
    int64_t until = dm_clock_deadline(dm_wait_slice(wait));
    struct timespec ts = {.tv_sec = until / DM_NS_PER_S,
                          .tv_nsec = until % DM_NS_PER_S};
    group->waiters++;
    pthread_cond_timedwait(&group->changed, &group->lock, &ts);
    group->waiters--;
}

/* Refuses all further work because of `err`. The lock is held. */
static void
break_locked(dm_group *group, const dm_error *err)
{
    if (!group->broken) {
        group->broken = true;
        group->why = dm_strdup(err->text);
        if (group->comm != NULL) {
            group->backend->comm_abort(group->comm);
        }
    }
    wake_locked(group);
}

/* DM_OK once operation `seq` has the turn. The lock is held; it is released while this
 * waits. */
static dm_status
wait_turn_locked(dm_group *group, uint64_t seq, const dm_wait *wait, dm_error *err)
{
    for (;;) {
        DM_TRY(dm_group_admit_locked(group, err));
        if (group->ended == seq - 1) {
            return DM_OK;
        }
        pthread_mutex_unlock(&group->lock);
        dm_status status = dm_wait_poll(wait, err);
        pthread_mutex_lock(&group->lock);
        if (status == DM_ERR_TIMEOUT) {
            dm_error_set(err, status,
                         "timed out while waiting for operation #%" PRIu64
                         " of the group to end",
                         group->ended + 1);
        }
        DM_TRY(status);
        if (group->ended != seq - 1) {
            dm_group_wait_changed_locked(group, wait);
        }
    }
}

/* How an operation waits: what ends it is the group, then its caller. */
typedef struct op_wait {
    dm_wait wait;
    const dm_wait *outer;
    dm_group *group;
    int64_t next_look; /* for a disagreement; DM_FOREVER: none */
} op_wait;

static dm_status
poll_stop(void *arg, dm_error *err)
{
    op_wait *w = arg;
    if (dm_group_is_closed(w->group)) {
        return say_stopped(w->group, " while the operation was running", err);
    }
    if (w->outer->poll != NULL) {
        return w->outer->poll(w->outer->arg, err);
    }
    return DM_OK;
}

/* As poll_stop; looks for a disagreement now and then, since members that found one
 * will not come. */
static dm_status
poll_connect(void *arg, dm_error *err)
{
    op_wait *w = arg;
    DM_TRY(poll_stop(w, err));
    int64_t now = dm_clock_now();
    if (now < w->next_look) {
        return DM_OK;
    }
    w->next_look = now + MARK_INTERVAL_NS;

    int64_t deadline = dm_clock_deadline(DM_NS_PER_S);
    if (deadline > w->wait.deadline) {
        deadline = w->wait.deadline;
    }
    dm_wait wait = {deadline, poll_stop, w};
    dm_error found;
    dm_status status =
        dm_world_check_marks(w->group->world, dm_group_name(w->group), &wait, &found);
    switch (status) {
    case DM_ERR_MISMATCH:
    case DM_ERR_INTERRUPTED:
    case DM_ERR_CLOSED:
    case DM_ERR_ABORTED:
        return dm_error_set(err, status, "%s", found.text);
    default:
        return DM_OK; /* a store in trouble shows itself to the connect */
    }
}

static dm_status
connect(dm_group *group, op_wait *w, dm_error *err)
{
    w->wait.poll = poll_connect;
    w->next_look = dm_clock_now() + MARK_DELAY_NS;
    dm_status status = group->backend->comm_connect(group->comm, &w->wait, err);
    w->wait.poll = poll_stop;
    if (status == DM_ERR_TIMEOUT && err != NULL) {
        dm_world_explain_missing(group->world, group->ranks, group->config.size, err);
    }
    if (status == DM_OK) {
        group->connected = true;
    }
    return status;
}

/* The operation in the backend, in terms that this one knows. */
static dm_status
run_in_backend(dm_group *group, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    const dm_backend *backend = group->backend;
    if (op->reduce != DM_PREMUL_SUM || !is_reduction(op->kind) ||
        (backend->flags & DM_BACKEND_PREMUL_SUM) != 0) {
        return backend->comm_run(group->comm, op, wait, err);
    }
    dm_premul premul;
    DM_TRY(dm_premul_begin(&premul, op, group->config.size, err));
    dm_status status = backend->comm_run(group->comm, &premul.op, wait, err);
    dm_premul_end(&premul);
    return status;
}

/* Inside the communicator, on the thread that has the turn. */
static dm_status
run(dm_group *group, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    if (group->local) {
        return run_in_backend(group, op, wait, err);
    }
    int64_t deadline = dm_clock_deadline(dm_group_timeout(group));
    if (deadline > wait->deadline) {
        deadline = wait->deadline;
    }
    op_wait w = {.outer = wait, .group = group, .next_look = DM_FOREVER};
    w.wait = (dm_wait){deadline, poll_stop, &w};
    if (!group->connected) {
        DM_TRY(connect(group, &w, err));
    }
    return run_in_backend(group, op, &w.wait, err);
}

/* Whether an operation that ended so has left the others without it. */
static bool
breaks(dm_status status)
{
    return status <= DM_ERR_TIMEOUT;
}

dm_status
dm_group_perform(dm_group *group, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    dm_error own;
    if (err == NULL) {
        err = &own; /* the group remembers its first failure */
    }

    pthread_mutex_lock(&group->lock);
    dm_status status = wait_turn_locked(group, op->seq, wait, err);
    if (status == DM_OK) {
        group->running = true;
        group->runner = pthread_self();
        pthread_mutex_unlock(&group->lock);

        status = run(group, op, wait, err);
        if (status != DM_OK && dm_group_is_closed(group)) {
            status = say_stopped(group, " while the operation was running", err);
        }

        pthread_mutex_lock(&group->lock);
        group->running = false;
        group->ended = op->seq;
    }
    if (status == DM_OK) {
        wake_locked(group);
    }
    else {
        dm_group_error_context(group, op, err);
        if (breaks(status)) {
            break_locked(group, err);
        }
        wake_locked(group);
    }
    bool stopped = dm_group_is_closed(group);
    pthread_mutex_unlock(&group->lock);
    if (stopped) {
        clean(group);
    }
    return status;
}

dm_status
dm_group_run(dm_group *group, dm_op *op, const dm_wait *wait, dm_error *err)
{
    op->seq = 0;
    DM_TRY(dm_group_validate(group, op, err));

    pthread_mutex_lock(&group->lock);
    dm_status status = dm_group_admit_locked(group, err);
    if (status == DM_OK) {
        op->seq = ++group->given;
    }
    pthread_mutex_unlock(&group->lock);
    if (status != DM_OK) {
        dm_group_error_context(group, op, err);
        return status;
    }
    return dm_group_perform(group, op, wait, err);
}
