/* Worlds: see dm_world.h.
 *
 * What a world writes into its store (all keys relative to the store it was given):
 *
 *     last/<rank>        the request that this rank made last, member of it or not
 *     agree/<identity>   "<rank> <request>" of the first member that came
 *     mark/<identity>    the text of a disagreement, left by who found it
 *
 * One mutex guards the list of groups, the counters and the last request. It is never
 * held during a call of the store or of a group.
 */
#include "group/dm_world.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"
#include "group/dm_text.h"

/* How often one member set has been asked for. */
typedef struct counter {
    uint64_t hash;
    uint64_t count;
    char *members;
} counter;

struct dm_world {
    atomic_int refs;
    int32_t rank;
    int32_t size;
    dm_store *store;
    int64_t timeout_ns;
    bool simulated;
    pid_t pid;
    atomic_bool closed; /* set under the lock, read without it */

    pthread_mutex_t lock;
    dm_group_link groups; /* head of a ring */
    counter *counters;
    size_t counter_count;
    size_t counter_room;
    char *last_request;
};

/* --- life ----------------------------------------------------------------------- */

dm_status
dm_world_new(const dm_world_config *config, dm_world **world, dm_error *err)
{
    if (config->size < 1) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the size of a world must be 1 or more, got %d",
                            (int)config->size);
    }
    if (config->rank < 0 || config->rank >= config->size) {
        return dm_error_set(
            err, DM_ERR_VALUE, "rank must be in 0..%d for a world of size %d, got %d",
            (int)config->size - 1, (int)config->size, (int)config->rank);
    }
    if (config->store == NULL && !config->simulated && config->size > 1) {
        return dm_error_set(err, DM_ERR_VALUE, "a world of size %d needs a store",
                            (int)config->size);
    }
    dm_world *w = dm_calloc(1, sizeof(*w));
    if (w == NULL) {
        return dm_error_set_no_memory(err, "a world");
    }
    atomic_init(&w->refs, 1);
    w->rank = config->rank;
    w->size = config->size;
    w->store = config->store != NULL ? dm_store_hold(config->store) : NULL;
    w->timeout_ns = config->timeout_ns;
    w->simulated = config->simulated;
    w->pid = getpid();
    atomic_init(&w->closed, false);
    pthread_mutex_init(&w->lock, NULL);
    w->groups.previous = w->groups.next = &w->groups;
    *world = w;
    return DM_OK;
}

dm_world *
dm_world_hold(dm_world *world)
{
    atomic_fetch_add_explicit(&world->refs, 1, memory_order_relaxed);
    return world;
}

void
dm_world_release(dm_world *world)
{
    if (world == NULL) {
        return;
    }
    /* Release: what this thread did to the world comes before its end. Acquire: the
     * last one sees what the others did. */
    if (atomic_fetch_sub_explicit(&world->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    dm_store_release(world->store);
    for (size_t i = 0; i < world->counter_count; i++) {
        dm_free(world->counters[i].members);
    }
    dm_free(world->counters);
    dm_free(world->last_request);
    if (world->pid == getpid()) {
        assert(world->groups.next == &world->groups);
        pthread_mutex_destroy(&world->lock);
    }
    dm_free(world);
}

int32_t
dm_world_rank(const dm_world *world)
{
    return world->rank;
}

int32_t
dm_world_size(const dm_world *world)
{
    return world->size;
}

int64_t
dm_world_timeout(const dm_world *world)
{
    return world->timeout_ns;
}

dm_store *
dm_world_store(const dm_world *world)
{
    return world->store;
}

bool
dm_world_is_simulated(const dm_world *world)
{
    return world->simulated;
}

bool
dm_world_is_closed(const dm_world *world)
{
    return atomic_load_explicit(&world->closed, memory_order_relaxed);
}

dm_status
dm_world_check_process(const dm_world *world, dm_error *err)
{
    pid_t pid = getpid();
    if (pid != world->pid) {
        return dm_error_set(err, DM_ERR_FORKED,
                            "the world was made by process %d and cannot be used in "
                            "its fork %d: make a new one there",
                            (int)world->pid, (int)pid);
    }
    return DM_OK;
}

static dm_status
check_usable(const dm_world *world, dm_error *err)
{
    DM_TRY(dm_world_check_process(world, err));
    if (dm_world_is_closed(world)) {
        return dm_error_set(err, DM_ERR_CLOSED, "the world is closed");
    }
    return DM_OK;
}

/* --- groups ---------------------------------------------------------------------- */

dm_status
dm_world_attach(dm_world *world, dm_group_link *link, dm_error *err)
{
    DM_TRY(dm_world_check_process(world, err));
    dm_status status = DM_OK;
    pthread_mutex_lock(&world->lock);
    if (dm_world_is_closed(world)) {
        status = dm_error_set(err, DM_ERR_CLOSED, "the world is closed");
    }
    else {
        link->previous = world->groups.previous;
        link->next = &world->groups;
        link->previous->next = link;
        world->groups.previous = link;
        dm_world_hold(world);
    }
    pthread_mutex_unlock(&world->lock);
    return status;
}

void
dm_world_detach(dm_world *world, dm_group_link *link)
{
    /* The list of a forked child is never read again. */
    if (world->pid == getpid()) {
        pthread_mutex_lock(&world->lock);
        link->previous->next = link->next;
        link->next->previous = link->previous;
        pthread_mutex_unlock(&world->lock);
    }
    dm_world_release(world);
}

/* Calls `visit` with each group, with no lock held. A group that is held stays in the
 * list, so the walk can go on from it. */
static void
for_each_group(dm_world *world, void (*visit)(dm_group *group))
{
    dm_group *held = NULL;
    pthread_mutex_lock(&world->lock);
    dm_group_link *link = world->groups.next;
    while (link != &world->groups) {
        dm_group *group = (dm_group *)link;
        if (dm_group_try_hold(group)) {
            pthread_mutex_unlock(&world->lock);
            dm_group_release(held);
            held = group;
            visit(group);
            pthread_mutex_lock(&world->lock);
        }
        link = link->next;
    }
    pthread_mutex_unlock(&world->lock);
    dm_group_release(held);
}

static void
stop_group(dm_group *group)
{
    dm_group_stop(group, DM_ERR_CLOSED);
}

static void
close_group(dm_group *group)
{
    dm_group_close(group, NULL);
}

void
dm_world_close(dm_world *world)
{
    if (world->pid != getpid()) {
        atomic_store_explicit(&world->closed, true, memory_order_relaxed);
        return;
    }
    /* Under the lock: a group is either refused or in the list by now. */
    pthread_mutex_lock(&world->lock);
    atomic_store_explicit(&world->closed, true, memory_order_relaxed);
    pthread_mutex_unlock(&world->lock);

    /* All are told first, so that they end side by side. */
    for_each_group(world, stop_group);
    for_each_group(world, close_group);
}

/* --- agreement ------------------------------------------------------------------- */

enum {
    KEY_SIZE = DM_IDENTITY_SIZE + 16,
    SHOWN_REQUEST = 600, /* bytes of a request that an error shows */
};

/* FNV-1a, 64 bits: the same on every rank. */
static uint64_t
hash_text(const char *text, uint64_t seed)
{
    uint64_t hash = seed;
    for (const char *c = text; *c != '\0'; c++) {
        hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    }
    return hash;
}

#define FNV_SEED UINT64_C(0xcbf29ce484222325)

/* Counts one more request for the member set and records the request. */
static dm_status
count_locked(dm_world *world, const char *members, uint64_t hash, const char *request,
             uint64_t *count, dm_error *err)
{
    counter *found = NULL;
    for (size_t i = 0; i < world->counter_count; i++) {
        counter *c = &world->counters[i];
        if (c->hash == hash && strcmp(c->members, members) == 0) {
            found = c;
            break;
        }
    }

    char *last = dm_strdup(request);
    if (last == NULL) {
        goto no_memory;
    }
    if (found == NULL) {
        if (world->counter_count == world->counter_room) {
            size_t room = world->counter_room != 0 ? world->counter_room * 2 : 4;
            counter *grown =
                dm_realloc_array(world->counters, room, sizeof(*world->counters));
            if (grown == NULL) {
                goto free_last;
            }
            world->counters = grown;
            world->counter_room = room;
        }
        char *copy = dm_strdup(members);
        if (copy == NULL) {
            goto free_last;
        }
        found = &world->counters[world->counter_count++];
        *found = (counter){hash, 0, copy};
    }
    dm_free(world->last_request);
    world->last_request = last;
    *count = ++found->count;
    return DM_OK;

free_last:
    dm_free(last);
no_memory:
    return dm_error_set_no_memory(err, "a request for a mesh");
}

/* "<rank> <request>", as it stands under agree/. */
static char *
format_claim(const dm_world *world, const char *request)
{
    size_t room = strlen(request) + 16;
    char *claim = dm_malloc_array(room, 1);
    if (claim != NULL) {
        snprintf(claim, room, "%d %s", (int)world->rank, request);
    }
    return claim;
}

/* Compares `request` with what the first member put down. */
static dm_status
compare(dm_world *world, const char *identity, const char *request, const dm_wait *wait,
        dm_error *err)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "agree/%s", identity);
    char *claim = format_claim(world, request);
    if (claim == NULL) {
        return dm_error_set_no_memory(err, "a request for a mesh");
    }
    dm_bytes stands;
    dm_status status = dm_store_compare_set(world->store, key, "", 0, claim,
                                            strlen(claim), wait, &stands, err);
    dm_free(claim);
    if (status != DM_OK) {
        return status;
    }

    char *other = NULL;
    long rank = strtol(stands.data, &other, 10);
    if (*other == ' ') {
        other++;
    }
    if (strcmp(other, request) == 0) {
        dm_bytes_free(&stands);
        return DM_OK;
    }

    dm_error found;
    dm_error_set(&found, DM_ERR_MISMATCH,
                 "ranks asked for different things: rank %ld for %.*s; rank %d for "
                 "%.*s",
                 rank, SHOWN_REQUEST, other, (int)world->rank, SHOWN_REQUEST, request);
    dm_bytes_free(&stands);
    /* For those who agreed earlier. The disagreement is what counts: when the mark
     * cannot be left they find out by their time-out. */
    snprintf(key, sizeof(key), "mark/%s", identity);
    dm_store_set(world->store, key, found.text, strlen(found.text), wait, NULL);
    return dm_error_set(err, DM_ERR_MISMATCH, "%s", found.text);
}

/* Whether there are others to talk to. */
static bool
has_others(const dm_world *world)
{
    return world->store != NULL && !world->simulated && world->size > 1;
}

/* Shows the others what this rank asked for last. */
static dm_status
publish_last(dm_world *world, const char *request, const dm_wait *wait, dm_error *err)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "last/%d", (int)world->rank);
    return dm_store_set(world->store, key, request, strlen(request), wait, err);
}

dm_status
dm_world_agree(dm_world *world, const char *members, const char *request,
               const dm_wait *wait, char identity[DM_IDENTITY_SIZE], dm_error *err)
{
    DM_TRY(check_usable(world, err));

    uint64_t hash = hash_text(members, FNV_SEED);
    uint64_t count = 0;
    pthread_mutex_lock(&world->lock);
    dm_status status = count_locked(world, members, hash, request, &count, err);
    pthread_mutex_unlock(&world->lock);
    DM_TRY(status);

    char name[DM_IDENTITY_SIZE];
    snprintf(name, sizeof(name), "%016" PRIx64 "%016" PRIx64 ".%" PRIu64, hash,
             hash_text(members, ~FNV_SEED), count);

    if (has_others(world)) {
        DM_TRY(publish_last(world, request, wait, err));
        DM_TRY(compare(world, name, request, wait, err));
    }
    memcpy(identity, name, sizeof(name));
    return DM_OK;
}

dm_status
dm_world_note(dm_world *world, const char *request, const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_usable(world, err));
    char *last = dm_strdup(request);
    if (last == NULL) {
        return dm_error_set_no_memory(err, "a request for a mesh");
    }
    pthread_mutex_lock(&world->lock);
    dm_free(world->last_request);
    world->last_request = last;
    pthread_mutex_unlock(&world->lock);
    return has_others(world) ? publish_last(world, request, wait, err) : DM_OK;
}

dm_status
dm_world_check_marks(dm_world *world, const char *identity, const dm_wait *wait,
                     dm_error *err)
{
    DM_TRY(check_usable(world, err));
    if (!has_others(world)) {
        return DM_OK;
    }
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "mark/%.*s", (int)strcspn(identity, "/"), identity);
    const char *keys[] = {key};
    bool there = false;
    DM_TRY(dm_store_check(world->store, keys, 1, wait, &there, err));
    if (!there) {
        return DM_OK;
    }
    dm_bytes mark;
    DM_TRY(dm_store_get(world->store, key, wait, &mark, err));
    dm_status status = dm_error_set(err, DM_ERR_MISMATCH, "%s", mark.data);
    dm_bytes_free(&mark);
    return status;
}

/* --- explaining ------------------------------------------------------------------- */

/* What some ranks asked for last. */
typedef struct asked {
    int32_t ranks[DM_EXPLAINED_RANKS];
    dm_bytes last[DM_EXPLAINED_RANKS]; /* data NULL: nothing yet */
    int32_t count;
} asked;

static void
append(dm_error *err, const char *format, ...) DM_PRINTF(2, 3);

static void
append(dm_error *err, const char *format, ...)
{
    size_t used = strlen(err->text);
    va_list args;
    va_start(args, format);
    vsnprintf(err->text + used, sizeof(err->text) - used, format, args);
    va_end(args);
}

/* Reads as far as the store answers in time. */
static void
read_asked(dm_world *world, const int32_t *ranks, int32_t n, const dm_wait *wait,
           asked *a)
{
    a->count = 0;
    for (int32_t i = 0; i < n && i < DM_EXPLAINED_RANKS; i++) {
        if (ranks[i] == world->rank) {
            continue;
        }
        char text[KEY_SIZE];
        snprintf(text, sizeof(text), "last/%d", (int)ranks[i]);
        const char *key = text;
        bool there = false;
        dm_bytes last = {NULL, 0};
        if (dm_store_check(world->store, &key, 1, wait, &there, NULL) != DM_OK ||
            (there && dm_store_get(world->store, key, wait, &last, NULL) != DM_OK)) {
            return;
        }
        a->ranks[a->count] = ranks[i];
        a->last[a->count++] = last;
    }
}

static void
free_asked(asked *a)
{
    for (int32_t i = 0; i < a->count; i++) {
        dm_bytes_free(&a->last[i]);
    }
}

static bool
same_request(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

/* "; ranks 2, 3 last asked for <request>" for the i-th and all after it that asked for
 * the same, unless one before it did. */
static void
append_asked(const asked *a, int32_t i, dm_error *err)
{
    for (int32_t j = 0; j < i; j++) {
        if (same_request(a->last[j].data, a->last[i].data)) {
            return;
        }
    }
    int32_t ranks[DM_EXPLAINED_RANKS] = {a->ranks[i]};
    int32_t n = 1;
    for (int32_t j = i + 1; j < a->count; j++) {
        if (same_request(a->last[j].data, a->last[i].data)) {
            ranks[n++] = a->ranks[j];
        }
    }
    char text[DM_RANKS_TEXT_SIZE];
    dm_text_ranks(ranks, n, text);
    if (a->last[i].data == NULL) {
        append(err, "; %s %s asked for nothing yet", text, n == 1 ? "has" : "have");
    }
    else {
        append(err, "; %s last asked for %.*s", text, SHOWN_REQUEST, a->last[i].data);
    }
}

/* All that differs from `mine` (which may be NULL), then `mine`. */
static void
append_differences(const asked *a, const char *mine, dm_error *err)
{
    bool differs = false;
    for (int32_t i = 0; i < a->count; i++) {
        const char *last = a->last[i].data;
        if (last == NULL || !same_request(last, mine)) {
            append_asked(a, i, err);
            differs = differs || last != NULL;
        }
    }
    if (differs && mine != NULL) {
        append(err, "; this rank last asked for %.*s", SHOWN_REQUEST, mine);
    }
}

/* What this rank asked for last; dm_free it. NULL: nothing (or no memory). */
static char *
copy_last_request(dm_world *world)
{
    char *mine = NULL;
    pthread_mutex_lock(&world->lock);
    if (world->last_request != NULL) {
        mine = dm_strdup(world->last_request);
    }
    pthread_mutex_unlock(&world->lock);
    return mine;
}

void
dm_world_explain_missing(dm_world *world, const int32_t *ranks, int32_t n,
                         dm_error *err)
{
    if (!has_others(world) || check_usable(world, NULL) < 0) {
        return;
    }
    char *mine = copy_last_request(world);
    dm_wait wait = {dm_clock_deadline(2 * DM_NS_PER_S), NULL, NULL};
    asked a;
    read_asked(world, ranks, n, &wait, &a);
    append_differences(&a, mine, err);
    free_asked(&a);
    dm_free(mine);
}

void
dm_world_explain_outside(dm_world *world, const int32_t *ranks, int32_t n,
                         const char *request, const dm_wait *wait, dm_error *err)
{
    if (!has_others(world) || check_usable(world, NULL) < 0 || n < 1) {
        return;
    }
    /* Members that are about to ask would otherwise not be seen. */
    char text[KEY_SIZE];
    snprintf(text, sizeof(text), "last/%d", (int)ranks[0]);
    const char *key = text;
    if (dm_store_wait(world->store, &key, 1, wait, NULL) != DM_OK) {
        return;
    }
    asked a;
    read_asked(world, ranks, n, wait, &a);
    for (int32_t i = 0; i < a.count; i++) {
        if (a.last[i].data != NULL && !same_request(a.last[i].data, request)) {
            append_asked(&a, i, err);
        }
    }
    if (err->text[0] != '\0') {
        append(err, "; this rank asked for %.*s", SHOWN_REQUEST, request);
    }
    free_asked(&a);
}
