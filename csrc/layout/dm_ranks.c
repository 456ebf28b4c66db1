/* Rank maps: see dm_ranks.h. */
#include "layout/dm_ranks.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "layout/dm_hash.h"

/* A rank and its offset in one number that sorts by rank. Neither is negative. */
typedef uint64_t entry;

struct dm_ranks {
    int64_t size;
    uint64_t hash;
    /* Both NULL for the identity; else behind the struct, in the same block. */
    const entry *by_rank; /* ascending */
    const int32_t *list;  /* by offset */
};

static entry
entry_of(int32_t rank, int64_t offset)
{
    return (uint64_t)rank << 32 | (uint64_t)offset;
}

static int32_t
entry_rank(entry it)
{
    return (int32_t)(it >> 32);
}

static int64_t
entry_offset(entry it)
{
    return (int64_t)(it & UINT32_MAX);
}

static int
compare_entries(const void *left, const void *right)
{
    entry a = *(const entry *)left;
    entry b = *(const entry *)right;
    return (a > b) - (a < b);
}

static dm_status
check_size(int64_t n, dm_error *err)
{
    if (n < 0 || n > INT32_MAX) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "a mesh has from 0 to %d ranks, got %" PRId64, INT32_MAX,
                            n);
    }
    return DM_OK;
}

dm_status
dm_ranks_identity(int64_t n, dm_ranks **ranks, dm_error *err)
{
    DM_TRY(check_size(n, err));
    dm_ranks *made = dm_calloc(1, sizeof(*made));
    if (made == NULL) {
        return dm_error_set_no_memory(err, "a rank map");
    }
    made->size = n;
    made->hash = dm_hash_fold(1, (uint64_t)n);
    *ranks = made;
    return DM_OK;
}

/* No rank is negative; *identity and *ascending say what else is known. */
static dm_status
check_list(const int32_t *list, int64_t n, bool *identity, bool *ascending,
           dm_error *err)
{
    *identity = true;
    *ascending = true;
    for (int64_t i = 0; i < n; i++) {
        if (list[i] < 0) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "rank %" PRId32 " at position %" PRId64
                                " of the mesh is negative",
                                list[i], i);
        }
        *identity = *identity && list[i] == i;
        *ascending = *ascending && (i == 0 || list[i - 1] < list[i]);
    }
    return DM_OK;
}

static dm_status
check_unique(const entry *by_rank, int64_t n, dm_error *err)
{
    for (int64_t i = 1; i < n; i++) {
        if (entry_rank(by_rank[i - 1]) == entry_rank(by_rank[i])) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "rank %" PRId32
                                " is in the mesh twice, at positions %" PRId64
                                " and %" PRId64,
                                entry_rank(by_rank[i]), entry_offset(by_rank[i - 1]),
                                entry_offset(by_rank[i]));
        }
    }
    return DM_OK;
}

static uint64_t
hash_list(const int32_t *list, int64_t n)
{
    uint64_t hash = dm_hash_fold(2, (uint64_t)n);
    for (int64_t i = 0; i < n; i++) {
        hash = dm_hash_fold(hash, (uint64_t)list[i]);
    }
    return hash;
}

dm_status
dm_ranks_new(const int32_t *list, int64_t n, dm_ranks **ranks, dm_error *err)
{
    bool identity, ascending;
    DM_TRY(check_size(n, err));
    DM_TRY(check_list(list, n, &identity, &ascending, err));
    if (identity) {
        return dm_ranks_identity(n, ranks, err);
    }

    size_t count = (size_t)n;
    size_t words = (sizeof(dm_ranks) + 7) / 8;
    uint64_t room = words + (uint64_t)n + ((uint64_t)n + 1) / 2;
    dm_ranks *made = room <= SIZE_MAX ? dm_malloc_array((size_t)room, 8) : NULL;
    if (made == NULL) {
        return dm_error_set_no_memory(err, "a rank map");
    }
    entry *by_rank = (entry *)made + words;
    for (int64_t i = 0; i < n; i++) {
        by_rank[i] = entry_of(list[i], i);
    }
    if (!ascending) {
        qsort(by_rank, count, sizeof(*by_rank), compare_entries);
        dm_status status = check_unique(by_rank, n, err);
        if (status != DM_OK) {
            dm_free(made);
            return status;
        }
    }
    made->size = n;
    made->hash = hash_list(list, n);
    made->by_rank = by_rank;
    made->list = memcpy(by_rank + count, list, count * sizeof(*list));
    *ranks = made;
    return DM_OK;
}

void
dm_ranks_free(dm_ranks *ranks)
{
    dm_free(ranks);
}

int64_t
dm_ranks_size(const dm_ranks *ranks)
{
    return ranks->size;
}

bool
dm_ranks_is_identity(const dm_ranks *ranks)
{
    return ranks->list == NULL;
}

int32_t
dm_ranks_at(const dm_ranks *ranks, int64_t offset)
{
    assert(offset >= 0 && offset < ranks->size);
    return ranks->list == NULL ? (int32_t)offset : ranks->list[offset];
}

int64_t
dm_ranks_find(const dm_ranks *ranks, int32_t rank)
{
    if (ranks->list == NULL) {
        return rank >= 0 && rank < ranks->size ? rank : -1;
    }
    int64_t low = 0, high = ranks->size;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (entry_rank(ranks->by_rank[middle]) < rank) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    if (low < ranks->size && entry_rank(ranks->by_rank[low]) == rank) {
        return entry_offset(ranks->by_rank[low]);
    }
    return -1;
}

bool
dm_ranks_equal(const dm_ranks *a, const dm_ranks *b)
{
    if (a == b) {
        return true;
    }
    if (a->size != b->size || a->hash != b->hash) {
        return false;
    }
    if (a->list == NULL || b->list == NULL) {
        /* A list that is the identity is kept as one. */
        return a->list == b->list;
    }
    return memcmp(a->list, b->list, (size_t)a->size * sizeof(*a->list)) == 0;
}

uint64_t
dm_ranks_hash(const dm_ranks *ranks)
{
    return ranks->hash;
}
