/* Mesh layouts: see dm_layout.h.
 *
 * Every layout is made the same way: begin() allocates the one block, add_factor()
 * and end_dim() fill it, finish() derives what is asked often and publishes it.
 * add_factor() alone decides what is canonical and what overflows.
 *
 * Factors have at least 2 elements and their product fits an int64_t, so a layout
 * has at most 62 of them, whatever its number of dims.
 */
#include "layout/dm_layout.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "layout/dm_hash.h"

struct dm_layout {
    int64_t numel;
    int64_t cosize;
    uint64_t hash;
    bool orthogonal;
    bool sorted;
    int ndim;
    int n_factors;
    int n_flat;
    /* The arrays lie behind the struct, in the same block. */
    dm_factor *factors; /* of all dims, one dim after the other */
    dm_factor *flat;    /* of all dims flattened into one, by ascending stride */
    int64_t *sizes;     /* of each dim */
    int *first;         /* ndim + 1: where the factors of each dim begin */
};

/* --- making a layout ---------------------------------------------------------- */

/* An empty layout with room for ndim dims of max_factors factors together, or NULL
 * with `err` set (there is no memory). */
static dm_layout *
begin(int ndim, size_t max_factors, dm_error *err)
{
    assert(ndim >= 0);
    size_t dims = (size_t)ndim;
    size_t head = (sizeof(dm_layout) + 7) / 8;
    /* In words of 8 bytes: two arrays of factors, the sizes, and the ints. */
    uint64_t words = head + 4 * (uint64_t)max_factors + dims + (dims / 2 + 1);
    dm_layout *made = words <= SIZE_MAX ? dm_calloc((size_t)words, 8) : NULL;
    if (made == NULL) {
        dm_error_set_no_memory(err, "a mesh layout");
        return NULL;
    }
    made->numel = 1;
    made->cosize = 1;
    made->factors = (dm_factor *)((int64_t *)made + head);
    made->flat = made->factors + max_factors;
    made->sizes = (int64_t *)(made->flat + max_factors);
    made->first = (int *)(made->sizes + dims);
    return made;
}

/* Whether one factor says the same as `outer` followed by `inner`. */
static bool
can_merge(dm_factor outer, dm_factor inner)
{
    int64_t span;
    return !__builtin_mul_overflow(inner.size, inner.stride, &span) &&
           span == outer.stride;
}

/* Appends `inner` to factors[first..n-1] in canonical form; returns the new n. */
static int
append_factor(dm_factor *factors, int first, int n, dm_factor inner)
{
    if (inner.size == 1) {
        return n;
    }
    if (n > first && can_merge(factors[n - 1], inner)) {
        factors[n - 1].size *= inner.size;
        factors[n - 1].stride = inner.stride;
        return n;
    }
    factors[n] = inner;
    return n + 1;
}

/* Adds a factor to the dim that is being made, inside of those it has. */
static dm_status
add_factor(dm_layout *layout, dm_factor factor, dm_error *err)
{
    if (factor.size < 1) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the size of dim %d must be at least 1, got %" PRId64,
                            layout->ndim, factor.size);
    }
    if (factor.stride < 0) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the stride of dim %d must not be negative, got %" PRId64,
                            layout->ndim, factor.stride);
    }
    int64_t numel, reach, cosize;
    if (__builtin_mul_overflow(layout->numel, factor.size, &numel)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "dim %d with size %" PRId64
                            " takes the layout past 2^63 elements",
                            layout->ndim, factor.size);
    }
    if (__builtin_mul_overflow(factor.size - 1, factor.stride, &reach) ||
        __builtin_add_overflow(layout->cosize, reach, &cosize)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "dim %d with size %" PRId64 " and stride %" PRId64
                            " takes the layout past offset 2^63",
                            layout->ndim, factor.size, factor.stride);
    }
    layout->numel = numel;
    layout->cosize = cosize;
    layout->sizes[layout->ndim] *= factor.size;
    layout->n_factors = append_factor(layout->factors, layout->first[layout->ndim],
                                      layout->n_factors, factor);
    return DM_OK;
}

static void
begin_dim(dm_layout *layout)
{
    layout->first[layout->ndim] = layout->n_factors;
    layout->sizes[layout->ndim] = 1;
}

static void
end_dim(dm_layout *layout)
{
    layout->first[++layout->ndim] = layout->n_factors;
}

/* Adds factors to the dim that is being made. */
static dm_status
add_factors(dm_layout *layout, const dm_factor *factors, int n, dm_error *err)
{
    for (int i = 0; i < n; i++) {
        DM_TRY(add_factor(layout, factors[i], err));
    }
    return DM_OK;
}

/* Adds a dim of another layout. */
static dm_status
add_dim_of(dm_layout *layout, const dm_layout *other, int dim, dm_error *err)
{
    const dm_factor *factors;
    int n = dm_layout_factors(other, dim, &factors);
    begin_dim(layout);
    DM_TRY(add_factors(layout, factors, n, err));
    end_dim(layout);
    return DM_OK;
}

/* Insertion sort: there are at most 62, and mostly they are in reverse order. */
static void
sort_by_stride(dm_factor *factors, int n)
{
    for (int i = 1; i < n; i++) {
        dm_factor moving = factors[i];
        int place = i;
        while (place > 0 && factors[place - 1].stride > moving.stride) {
            factors[place] = factors[place - 1];
            place--;
        }
        factors[place] = moving;
    }
}

/* Fills flat, sorted and orthogonal. */
static void
derive_flat(dm_layout *layout)
{
    dm_factor *flat = layout->flat;
    int n = 0;
    for (int i = 0; i < layout->n_factors; i++) {
        n = append_factor(flat, 0, n, layout->factors[i]);
    }
    layout->n_flat = n;

    layout->sorted = true;
    for (int i = 1; i < n; i++) {
        layout->sorted = layout->sorted && flat[i - 1].stride >= flat[i].stride;
    }
    sort_by_stride(flat, n);

    layout->orthogonal = n == 0 || flat[0].stride > 0;
    for (int i = 1; i < n && layout->orthogonal; i++) {
        int64_t span;
        layout->orthogonal =
            !__builtin_mul_overflow(flat[i - 1].size, flat[i - 1].stride, &span) &&
            flat[i].stride % span == 0;
    }
}

static void
derive_hash(dm_layout *layout)
{
    uint64_t hash = dm_hash_fold(0, (uint64_t)layout->ndim);
    for (int d = 0; d < layout->ndim; d++) {
        hash = dm_hash_fold(hash, (uint64_t)layout->first[d + 1]);
    }
    for (int i = 0; i < layout->n_factors; i++) {
        hash = dm_hash_fold(hash, (uint64_t)layout->factors[i].size);
        hash = dm_hash_fold(hash, (uint64_t)layout->factors[i].stride);
    }
    layout->hash = hash;
}

/* Publishes a filled layout in *out, or frees it when filling it failed. */
static dm_status
finish(dm_status status, dm_layout *layout, dm_layout **out)
{
    if (status != DM_OK) {
        dm_layout_free(layout);
        return status;
    }
    derive_flat(layout);
    derive_hash(layout);
    *out = layout;
    return DM_OK;
}

static dm_status
fill_row_major(dm_layout *layout, const int64_t *shape, int ndim, dm_error *err)
{
    /* The stride of a dim is the product of the sizes behind it. Start from the
     * whole product, so that the sizes are checked and named from the left. */
    int64_t rest = 1;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 1) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "the size of dim %d must be at least 1, got %" PRId64,
                                d, shape[d]);
        }
        if (shape[d] > INT32_MAX / rest) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "dim %d with size %" PRId64
                                " takes the mesh past the %d ranks there can be",
                                d, shape[d], INT32_MAX);
        }
        rest *= shape[d];
    }
    for (int d = 0; d < ndim; d++) {
        rest /= shape[d];
        begin_dim(layout);
        DM_TRY(add_factor(layout, (dm_factor){shape[d], rest}, err));
        end_dim(layout);
    }
    return DM_OK;
}

dm_status
dm_layout_new(const int64_t *shape, int ndim, dm_layout **layout, dm_error *err)
{
    dm_layout *made = begin(ndim, (size_t)ndim, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_row_major(made, shape, ndim, err), made, layout);
}

static dm_status
fill_from_factors(dm_layout *layout, const dm_factor *factors, const int *first,
                  int ndim, dm_error *err)
{
    for (int d = 0; d < ndim; d++) {
        assert(first[d] <= first[d + 1]);
        begin_dim(layout);
        for (int i = first[d]; i < first[d + 1]; i++) {
            DM_TRY(add_factor(layout, factors[i], err));
        }
        end_dim(layout);
    }
    return DM_OK;
}

dm_status
dm_layout_from_factors(const dm_factor *factors, const int *first, int ndim,
                       dm_layout **layout, dm_error *err)
{
    size_t n = ndim > 0 ? (size_t)(first[ndim] - first[0]) : 0;
    dm_layout *made = begin(ndim, n, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_from_factors(made, factors, first, ndim, err), made, layout);
}

void
dm_layout_free(dm_layout *layout)
{
    dm_free(layout);
}

dm_status
dm_layout_copy(const dm_layout *layout, dm_layout **copy, dm_error *err)
{
    return dm_layout_concatenate(&layout, 1, copy, err);
}

/* --- facts --------------------------------------------------------------------- */

int
dm_layout_ndim(const dm_layout *layout)
{
    return layout->ndim;
}

int64_t
dm_layout_size(const dm_layout *layout, int dim)
{
    assert(dim >= 0 && dim < layout->ndim);
    return layout->sizes[dim];
}

int64_t
dm_layout_numel(const dm_layout *layout)
{
    return layout->numel;
}

int64_t
dm_layout_cosize(const dm_layout *layout)
{
    return layout->cosize;
}

int
dm_layout_factors(const dm_layout *layout, int dim, const dm_factor **factors)
{
    assert(dim >= 0 && dim < layout->ndim);
    *factors = layout->factors + layout->first[dim];
    return layout->first[dim + 1] - layout->first[dim];
}

bool
dm_layout_equal(const dm_layout *a, const dm_layout *b)
{
    if (a == b) {
        return true;
    }
    /* A factor is two int64_t without padding, so bytes tell. */
    return a->hash == b->hash && a->ndim == b->ndim && a->n_factors == b->n_factors &&
           memcmp(a->first, b->first, ((size_t)a->ndim + 1) * sizeof(*a->first)) == 0 &&
           memcmp(a->factors, b->factors, (size_t)a->n_factors * sizeof(*a->factors)) ==
               0;
}

uint64_t
dm_layout_hash(const dm_layout *layout)
{
    return layout->hash;
}

bool
dm_layout_is_orthogonal(const dm_layout *layout)
{
    return layout->orthogonal;
}

bool
dm_layout_is_sorted(const dm_layout *layout)
{
    return layout->sorted;
}

/* --- new layouts from old ------------------------------------------------------ */

static dm_status
check_dim(const dm_layout *layout, int dim, dm_error *err)
{
    if (dim < 0 || dim >= layout->ndim) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "dim %d is out of range for a layout of %d dims", dim,
                            layout->ndim);
    }
    return DM_OK;
}

static dm_status
fill_selected(dm_layout *made, const dm_layout *layout, const int *dims, int n,
              dm_error *err)
{
    for (int i = 0; i < n; i++) {
        DM_TRY(add_dim_of(made, layout, dims[i], err));
    }
    return DM_OK;
}

dm_status
dm_layout_select(const dm_layout *layout, const int *dims, int n, dm_layout **out,
                 dm_error *err)
{
    size_t n_factors = 0;
    for (int i = 0; i < n; i++) {
        DM_TRY(check_dim(layout, dims[i], err));
        const dm_factor *factors;
        n_factors += (size_t)dm_layout_factors(layout, dims[i], &factors);
    }
    dm_layout *made = begin(n, n_factors, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_selected(made, layout, dims, n, err), made, out);
}

dm_status
dm_layout_flatten(const dm_layout *layout, dm_layout **out, dm_error *err)
{
    dm_layout *made = begin(1, (size_t)layout->n_factors, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    begin_dim(made);
    dm_status status = add_factors(made, layout->factors, layout->n_factors, err);
    end_dim(made);
    return finish(status, made, out);
}

/* What is left of a dim's factors while new dims are cut off its outer end. */
typedef struct cutter {
    const dm_factor *factors; /* the first one is partly used */
    int64_t left;             /* elements of it that are still there */
} cutter;

/* Cuts `size` elements off into the dim that is being made.
 *
 *     while size > 1:
 *         if size divides what is left of the factor: take `size` of it, done
 *         if what is left divides size: take it all, go on with the next factor
 *         else the cut goes through the middle of a stride: no
 */
static dm_status
cut_outer(cutter *cut, int64_t size, dm_layout *made, dm_error *err)
{
    /* The new sizes multiply to what the factors do, so they never run out. */
    while (size > 1) {
        if (cut->left == 1) {
            cut->factors++;
            cut->left = cut->factors->size;
        }
        int64_t taken = cut->left % size == 0   ? size
                        : size % cut->left == 0 ? cut->left
                                                : 0;
        if (taken == 0) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "size %" PRId64 " does not split evenly the %" PRId64
                                " elements that are left of a dim with stride %" PRId64,
                                size, cut->left, cut->factors->stride);
        }
        cut->left /= taken;
        size /= taken;
        DM_TRY(add_factor(made, (dm_factor){taken, cut->left * cut->factors->stride},
                          err));
    }
    return DM_OK;
}

static dm_status
fill_unflattened(dm_layout *made, const dm_layout *layout, int dim,
                 const int64_t *sizes, int n, dm_error *err)
{
    for (int d = 0; d < dim; d++) {
        DM_TRY(add_dim_of(made, layout, d, err));
    }
    cutter cut;
    cut.left = dm_layout_factors(layout, dim, &cut.factors) > 0 ? cut.factors->size : 1;
    for (int i = 0; i < n; i++) {
        begin_dim(made);
        DM_TRY(cut_outer(&cut, sizes[i], made, err));
        end_dim(made);
    }
    for (int d = dim + 1; d < layout->ndim; d++) {
        DM_TRY(add_dim_of(made, layout, d, err));
    }
    return DM_OK;
}

/* The sizes are positive and multiply to the size of the dim. */
static dm_status
check_split(const dm_layout *layout, int dim, const int64_t *sizes, int n,
            dm_error *err)
{
    DM_TRY(check_dim(layout, dim, err));
    int64_t product = 1;
    bool too_big = false;
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 1) {
            return dm_error_set(err, DM_ERR_VALUE,
                                "size %d of %d must be at least 1, got %" PRId64, i, n,
                                sizes[i]);
        }
        too_big = too_big || __builtin_mul_overflow(product, sizes[i], &product);
    }
    if (too_big) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the sizes multiply to more than 2^63, but dim %d has size "
                            "%" PRId64,
                            dim, layout->sizes[dim]);
    }
    if (product != layout->sizes[dim]) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the sizes multiply to %" PRId64
                            ", but dim %d has size %" PRId64,
                            product, dim, layout->sizes[dim]);
    }
    return DM_OK;
}

dm_status
dm_layout_unflatten(const dm_layout *layout, int dim, const int64_t *sizes, int n,
                    dm_layout **out, dm_error *err)
{
    DM_TRY(check_split(layout, dim, sizes, n, err));
    /* Each cut splits at most one factor in two. */
    size_t n_factors = (size_t)layout->n_factors + (size_t)n;
    dm_layout *made = begin(layout->ndim - 1 + n, n_factors, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_unflattened(made, layout, dim, sizes, n, err), made, out);
}

static dm_status
fill_concatenated(dm_layout *made, const dm_layout *const *layouts, int n,
                  dm_error *err)
{
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < layouts[i]->ndim; d++) {
            DM_TRY(add_dim_of(made, layouts[i], d, err));
        }
    }
    return DM_OK;
}

dm_status
dm_layout_concatenate(const dm_layout *const *layouts, int n, dm_layout **out,
                      dm_error *err)
{
    int ndim = 0;
    size_t n_factors = 0;
    for (int i = 0; i < n; i++) {
        if (__builtin_add_overflow(ndim, layouts[i]->ndim, &ndim)) {
            return dm_error_set(err, DM_ERR_VALUE, "too many dims to concatenate");
        }
        n_factors += (size_t)layouts[i]->n_factors;
    }
    dm_layout *made = begin(ndim, n_factors, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_concatenated(made, layouts, n, err), made, out);
}

/* The gaps between the factors, sorted by stride, are the complement:
 *
 *     covered = 1
 *     for each factor, by ascending stride:
 *         the gap is (stride / covered, covered); orthogonal means that it divides
 *         covered = size * stride
 *     covered must divide cosize; the last gap is (cosize / covered, covered)
 */
static dm_status
fill_complement(dm_layout *made, const dm_layout *layout, int64_t cosize, dm_error *err)
{
    dm_factor gaps[64];
    int n = 0;
    int64_t covered = 1;
    bool tiles = layout->orthogonal && cosize >= 1;
    for (int i = 0; i < layout->n_flat && tiles; i++) {
        dm_factor factor = layout->flat[i];
        gaps[n++] = (dm_factor){factor.stride / covered, covered};
        tiles = !__builtin_mul_overflow(factor.size, factor.stride, &covered);
    }
    if (!tiles || cosize % covered != 0) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "a layout of %" PRId64 " elements up to offset %" PRId64
                            "%s does not tile %" PRId64 " offsets",
                            layout->numel, layout->cosize - 1,
                            layout->orthogonal ? "" : " that overlaps itself", cosize);
    }
    gaps[n++] = (dm_factor){cosize / covered, covered};

    begin_dim(made);
    while (n > 0) {
        DM_TRY(add_factor(made, gaps[--n], err));
    }
    end_dim(made);
    return DM_OK;
}

dm_status
dm_layout_complement(const dm_layout *layout, int64_t cosize, dm_layout **out,
                     dm_error *err)
{
    dm_layout *made = begin(1, (size_t)layout->n_flat + 1, err);
    if (made == NULL) {
        return DM_ERR_NO_MEMORY;
    }
    return finish(fill_complement(made, layout, cosize, err), made, out);
}

/* --- coordinates --------------------------------------------------------------- */

/* Where an offset lies on one factor. */
static int64_t
digit(dm_factor factor, int64_t offset)
{
    return factor.stride == 0 ? 0 : offset / factor.stride % factor.size;
}

int64_t
dm_layout_coordinate_on(const dm_layout *layout, int dim, int64_t offset)
{
    const dm_factor *factors;
    int n = dm_layout_factors(layout, dim, &factors);
    int64_t coordinate = 0;
    for (int i = 0; i < n; i++) {
        coordinate = coordinate * factors[i].size + digit(factors[i], offset);
    }
    return coordinate;
}

void
dm_layout_coordinate(const dm_layout *layout, int64_t offset, int64_t *coordinate)
{
    for (int d = 0; d < layout->ndim; d++) {
        coordinate[d] = dm_layout_coordinate_on(layout, d, offset);
    }
}

int64_t
dm_layout_offset(const dm_layout *layout, const int64_t *coordinate)
{
    int64_t offset = 0;
    for (int d = 0; d < layout->ndim; d++) {
        assert(coordinate[d] >= 0 && coordinate[d] < layout->sizes[d]);
        int64_t rest = coordinate[d];
        for (int i = layout->first[d + 1]; i-- > layout->first[d];) {
            offset += rest % layout->factors[i].size * layout->factors[i].stride;
            rest /= layout->factors[i].size;
        }
    }
    return offset;
}

int64_t
dm_layout_base(const dm_layout *layout, int64_t offset)
{
    int64_t base = offset;
    for (int i = 0; i < layout->n_factors; i++) {
        base -= digit(layout->factors[i], offset) * layout->factors[i].stride;
    }
    return base;
}

void
dm_layout_offsets(const dm_layout *layout, int64_t base, int64_t *offsets)
{
    /* Grow the list from the innermost factor outwards: what is there already,
     * `done` offsets at the end, is repeated `size` times, each a stride further. */
    int64_t numel = layout->numel;
    int64_t *end = offsets + numel;
    int64_t done = 1;
    end[-1] = base;
    for (int i = layout->n_factors; i-- > 0;) {
        dm_factor factor = layout->factors[i];
        int64_t *block = end - done * factor.size;
        for (int64_t k = 0; k < factor.size; k++) {
            for (int64_t j = 0; j < done; j++) {
                block[k * done + j] = end[j - done] + k * factor.stride;
            }
        }
        done *= factor.size;
    }
}
