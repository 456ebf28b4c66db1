/* Groups, their life and facts: see dm_group.h. What they do is in dm_group_run.c. */
#include "group/dm_group.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"
#include "group/dm_text.h"

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
    dm_mail_free(group->mail, forked);
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
