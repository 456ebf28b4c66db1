/* Tests of layouts: errors and their texts, limits, memory. What layouts compute is
 * held against numpy and torch by tests/unit/test_layout_properties.py and
 * tests/torch/test_layout_oracle.py.
 *
 * sources: base layout
 */
#include "dm_test.h"

#include "layout/dm_layout.h"

/* The layout of the dims as text: "2:12,4:1 | - | 3:4" (a dim of size 1 is "-"). */
static const char *
shown(const dm_layout *layout)
{
    static char text[512];
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; d < dm_layout_ndim(layout); d++) {
        const dm_factor *factors;
        int n = dm_layout_factors(layout, d, &factors);
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s",
                                 d > 0 ? " | " : "", n == 0 ? "-" : "");
        for (int i = 0; i < n; i++) {
            used += (size_t)snprintf(text + used, sizeof(text) - used,
                                     "%s%" PRId64 ":%" PRId64, i > 0 ? "," : "",
                                     factors[i].size, factors[i].stride);
        }
    }
    return text;
}

static dm_layout *
row_major(int ndim, const int64_t *shape)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout;
    CHECK_OK(dm_layout_new(shape, ndim, &layout, &err));
    return layout;
}

#define SHAPE(...)                                                                     \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])             \
    {                                                                                  \
        __VA_ARGS__                                                                    \
    }

/* Output arguments are written on success only. */
static char nothing;
static dm_layout *const untouched = (dm_layout *)(void *)&nothing;

static void
bad_shapes(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout = untouched;
    CHECK_ERR(dm_layout_new((int64_t[]){2, 0}, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "the size of dim 1 must be at least 1, got 0");
    CHECK_ERR(dm_layout_new((int64_t[]){-3}, 1, &layout, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "the size of dim 0 must be at least 1, got -3");
    CHECK_ERR(dm_layout_new((int64_t[]){65536, 32768}, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "dim 1 with size 32768");
    CHECK_ERR(dm_layout_new((int64_t[]){INT64_MAX, INT64_MAX}, 2, &layout, &err),
              DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "dim 0");
    CHECK_INT(dm_layout_new((int64_t[]){0}, 1, &layout, NULL), DM_ERR_VALUE);
    CHECK(layout == untouched);
}

static void
bad_factors(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout = untouched;
    int first[] = {0, 1, 2};
    dm_factor zero[] = {{2, 1}, {0, 1}};
    CHECK_ERR(dm_layout_from_factors(zero, first, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "the size of dim 1 must be at least 1, got 0");
    dm_factor negative[] = {{2, -1}, {2, 1}};
    CHECK_ERR(dm_layout_from_factors(negative, first, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "the stride of dim 0 must not be negative, got -1");
    dm_factor many[] = {{INT64_C(1) << 32, 0}, {INT64_C(1) << 31, 0}};
    CHECK_ERR(dm_layout_from_factors(many, first, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "past 2^63 elements");
    dm_factor wide[] = {{3, INT64_MAX / 2}, {2, 2}};
    CHECK_ERR(dm_layout_from_factors(wide, first, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "past offset 2^63");
    dm_factor huge[] = {{4, INT64_MAX / 2}, {2, 2}};
    CHECK_ERR(dm_layout_from_factors(huge, first, 2, &layout, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "past offset 2^63");
    CHECK(layout == untouched);
}

static void
bad_views(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout = row_major(SHAPE(2, 6)), *out = untouched;
    CHECK_ERR(dm_layout_select(layout, (int[]){0, 2}, 2, &out, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "dim 2 is out of range for a layout of 2 dims");
    CHECK_ERR(dm_layout_select(layout, (int[]){-1}, 1, &out, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "dim -1 is out of range for a layout of 2 dims");

    CHECK_ERR(dm_layout_unflatten(layout, 2, (int64_t[]){1}, 1, &out, &err),
              DM_ERR_VALUE);
    CHECK_ERR(dm_layout_unflatten(layout, -1, (int64_t[]){1}, 1, &out, &err),
              DM_ERR_VALUE);
    CHECK_ERR(dm_layout_unflatten(layout, 1, (int64_t[]){3, 3}, 2, &out, &err),
              DM_ERR_VALUE);
    CHECK_STR(err.text, "the sizes multiply to 9, but dim 1 has size 6");
    CHECK_ERR(dm_layout_unflatten(layout, 1, NULL, 0, &out, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_layout_unflatten(layout, 1, (int64_t[]){6, 0}, 2, &out, &err),
              DM_ERR_VALUE);
    CHECK_STR(err.text, "size 1 of 2 must be at least 1, got 0");
    CHECK_ERR(dm_layout_unflatten(layout, 1, (int64_t[]){-2, -3}, 2, &out, &err),
              DM_ERR_VALUE);
    int64_t past[] = {INT64_C(1) << 32, INT64_C(1) << 32, 6};
    CHECK_ERR(dm_layout_unflatten(layout, 1, past, 3, &out, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "more than 2^63");

    CHECK_ERR(dm_layout_complement(layout, 18, &out, &err), DM_ERR_VALUE);
    CHECK_STR(err.text,
              "a layout of 12 elements up to offset 11 does not tile 18 offsets");
    CHECK_ERR(dm_layout_complement(layout, 6, &out, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_layout_complement(layout, 0, &out, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_layout_complement(layout, -12, &out, &err), DM_ERR_VALUE);
    CHECK(out == untouched);
    dm_layout_free(layout);
}

/* A dim flattened from dims that are not adjacent has a seam that no new dim may
 * cross unevenly. */
static void
uneven_split(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *out = untouched, *layout;
    dm_factor factors[] = {{3, 100}, {4, 1}};
    CHECK_OK(dm_layout_from_factors(factors, (int[]){0, 2}, 1, &layout, &err));
    CHECK_ERR(dm_layout_unflatten(layout, 0, (int64_t[]){2, 6}, 2, &out, &err),
              DM_ERR_VALUE);
    CHECK_STR(err.text, "size 2 does not split evenly the 3 elements that are left of "
                        "a dim with stride 100");
    CHECK(out == untouched);

    CHECK_OK(dm_layout_unflatten(layout, 0, (int64_t[]){6, 2}, 2, &out, &err));
    CHECK_STR(shown(out), "3:100,2:2 | 2:1");
    dm_layout_free(out);
    CHECK_OK(dm_layout_unflatten(layout, 0, (int64_t[]){1, 3, 1, 2, 2}, 5, &out, &err));
    CHECK_STR(shown(out), "- | 3:100 | - | 2:2 | 2:1");
    dm_layout_free(out);
    dm_layout_free(layout);
}

static void
no_dims(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout = row_major(0, NULL), *other;
    CHECK_INT(dm_layout_ndim(layout), 0);
    CHECK_INT(dm_layout_numel(layout), 1);
    CHECK_INT(dm_layout_cosize(layout), 1);
    CHECK(dm_layout_is_orthogonal(layout) && dm_layout_is_sorted(layout));
    CHECK_INT(dm_layout_offset(layout, NULL), 0);
    CHECK_INT(dm_layout_base(layout, 7), 7);
    int64_t offset;
    dm_layout_offsets(layout, 5, &offset);
    CHECK_INT(offset, 5);

    CHECK_OK(dm_layout_flatten(layout, &other, &err));
    CHECK_STR(shown(other), "-");
    CHECK(!dm_layout_equal(layout, other));
    dm_layout_free(other);
    CHECK_OK(dm_layout_from_factors(NULL, NULL, 0, &other, &err));
    CHECK(dm_layout_equal(layout, other));
    dm_layout_free(other);
    CHECK_OK(dm_layout_select(layout, NULL, 0, &other, &err));
    CHECK(dm_layout_equal(layout, other));
    dm_layout_free(other);
    CHECK_OK(dm_layout_concatenate(NULL, 0, &other, &err));
    CHECK(dm_layout_equal(layout, other));
    dm_layout_free(other);
    CHECK_OK(dm_layout_complement(layout, 8, &other, &err));
    CHECK_STR(shown(other), "8:1");
    dm_layout_free(other);
    dm_layout_free(layout);

    layout = row_major(SHAPE(1));
    CHECK_OK(dm_layout_unflatten(layout, 0, NULL, 0, &other, &err));
    CHECK_INT(dm_layout_ndim(other), 0);
    dm_layout_free(other);
    dm_layout_free(layout);
    dm_layout_free(NULL);
}

static void
canonical_factors(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *a, *b;
    /* Merged, with a 1 in between that says nothing. */
    dm_factor factors[] = {{2, 12}, {1, 77}, {3, 4}, {4, 1}};
    CHECK_OK(dm_layout_from_factors(factors, (int[]){0, 4}, 1, &a, &err));
    CHECK_STR(shown(a), "24:1");
    /* The same dims apart stay apart. */
    CHECK_OK(dm_layout_from_factors(factors, (int[]){0, 1, 2, 4}, 3, &b, &err));
    CHECK_STR(shown(b), "2:12 | - | 12:1");
    CHECK(!dm_layout_equal(a, b));
    dm_layout_free(a);
    dm_layout_free(b);

    /* A span that does not fit an int64_t merges with nothing. */
    dm_factor wide[] = {{2, 0}, {2, INT64_MAX / 2 + 1}};
    CHECK_OK(dm_layout_from_factors(wide, (int[]){0, 2}, 1, &a, &err));
    CHECK_STR(shown(a), "2:0,2:4611686018427387904");
    CHECK(!dm_layout_is_orthogonal(a));
    dm_layout_free(a);
}

static void
overlaps(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout, *out = untouched;
    dm_factor same[] = {{2, 1}, {2, 1}};
    CHECK_OK(dm_layout_from_factors(same, (int[]){0, 1, 2}, 2, &layout, &err));
    CHECK(!dm_layout_is_orthogonal(layout));
    CHECK(dm_layout_is_sorted(layout));
    CHECK_ERR(dm_layout_complement(layout, 4, &out, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "overlaps itself");
    CHECK(out == untouched);
    dm_layout_free(layout);

    /* No offset twice, but torch's rule asks for more, and nothing can tile with it. */
    dm_factor odd[] = {{2, 3}, {2, 1}};
    CHECK_OK(dm_layout_from_factors(odd, (int[]){0, 1, 2}, 2, &layout, &err));
    CHECK(!dm_layout_is_orthogonal(layout));
    CHECK_ERR(dm_layout_complement(layout, 12, &out, &err), DM_ERR_VALUE);
    dm_layout_free(layout);

    /* One factor may reach where its span no longer fits. */
    dm_factor far[] = {{2, INT64_C(1) << 62}};
    CHECK_OK(dm_layout_from_factors(far, (int[]){0, 1}, 1, &layout, &err));
    CHECK(dm_layout_is_orthogonal(layout));
    CHECK_ERR(dm_layout_complement(layout, INT64_MAX, &out, &err), DM_ERR_VALUE);
    dm_layout_free(layout);

    dm_factor standing[] = {{4, 0}};
    CHECK_OK(dm_layout_from_factors(standing, (int[]){0, 1}, 1, &layout, &err));
    CHECK(!dm_layout_is_orthogonal(layout));
    CHECK_INT(dm_layout_coordinate_on(layout, 0, 3), 0);
    CHECK_INT(dm_layout_base(layout, 3), 3);
    int64_t offsets[4];
    dm_layout_offsets(layout, 9, offsets);
    CHECK(offsets[0] == 9 && offsets[3] == 9);
    dm_layout_free(layout);

    layout = row_major(SHAPE(4, 2));
    CHECK_OK(dm_layout_select(layout, (int[]){1, 0}, 2, &out, &err));
    CHECK(dm_layout_is_orthogonal(out) && !dm_layout_is_sorted(out));
    dm_layout_free(out);
    CHECK_OK(dm_layout_select(layout, (int[]){0, 0}, 2, &out, &err));
    CHECK(!dm_layout_is_orthogonal(out) && dm_layout_is_sorted(out));
    dm_layout_free(out);
    dm_layout_free(layout);
}

/* Hashes go into keys that other processes look up: they may never change by run,
 * build or platform. */
static void
hashes(void)
{
    dm_layout *a = row_major(SHAPE(2, 4)), *b = row_major(SHAPE(2, 4));
    dm_layout *c = row_major(SHAPE(4, 2)), *d = row_major(SHAPE(2, 1, 4));
    CHECK(dm_layout_equal(a, a) && dm_layout_equal(a, b));
    CHECK(dm_layout_hash(a) == dm_layout_hash(b));
    CHECK(!dm_layout_equal(a, c) && dm_layout_hash(a) != dm_layout_hash(c));
    CHECK(!dm_layout_equal(a, d) && dm_layout_hash(a) != dm_layout_hash(d));
    CHECK(dm_layout_hash(a) == UINT64_C(0x2de2fcbca99492de));
    dm_layout_free(a);
    dm_layout_free(b);
    dm_layout_free(c);
    dm_layout_free(d);
}

static void
largest(void)
{
    dm_error err = DM_ERROR_INIT;
    /* The most factors there can be: 62 dims of size 2. */
    dm_factor factors[63];
    int first[64];
    for (int i = 0; i < 63; i++) {
        factors[i] = (dm_factor){2, INT64_C(1) << i};
        first[i] = i;
    }
    first[63] = 63;
    dm_layout *layout, *out;
    CHECK_OK(dm_layout_from_factors(factors, first, 62, &layout, &err));
    CHECK_INT(dm_layout_cosize(layout), INT64_C(1) << 62);
    CHECK(dm_layout_is_orthogonal(layout) && !dm_layout_is_sorted(layout));
    CHECK_INT(dm_layout_coordinate_on(layout, 61, INT64_C(1) << 61), 1);
    CHECK_OK(dm_layout_complement(layout, INT64_C(1) << 62, &out, &err));
    CHECK_STR(shown(out), "-");
    dm_layout_free(out);
    dm_layout_free(layout);
    CHECK_ERR(dm_layout_from_factors(factors, first, 63, &layout, &err), DM_ERR_VALUE);

    /* Every second factor missing: as many gaps as there are factors. */
    for (int i = 0; i < 31; i++) {
        factors[i] = (dm_factor){2, INT64_C(2) << (2 * i)};
    }
    CHECK_OK(dm_layout_from_factors(factors, first, 31, &layout, &err));
    CHECK_OK(dm_layout_complement(layout, INT64_C(1) << 62, &out, &err));
    CHECK_INT(dm_layout_numel(out), INT64_C(1) << 31);
    dm_layout_free(out);
    dm_layout_free(layout);

    layout = row_major(SHAPE(1, INT32_MAX, 1));
    CHECK_INT(dm_layout_numel(layout), INT32_MAX);
    CHECK_INT(dm_layout_offset(layout, (int64_t[]){0, INT32_MAX - 1, 0}),
              INT32_MAX - 1);
    dm_layout_free(layout);

    /* Dims of size 1 are without limit. */
    int64_t ones[1000];
    for (int i = 0; i < 1000; i++) {
        ones[i] = 1;
    }
    layout = row_major(1000, ones);
    CHECK_INT(dm_layout_ndim(layout), 1000);
    CHECK_INT(dm_layout_size(layout, 999), 1);
    dm_layout_free(layout);
}

static void
out_of_memory(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_layout *layout, *out;
    CHECK_NO_MEMORY(dm_layout_new((int64_t[]){2, 3, 4}, 3, &layout, &err), 1);
    dm_factor factor = {2, 1};
    CHECK_NO_MEMORY(dm_layout_from_factors(&factor, (int[]){0, 1}, 1, &out, &err), 1);
    dm_layout_free(out);
    CHECK_NO_MEMORY(dm_layout_copy(layout, &out, &err), 1);
    CHECK(out != layout && dm_layout_equal(out, layout));
    dm_layout_free(out);
    CHECK_NO_MEMORY(dm_layout_select(layout, (int[]){2, 0}, 2, &out, &err), 1);
    dm_layout_free(out);
    CHECK_NO_MEMORY(dm_layout_flatten(layout, &out, &err), 1);
    dm_layout_free(out);
    CHECK_NO_MEMORY(dm_layout_unflatten(layout, 2, (int64_t[]){2, 2}, 2, &out, &err),
                    1);
    dm_layout_free(out);
    const dm_layout *twice[] = {layout, layout};
    CHECK_NO_MEMORY(dm_layout_concatenate(twice, 2, &out, &err), 1);
    dm_layout_free(out);
    CHECK_NO_MEMORY(dm_layout_complement(layout, 48, &out, &err), 1);
    dm_layout_free(out);
    dm_layout_free(layout);

    /* A failed fill frees its block (the leak check sees it). */
    const dm_layout *many[40];
    layout = row_major(SHAPE(4));
    for (int i = 0; i < 40; i++) {
        many[i] = layout;
    }
    CHECK_ERR(dm_layout_concatenate(many, 40, &out, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "past 2^63 elements");
    dm_layout_free(layout);
}

TEST_MAIN(TEST(bad_shapes), TEST(bad_factors), TEST(bad_views), TEST(uneven_split),
          TEST(no_dims), TEST(canonical_factors), TEST(overlaps), TEST(hashes),
          TEST(largest), TEST(out_of_memory))
