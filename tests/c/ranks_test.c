/* Tests of rank maps.
 *
 * sources: base layout
 */
#include "dm_test.h"

#include "layout/dm_ranks.h"

static void
bad_lists(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_ranks *ranks = NULL;
    CHECK_ERR(dm_ranks_new((int32_t[]){0, -2}, 2, &ranks, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "rank -2 at position 1 of the mesh is negative");
    CHECK_ERR(dm_ranks_new((int32_t[]){3, 1, 0, 3}, 4, &ranks, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "rank 3 is in the mesh twice, at positions 0 and 3");
    CHECK_ERR(dm_ranks_new((int32_t[]){0, 0}, 2, &ranks, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "rank 0 is in the mesh twice, at positions 0 and 1");
    CHECK_ERR(dm_ranks_new((int32_t[]){INT32_MAX, 5, INT32_MAX}, 3, &ranks, &err),
              DM_ERR_VALUE);
    CHECK_STR(err.text, "rank 2147483647 is in the mesh twice, at positions 0 and 2");
    CHECK_ERR(dm_ranks_new(NULL, -1, &ranks, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_ranks_new(NULL, INT64_C(1) << 31, &ranks, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "a mesh has from 0 to 2147483647 ranks, got 2147483648");
    CHECK_ERR(dm_ranks_identity(-1, &ranks, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_ranks_identity(INT64_MAX, &ranks, &err), DM_ERR_VALUE);
    CHECK(ranks == NULL);
}

static void
identity(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_ranks *ranks, *listed;
    CHECK_OK(dm_ranks_identity(INT32_MAX, &ranks, &err));
    CHECK(dm_ranks_is_identity(ranks));
    CHECK_INT(dm_ranks_size(ranks), INT32_MAX);
    CHECK_INT(dm_ranks_at(ranks, INT32_MAX - 1), INT32_MAX - 1);
    CHECK_INT(dm_ranks_find(ranks, INT32_MAX - 1), INT32_MAX - 1);
    CHECK_INT(dm_ranks_find(ranks, INT32_MAX), -1);
    CHECK_INT(dm_ranks_find(ranks, -1), -1);
    dm_ranks_free(ranks);

    CHECK_OK(dm_ranks_identity(3, &ranks, &err));
    CHECK_OK(dm_ranks_new((int32_t[]){0, 1, 2}, 3, &listed, &err));
    CHECK(dm_ranks_is_identity(listed));
    CHECK(dm_ranks_equal(ranks, listed));
    CHECK(dm_ranks_hash(ranks) == dm_ranks_hash(listed));
    dm_ranks_free(ranks);
    CHECK_OK(dm_ranks_identity(4, &ranks, &err));
    CHECK(!dm_ranks_equal(ranks, listed));
    dm_ranks_free(ranks);
    dm_ranks_free(listed);

    CHECK_OK(dm_ranks_new(NULL, 0, &ranks, &err));
    CHECK_INT(dm_ranks_size(ranks), 0);
    CHECK_INT(dm_ranks_find(ranks, 0), -1);
    dm_ranks_free(ranks);
    dm_ranks_free(NULL);
}

static void
listed(void)
{
    dm_error err = DM_ERROR_INIT;
    int32_t list[] = {3, 1, 0, 2}, list2[] = {3, 0, 1, 2}, ascending[] = {1, 5, 9};
    dm_ranks *a, *b, *c, *identical;
    CHECK_OK(dm_ranks_new(list, 4, &a, &err));
    CHECK_OK(dm_ranks_new(list2, 4, &b, &err));
    CHECK_OK(dm_ranks_identity(4, &identical, &err));
    list[0] = 7; /* it keeps a copy */
    for (int i = 1; i < 4; i++) {
        CHECK_INT(dm_ranks_at(a, i), list[i]);
        CHECK_INT(dm_ranks_find(a, list[i]), i);
    }
    CHECK_INT(dm_ranks_at(a, 0), 3);
    CHECK_INT(dm_ranks_find(a, 3), 0);
    CHECK_INT(dm_ranks_find(a, 4), -1);
    CHECK_INT(dm_ranks_find(a, -1), -1);
    CHECK(!dm_ranks_is_identity(a));
    CHECK(dm_ranks_equal(a, a) && !dm_ranks_equal(a, b));
    CHECK(dm_ranks_hash(a) != dm_ranks_hash(b));
    CHECK(!dm_ranks_equal(a, identical) && !dm_ranks_equal(identical, a));
    dm_ranks_free(b);
    list[0] = 3;
    CHECK_OK(dm_ranks_new(list, 4, &b, &err));
    CHECK(dm_ranks_equal(a, b) && dm_ranks_hash(a) == dm_ranks_hash(b));

    CHECK_OK(dm_ranks_new(ascending, 3, &c, &err));
    CHECK_INT(dm_ranks_find(c, 5), 1);
    CHECK_INT(dm_ranks_find(c, 6), -1);
    CHECK_INT(dm_ranks_find(c, 0), -1);
    CHECK_INT(dm_ranks_find(c, 10), -1);
    dm_ranks_free(a);
    dm_ranks_free(b);
    dm_ranks_free(c);
    dm_ranks_free(identical);
}

static void
many(void)
{
    enum { N = 100003 };
    dm_error err = DM_ERROR_INIT;
    int32_t *list = malloc(N * sizeof(*list));
    for (int64_t i = 0; i < N; i++) {
        list[i] = (int32_t)(i * 7919 % N * 20000);
    }
    dm_ranks *ranks;
    CHECK_OK(dm_ranks_new(list, N, &ranks, &err));
    for (int i = 0; i < N; i++) {
        CHECK_INT(dm_ranks_find(ranks, dm_ranks_at(ranks, i)), i);
        CHECK_INT(dm_ranks_find(ranks, list[i] + 1), -1);
    }
    dm_ranks_free(ranks);
    free(list);
}

static void
out_of_memory(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_ranks *ranks;
    CHECK_NO_MEMORY(dm_ranks_identity(4, &ranks, &err), 1);
    dm_ranks_free(ranks);
    CHECK_NO_MEMORY(dm_ranks_new((int32_t[]){0, 1}, 2, &ranks, &err), 1);
    dm_ranks_free(ranks);
    CHECK_NO_MEMORY(dm_ranks_new((int32_t[]){1, 0}, 2, &ranks, &err), 1);
    dm_ranks_free(ranks);
}

TEST_MAIN(TEST(bad_lists), TEST(identity), TEST(listed), TEST(many),
          TEST(out_of_memory))
