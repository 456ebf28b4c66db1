/* Tests of base: error records, allocation, clock, dtypes.
 *
 * sources: base
 */
#include "dm_test.h"

#include <errno.h>

#include "base/dm_clock.h"
#include "base/dm_dtype.h"

/* --- status ---------------------------------------------------------------------- */

static void
error_without_a_record(void)
{
    CHECK_INT(dm_error_set(NULL, DM_ERR_VALUE, "x"), DM_ERR_VALUE);
    CHECK_INT(dm_error_set_native(NULL, DM_ERR_LIBRARY, 5, "x"), DM_ERR_LIBRARY);
    CHECK_INT(dm_error_set_errno(NULL, EIO, "x"), DM_ERR_SYSTEM);
    CHECK_INT(dm_error_set_no_memory(NULL, "x"), DM_ERR_NO_MEMORY);
    dm_error_context(NULL, "x");
}

static void
error_records(void)
{
    dm_error err = DM_ERROR_INIT;
    CHECK_INT(dm_error_set(&err, DM_ERR_KEY, "no '%s' in %d", "tp", 3), DM_ERR_KEY);
    CHECK_INT(err.status, DM_ERR_KEY);
    CHECK_INT(err.native, 0);
    CHECK_STR(err.text, "no 'tp' in 3");

    dm_error_context(&err, "group '%s'", "dp");
    CHECK_INT(err.status, DM_ERR_KEY);
    CHECK_STR(err.text, "group 'dp': no 'tp' in 3");

    CHECK_INT(dm_error_set_native(&err, DM_ERR_LIBRARY, 7, "seven"), DM_ERR_LIBRARY);
    CHECK_INT(err.native, 7);
    CHECK_STR(err.text, "seven");

    CHECK_INT(dm_error_set_errno(&err, ENOENT, "opening %s", "f"), DM_ERR_SYSTEM);
    CHECK_INT(err.native, ENOENT);
    CHECK_STR(err.text, "opening f: No such file or directory");
    CHECK_INT(dm_error_set_errno(&err, ENOMEM, "mmap"), DM_ERR_NO_MEMORY);

    CHECK_INT(dm_error_set_no_memory(&err, "a thing"), DM_ERR_NO_MEMORY);
    CHECK_INT(err.native, 0);
    CHECK_STR(err.text, "out of memory while making a thing");
}

static void
long_texts_are_cut(void)
{
    char text[DM_ERROR_TEXT_SIZE + 10];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    dm_error err = DM_ERROR_INIT;

    dm_error_set(&err, DM_ERR_VALUE, "%s", text);
    CHECK_INT(strlen(err.text), DM_ERROR_TEXT_SIZE - 1);
    CHECK_STR(err.text + DM_ERROR_TEXT_SIZE - 4, "...");

    dm_error_context(&err, "in front");
    CHECK(strncmp(err.text, "in front: xxx", 13) == 0);
    CHECK_INT(strlen(err.text), DM_ERROR_TEXT_SIZE - 1);
    CHECK_STR(err.text + DM_ERROR_TEXT_SIZE - 4, "...");

    /* A context that fills the record by itself, and one that just fits. */
    dm_error_context(&err, "%s", text);
    CHECK_INT(strlen(err.text), DM_ERROR_TEXT_SIZE - 1);
    CHECK_STR(err.text + DM_ERROR_TEXT_SIZE - 4, "...");
    for (size_t n = DM_ERROR_TEXT_SIZE - 6; n < DM_ERROR_TEXT_SIZE + 2; n++) {
        dm_error_set(&err, DM_ERR_VALUE, "tail");
        dm_error_context(&err, "%.*s", (int)n, text);
        CHECK(strlen(err.text) < DM_ERROR_TEXT_SIZE);
        CHECK_STR(err.text + DM_ERROR_TEXT_SIZE - 4, "...");
        dm_error_set_errno(&err, EIO, "%.*s", (int)n, text);
        CHECK(strlen(err.text) < DM_ERROR_TEXT_SIZE);
        CHECK_STR(err.text + DM_ERROR_TEXT_SIZE - 4, "...");
    }
}

static void
status_names(void)
{
    CHECK_STR(dm_status_name(DM_OK), "ok");
    CHECK_STR(dm_status_name(DM_ERR_TIMEOUT), "timeout");
    CHECK_STR(dm_status_name(DM_ERR_STATE), "state");
    CHECK_STR(dm_status_name((dm_status)-1000), "unknown");
}

/* --- allocation ------------------------------------------------------------------- */

static void
allocations(void)
{
    unsigned char *zeroed = dm_calloc(10, 3);
    for (int i = 0; i < 30; i++) {
        CHECK_INT(zeroed[i], 0);
    }
    zeroed = dm_realloc_array(zeroed, 40, 3);
    CHECK(zeroed != NULL && zeroed[29] == 0);
    dm_free(zeroed);
    dm_free(NULL);

    void *a = dm_calloc(0, 8), *b = dm_malloc_array(8, 0), *c = dm_memdup("", 0);
    CHECK(a != NULL && b != NULL && c != NULL && a != b && b != c);
    dm_free(a);
    dm_free(b);
    dm_free(c);

    char *copy = dm_strdup("text");
    CHECK_STR(copy, "text");
    dm_free(copy);
    copy = dm_memdup("ab\0c", 4);
    CHECK(memcmp(copy, "ab\0c", 4) == 0);
    dm_free(copy);
}

static void
allocation_overflow(void)
{
    CHECK(dm_calloc(SIZE_MAX / 2, 3) == NULL);
    CHECK(dm_malloc_array(SIZE_MAX / 2, 3) == NULL);
    int *kept = dm_malloc_array(1, sizeof(*kept));
    *kept = 7;
    CHECK(dm_realloc_array(kept, SIZE_MAX / 2, 3) == NULL);
    CHECK_INT(*kept, 7);
    dm_free(kept);
}

static void
allocation_fails_on_demand(void)
{
    dm_alloc_fail_at(3);
    void *a = dm_calloc(1, 1), *b = dm_memdup("x", 1);
    CHECK(a != NULL && b != NULL);
    CHECK(dm_strdup("x") == NULL);
    void *c = dm_malloc_array(1, 1);
    CHECK(c != NULL);
    dm_free(c);

    dm_alloc_fail_at(1);
    CHECK(dm_realloc_array(a, 2, 1) == NULL);
    dm_alloc_fail_at(1);
    dm_alloc_fail_at(0);
    a = dm_realloc_array(a, 2, 1);
    CHECK(a != NULL);
    dm_free(a);
    dm_free(b);
}

/* --- clock ------------------------------------------------------------------------ */

static dm_status
poll_counts(void *arg, dm_error *err)
{
    int *left = arg;
    if (--*left == 0) {
        return dm_error_set(err, DM_ERR_INTERRUPTED, "stop");
    }
    return DM_OK;
}

static void
deadlines(void)
{
    int64_t now = dm_clock_now();
    CHECK(now > 0 && dm_clock_now() >= now);
    CHECK_INT(dm_clock_deadline(-1), DM_FOREVER);
    CHECK_INT(dm_clock_deadline(INT64_MAX), DM_FOREVER);
    CHECK_INT(dm_clock_left(DM_FOREVER), DM_FOREVER);
    CHECK_INT(dm_clock_left(now - 1), 0);
    int64_t left = dm_clock_left(dm_clock_deadline(60 * DM_NS_PER_S));
    CHECK(left > 0 && left <= 60 * DM_NS_PER_S);
}

static void
waits(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_wait forever = DM_WAIT_FOREVER;
    CHECK_OK(dm_wait_poll(&forever, &err));
    CHECK_INT(dm_wait_slice(&forever), DM_WAIT_SLICE_NS);
    CHECK_INT(dm_wait_slice_ms(&forever), 100);

    int left = 2;
    dm_wait stopped = {DM_FOREVER, poll_counts, &left};
    CHECK_OK(dm_wait_poll(&stopped, &err));
    CHECK_ERR(dm_wait_poll(&stopped, &err), DM_ERR_INTERRUPTED);
    CHECK_STR(err.text, "stop");

    dm_wait late = {dm_clock_now() - 1, NULL, NULL};
    CHECK_ERR(dm_wait_poll(&late, &err), DM_ERR_TIMEOUT);
    CHECK_INT(dm_wait_slice(&late), 0);
    CHECK_INT(dm_wait_slice_ms(&late), 0);

    /* A rest below a millisecond must not become a busy loop. */
    dm_wait soon = {dm_clock_now() + DM_NS_PER_MS, NULL, NULL};
    int ms = dm_wait_slice_ms(&soon);
    CHECK(ms == 1 || dm_clock_left(soon.deadline) == 0);
}

/* --- dtypes ------------------------------------------------------------------------ */

static void
dtypes(void)
{
    for (int i = 0; i < DM_DTYPE_COUNT; i++) {
        dm_dtype parsed = DM_DTYPE_COUNT;
        CHECK(dm_dtype_parse(dm_dtype_name((dm_dtype)i), &parsed));
        CHECK_INT(parsed, i);
        CHECK(dm_dtype_size((dm_dtype)i) >= 1 && dm_dtype_size((dm_dtype)i) <= 16);
    }
    dm_dtype untouched = DM_INT8;
    CHECK(!dm_dtype_parse("float31", &untouched));
    CHECK(!dm_dtype_parse("", &untouched));
    CHECK_INT(untouched, DM_INT8);
}

static void
reduce_ops(void)
{
    for (int i = 0; i < DM_REDUCE_OP_COUNT; i++) {
        dm_reduce_op parsed = DM_REDUCE_OP_COUNT;
        CHECK(dm_reduce_op_parse(dm_reduce_op_name((dm_reduce_op)i), &parsed));
        CHECK_INT(parsed, i);
    }
    dm_reduce_op untouched = DM_MAX;
    CHECK(!dm_reduce_op_parse("median", &untouched));
    CHECK_INT(untouched, DM_MAX);
}

TEST_MAIN(TEST(error_without_a_record), TEST(error_records), TEST(long_texts_are_cut),
          TEST(status_names), TEST(allocations), TEST(allocation_overflow),
          TEST(allocation_fails_on_demand), TEST(deadlines), TEST(waits), TEST(dtypes),
          TEST(reduce_ops))
