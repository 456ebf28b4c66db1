/* The grid that groups span: see dm_grid.h.
 *
 *     tell:    in each group the members compare who they think they are (card)
 *     collect: from the last dim to the first, gather what is known so far along the dim
 *     tell:    the same again with a hash of the grid
 *
 * Who finds a disagreement goes on taking part in `tell` until everybody has heard of it:
 * one round of the groups carries it one step along each dim, so as many rounds as dims
 * reach all. Everywhere the groups are used in the order of their names, which all
 * members share: members that were given them in different orders find that out instead
 * of waiting for each other.
 */
#include "group/dm_grid.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_text.h"

/* What a member says about itself. Plain bytes: byte order is the host's, as in gloo. */
typedef struct card {
    int32_t rank;
    int32_t ndim;
    int32_t dim; /* of the group that the card is shown in */
    int32_t failed;
    int32_t sizes[DM_GRID_MAX_NDIM];
    int32_t places[DM_GRID_MAX_NDIM];
    uint64_t hash; /* of the grid; 0 as long as there is none */
    char text[512];
} card;

typedef struct grid {
    dm_group *const *groups;
    int ndim;
    int order[DM_GRID_MAX_NDIM]; /* dims whose groups have others in them, by name */
    int rounds
        [DM_GRID_MAX_NDIM]; /* per dim: the most dims that a member of the group has */
    int active;
    int64_t numel;
    card mine;
    card *cards; /* room for the largest group */
    const dm_wait *wait;
} grid;

/* --- local checks ------------------------------------------------------------------ */

static bool
has_rank(const dm_group *group, int32_t rank)
{
    const int32_t *ranks = dm_group_ranks(group);
    for (int32_t i = 0; i < dm_group_size(group); i++) {
        if (ranks[i] == rank) {
            return true;
        }
    }
    return false;
}

/* Two lines of a mesh cross in one rank. */
static dm_status
check_crossing(dm_group *const *groups, int a, int b, dm_error *err)
{
    const int32_t *ranks = dm_group_ranks(groups[a]);
    for (int32_t i = 0; i < dm_group_size(groups[a]); i++) {
        if (i != dm_group_rank(groups[a]) && has_rank(groups[b], ranks[i])) {
            return dm_error_set(
                err, DM_ERR_VALUE,
                "groups %d and %d cannot be dims of one mesh: both have "
                "ranks %d and %d",
                a, b, (int)ranks[dm_group_rank(groups[a])], (int)ranks[i]);
        }
    }
    return DM_OK;
}

static dm_status
check_alone(dm_group *const *groups, int ndim, int64_t *numel, dm_error *err)
{
    *numel = 1;
    for (int d = 0; d < ndim; d++) {
        for (int e = 0; e < d; e++) {
            DM_TRY(check_crossing(groups, e, d, err));
        }
        *numel *= dm_group_size(groups[d]);
        if (*numel > dm_world_size(dm_group_world(groups[d]))) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "the first %d groups span %" PRId64
                                " ranks, more than the world has (%d)",
                                d + 1, *numel,
                                (int)dm_world_size(dm_group_world(groups[d])));
        }
    }
    return DM_OK;
}

/* --- by arithmetic ------------------------------------------------------------------ */

/* Nobody answers in a simulated world: continue the lines through this rank. */
static dm_status
continue_lines(dm_group *const *groups, int ndim, int64_t numel, int32_t *ranks,
               dm_error *err)
{
    int64_t first = dm_world_rank(dm_group_world(groups[0]));
    int64_t strides[DM_GRID_MAX_NDIM];
    for (int d = 0; d < ndim; d++) {
        const int32_t *line = dm_group_ranks(groups[d]);
        int32_t size = dm_group_size(groups[d]);
        strides[d] = size > 1 ? (int64_t)line[1] - line[0] : 0;
        for (int32_t i = 1; i < size; i++) {
            if ((int64_t)line[i] - line[i - 1] != strides[d]) {
                char text[DM_RANKS_TEXT_SIZE];
                dm_text_ranks(line, size, text);
                return dm_error_set(err, DM_ERR_VALUE,
                                    "group %d (%s) has no regular step, and without "
                                    "communication the other ranks cannot be told: "
                                    "pass mesh",
                                    d, text);
            }
        }
        first -= dm_group_rank(groups[d]) * strides[d];
    }
    for (int64_t i = 0; i < numel; i++) {
        int64_t rank = first;
        int64_t rest = i;
        for (int d = ndim; d-- > 0;) {
            int32_t size = dm_group_size(groups[d]);
            rank += rest % size * strides[d];
            rest /= size;
        }
        if (rank < 0 || rank >= dm_world_size(dm_group_world(groups[0]))) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "the groups continued to a mesh give a rank %" PRId64
                                ", outside the world of %d: pass mesh",
                                rank, (int)dm_world_size(dm_group_world(groups[0])));
        }
        ranks[i] = (int32_t)rank;
    }
    return DM_OK;
}

/* --- telling each other ------------------------------------------------------------- */

static dm_status
gather(dm_group *group, const void *input, void *output, size_t bytes,
       const dm_wait *wait, dm_error *err)
{
    dm_op op = {.kind = DM_OP_ALL_GATHER,
                .dtype = DM_UINT8,
                .input = input,
                .output = output,
                .count = bytes};
    return dm_group_run(group, &op, wait, err);
}

/* "(2, 3)" */
static void
numbers_text(const int32_t *numbers, int n, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < n && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%d", i > 0 ? ", " : "",
                                 (int)numbers[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, n == 1 ? ",)" : ")");
    }
}

/* The first failure is what counts. */
static void
fail(grid *g, const char *format, ...) DM_PRINTF(2, 3);

static void
fail(grid *g, const char *format, ...)
{
    if (!g->mine.failed) {
        va_list args;
        va_start(args, format);
        vsnprintf(g->mine.text, sizeof(g->mine.text), format, args);
        va_end(args);
        g->mine.failed = 1;
    }
}

/* Whether the other member of this rank's group along `dim` fits into the same grid. */
static void
compare(grid *g, int dim, int32_t place, const card *other)
{
    const card *mine = &g->mine;
    const int32_t *line = dm_group_ranks(g->groups[dim]);
    char theirs[128], ours[128];
    if (other->rank != line[place] || other->ndim < 1 ||
        other->ndim > DM_GRID_MAX_NDIM) {
        fail(g, "rank %d answered with what is no description of its groups",
             (int)line[place]);
        return;
    }
    numbers_text(other->sizes, other->ndim, theirs, sizeof(theirs));
    numbers_text(mine->sizes, mine->ndim, ours, sizeof(ours));
    if (other->dim != dim) {
        fail(g,
             "the groups are in different orders: the group of ranks %d and %d is dim "
             "%d "
             "on rank %d (sizes %s) and dim %d on rank %d (sizes %s)",
             (int)mine->rank, (int)other->rank, dim, (int)mine->rank, ours,
             (int)other->dim, (int)other->rank, theirs);
        return;
    }
    if (other->ndim != mine->ndim ||
        memcmp(other->sizes, mine->sizes, (size_t)mine->ndim * sizeof(int32_t)) != 0) {
        fail(g, "the groups have different sizes: %s on rank %d, %s on rank %d", ours,
             (int)mine->rank, theirs, (int)other->rank);
        return;
    }
    for (int d = 0; d < mine->ndim; d++) {
        if (other->places[d] != (d == dim ? place : mine->places[d])) {
            numbers_text(other->places, other->ndim, theirs, sizeof(theirs));
            numbers_text(mine->places, mine->ndim, ours, sizeof(ours));
            fail(g,
                 "the groups are no lines of one mesh: rank %d is at %s in its groups, "
                 "rank %d at %s, and they differ in more than dim %d",
                 (int)mine->rank, ours, (int)other->rank, theirs, dim);
            return;
        }
    }
    if (other->hash != mine->hash) {
        fail(g,
             "the groups do not close to one mesh: ranks %d and %d come to different "
             "ones",
             (int)mine->rank, (int)other->rank);
    }
}

/* One round through the groups whose members take part in so many. The first one of a
 * `tell` compares, the others only pass failures on. */
static dm_status
tell_round(grid *g, int round, bool compares, dm_error *err)
{
    for (int i = 0; i < g->active; i++) {
        int dim = g->order[i];
        dm_group *group = g->groups[dim];
        if (round > g->rounds[dim]) {
            continue;
        }
        g->mine.dim = dim;
        DM_TRY(gather(group, &g->mine, g->cards, sizeof(card), g->wait, err));
        for (int32_t m = 0; m < dm_group_size(group); m++) {
            const card *other = &g->cards[m];
            if (other->ndim > g->rounds[dim] && other->ndim <= DM_GRID_MAX_NDIM) {
                g->rounds[dim] = other->ndim; /* all of the group see that */
            }
            if (other->failed) {
                fail(g, "%.*s", (int)sizeof(other->text) - 1, other->text);
            }
            else if (compares && m != dm_group_rank(group)) {
                compare(g, dim, m, other);
            }
        }
    }
    return DM_OK;
}

/* DM_OK where all agree on what the cards say. */
static dm_status
tell(grid *g, dm_error *err)
{
    DM_TRY(tell_round(g, 0, true, err));
    int rounds = 0;
    for (int i = 0; i < g->active; i++) {
        int most = g->rounds[g->order[i]];
        rounds = most > rounds ? most : rounds;
    }
    for (int round = 1; round <= rounds; round++) {
        DM_TRY(tell_round(g, round, false, err));
    }
    return g->mine.failed ? dm_error_set(err, DM_ERR_MISMATCH, "%s", g->mine.text)
                          : DM_OK;
}

/* --- collecting --------------------------------------------------------------------- */

/* Grows this rank alone to the whole grid, dim by dim. `spare` is as large. */
static dm_status
collect(grid *g, int32_t *ranks, int32_t *spare, dm_error *err)
{
    size_t count = 1;
    ranks[0] = g->mine.rank;
    for (int d = g->ndim; d-- > 0;) {
        size_t size = (size_t)dm_group_size(g->groups[d]);
        if (size == 1) {
            continue;
        }
        memcpy(spare, ranks, count * sizeof(*ranks));
        DM_TRY(
            gather(g->groups[d], spare, ranks, count * sizeof(*ranks), g->wait, err));
        count *= size;
    }
    return DM_OK;
}

/* FNV-1a, 64 bits; never 0. */
static uint64_t
hash_ranks(const int32_t *ranks, int64_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int64_t i = 0; i < n; i++) {
        hash = (hash ^ (uint32_t)ranks[i]) * UINT64_C(0x100000001b3);
    }
    return hash | 1;
}

/* --- all of it ---------------------------------------------------------------------- */

/* Groups with others in them, by name. Whether none of them communicates. */
static dm_status
sort_groups(grid *g, bool *silent, dm_error *err)
{
    *silent = true;
    for (int d = 0; d < g->ndim; d++) {
        dm_group *group = g->groups[d];
        if (dm_group_size(group) == 1) {
            continue;
        }
        if (strcmp(dm_group_backend(group), "nccl") == 0 && !dm_group_is_local(group)) {
            return dm_error_set(err, DM_ERR_UNSUPPORTED,
                                "group %d has the backend '%s', which moves no host "
                                "memory, so its members cannot tell each other: pass "
                                "mesh",
                                d, dm_group_backend(group));
        }
        *silent = *silent && dm_group_is_local(group);
        int at = g->active++;
        while (at > 0 && strcmp(dm_group_name(g->groups[g->order[at - 1]]),
                                dm_group_name(group)) > 0) {
            g->order[at] = g->order[at - 1];
            at--;
        }
        g->order[at] = d;
        g->rounds[d] = g->ndim;
    }
    return DM_OK;
}

static void
fill_card(grid *g)
{
    card *mine = &g->mine;
    mine->rank = dm_world_rank(dm_group_world(g->groups[0]));
    mine->ndim = g->ndim;
    for (int d = 0; d < g->ndim; d++) {
        mine->sizes[d] = dm_group_size(g->groups[d]);
        mine->places[d] = dm_group_rank(g->groups[d]);
    }
}

static dm_status
agree(grid *g, int32_t *ranks, int32_t *spare, dm_error *err)
{
    DM_TRY(tell(g, err));
    DM_TRY(collect(g, ranks, spare, err));
    g->mine.hash = hash_ranks(ranks, g->numel);
    return tell(g, err);
}

/* Room for the ranks; none where the grid is known not to come about. */
static dm_status
make_room(grid *g, int32_t **ranks, int32_t **spare, dm_error *err)
{
    size_t numel = g->mine.failed ? 1 : (size_t)g->numel;
    size_t largest = 1;
    for (int d = 0; d < g->ndim; d++) {
        size_t size = (size_t)dm_group_size(g->groups[d]);
        largest = size > largest ? size : largest;
    }
    *ranks = dm_malloc_array(numel, sizeof(**ranks));
    *spare = dm_malloc_array(numel, sizeof(**spare));
    g->cards = dm_calloc(largest, sizeof(*g->cards));
    if (*ranks == NULL || *spare == NULL || g->cards == NULL) {
        return dm_error_set_no_memory(err, "a grid of ranks");
    }
    return DM_OK;
}

dm_status
dm_grid_of_groups(dm_group *const *groups, int ndim, const dm_wait *wait,
                  int32_t **ranks, dm_error *err)
{
    int32_t *made = NULL, *spare = NULL;
    grid *g = dm_calloc(1, sizeof(*g));
    if (g == NULL) {
        return dm_error_set_no_memory(err, "a grid of ranks");
    }
    g->groups = groups;
    g->ndim = ndim;
    g->wait = wait;
    bool silent;
    dm_error own;
    dm_status status;
    DM_TRY_GOTO(status, sort_groups(g, &silent, err), free_all);
    if (check_alone(groups, ndim, &g->numel, &own) != DM_OK) {
        if (silent) {
            status = dm_error_set(err, own.status, "%s", own.text);
            goto free_all;
        }
        fail(g, "%s", own.text); /* the others wait to be told */
    }
    DM_TRY_GOTO(status, make_room(g, &made, &spare, err), free_all);
    if (silent) {
        status = continue_lines(groups, ndim, g->numel, made, err);
    }
    else {
        fill_card(g);
        status = agree(g, made, spare, err);
    }

free_all:
    if (status == DM_OK) {
        *ranks = made;
        made = NULL;
    }
    dm_free(made);
    dm_free(spare);
    dm_free(g->cards);
    dm_free(g);
    return status;
}
