/* The barrier that says who is missing: see dm_group.h.
 *
 * Each member leaves a key for the round that it has come to. The first member waits for
 * all of them and writes the outcome, which the others wait for: empty, or the error's
 * text. Where the first member is late itself, the others say so when their time is over,
 * by compare-and-set, so that all get one outcome. It removes the keys of the round before
 * last: everybody has read that one.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"
#include "group/dm_text.h"
#include "store/dm_store.h"

/* After its own deadline the first member may still need this long to write the outcome. */
#define GRACE_NS (2 * DM_NS_PER_S)

enum { OUTCOME = -1, TEXT_SIZE = 1024 };

static const char FINE[] = "fine";

static void
make_key(const dm_group *group, uint64_t round, int32_t rank, char *key, size_t size)
{
    if (rank == OUTCOME) {
        snprintf(key, size, "%s/met/%" PRIu64, group->config.name, round);
    }
    else {
        snprintf(key, size, "%s/met/%" PRIu64 "/%d", group->config.name, round,
                 (int)rank);
    }
}

static dm_wait
a_moment(void)
{
    dm_wait wait = {dm_clock_deadline(GRACE_NS), NULL, NULL};
    return wait;
}

/* Names the members without a key: the first or all. The text, "rank 3" or "ranks 3, 5". */
static void
name_missing(dm_group *group, uint64_t round, bool all, char *text, size_t size)
{
    int32_t n = 0;
    int32_t *missing = dm_malloc_array((size_t)group->config.size, sizeof(*missing));
    for (int32_t i = 0; missing != NULL && i < group->config.size; i++) {
        char name[DM_STORE_KEY_MAX];
        const char *key = name;
        bool there = true;
        dm_wait wait = a_moment();
        make_key(group, round, i, name, sizeof(name));
        if (dm_store_check(group->config.store, &key, 1, &wait, &there, NULL) ==
                DM_OK &&
            !there) {
            missing[n++] = group->ranks[i];
            if (!all) {
                break;
            }
        }
    }
    char ranks[DM_RANKS_TEXT_SIZE] = "some rank";
    if (n > 0) {
        dm_text_ranks(missing, n, ranks);
    }
    dm_free(missing);
    snprintf(text, size, "%s%s not come in time", ranks, n > 1 ? " have" : " has");
}

/* Decides the outcome unless somebody has, and returns it. */
static dm_status
decide(dm_group *group, uint64_t round, const char *outcome, dm_error *err)
{
    char key[DM_STORE_KEY_MAX];
    dm_bytes value = {NULL, 0};
    dm_wait wait = a_moment();
    make_key(group, round, OUTCOME, key, sizeof(key));
    DM_TRY(dm_store_compare_set(group->config.store, key, "", 0, outcome,
                                strlen(outcome), &wait, &value, err));
    dm_status status = DM_OK;
    if (value.size != strlen(FINE) || memcmp(value.data, FINE, value.size) != 0) {
        status = dm_error_set(err, DM_ERR_TIMEOUT, "%.*s", (int)value.size,
                              (const char *)value.data);
    }
    dm_bytes_free(&value);
    return status;
}

static dm_status
wait_for_all(dm_group *group, uint64_t round, const dm_wait *wait, dm_error *err)
{
    for (int32_t i = 0; i < group->config.size; i++) {
        char name[DM_STORE_KEY_MAX];
        const char *key = name;
        make_key(group, round, i, name, sizeof(name));
        DM_TRY(dm_store_wait(group->config.store, &key, 1, wait, err));
    }
    return DM_OK;
}

static void
remove_round(dm_group *group, uint64_t round)
{
    for (int32_t i = OUTCOME; i < group->config.size; i++) {
        char key[DM_STORE_KEY_MAX];
        bool existed = false;
        dm_wait wait = a_moment();
        make_key(group, round, i, key, sizeof(key));
        dm_store_delete_key(group->config.store, key, &wait, &existed, NULL);
    }
}

/* What a wait that ended with `status` comes to. */
static dm_status
conclude(dm_group *group, uint64_t round, dm_status status, bool all, dm_error *err)
{
    char text[TEXT_SIZE];
    if (status == DM_OK) {
        return decide(group, round, FINE, err);
    }
    if (status != DM_ERR_TIMEOUT) {
        return status;
    }
    name_missing(group, round, all, text, sizeof(text));
    return decide(group, round, text, err);
}

static dm_status
meet(dm_group *group, uint64_t round, bool all, const dm_wait *wait, dm_error *err)
{
    char name[DM_STORE_KEY_MAX];
    const char *key = name;
    make_key(group, round, group->config.rank, name, sizeof(name));
    DM_TRY(dm_store_set(group->config.store, key, "", 0, wait, err));
    if (group->config.rank == 0) {
        dm_status status = wait_for_all(group, round, wait, err);
        status = conclude(group, round, status, all, err);
        if (round > 2 && status == DM_OK) {
            remove_round(group, round - 2);
        }
        return status;
    }
    dm_wait longer = *wait;
    if (longer.deadline < DM_FOREVER - GRACE_NS) {
        longer.deadline += GRACE_NS;
    }
    make_key(group, round, OUTCOME, name, sizeof(name));
    dm_status status = dm_store_wait(group->config.store, &key, 1, &longer, err);
    return conclude(group, round, status, all, err);
}

dm_status
dm_group_monitored_barrier(dm_group *group, bool all, const dm_wait *wait,
                           dm_error *err)
{
    DM_TRY(dm_world_check_process(group->world, err));
    pthread_mutex_lock(&group->lock);
    dm_status status = dm_group_admit_locked(group, err);
    uint64_t round = status == DM_OK ? ++group->monitored : 0;
    pthread_mutex_unlock(&group->lock);
    if (status == DM_OK && !group->local) {
        status = meet(group, round, all, wait, err);
    }
    if (status != DM_OK) {
        dm_error_context(err, "monitored_barrier #%" PRIu64 " on group '%s'", round,
                         group->dim_name);
    }
    return status;
}
