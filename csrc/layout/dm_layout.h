/* Mesh layouts: sizes and strides, no communication.
 *
 * A layout maps the coordinates of a mesh to *offsets* 0..cosize-1 in its
 * root; a dm_ranks (dm_ranks.h) maps offsets to ranks. Each dim is a list of factors
 * (size, stride), outermost first, so that a dim made by flattening dims that
 * are not adjacent is exact. The factors of a dim are kept canonical: factors of
 * size 1 are dropped and neighbours that one factor can express are merged, so
 * equal dims have equal factors (a dim of size 1 has none).
 *
 * A layout is one block of plain memory, immutable after creation, owned by
 * its maker; it may be read by any thread. All costs are O(number of factors)
 * except where a list of ranks is written.
 */
#ifndef DM_LAYOUT_H
#define DM_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_status.h"
#include "layout/dm_ranks.h"

typedef struct dm_factor {
    int64_t size;
    int64_t stride;
} dm_factor;

typedef struct dm_layout dm_layout;

/* The row-major layout of a shape: the last dim has stride 1. DM_ERR_VALUE: a
 * size below 1, or a product above INT32_MAX. ndim 0 is a layout of one element. */
dm_status
dm_layout_new(const int64_t *shape, int ndim, dm_layout **layout, dm_error *err);

/* From explicit dims: dim d has the factors
 * factors[first[d]] .. factors[first[d + 1] - 1]. They are made canonical.
 * DM_ERR_VALUE: a size below 1, a negative stride, more than INT64_MAX elements
 * or a cosize beyond it. Overlap is not an error here: see
 * dm_layout_is_orthogonal. */
dm_status
dm_layout_from_factors(const dm_factor *factors, const int *first, int ndim,
                       dm_layout **layout, dm_error *err);

/* NULL is fine. */
void
dm_layout_free(dm_layout *layout);

dm_status
dm_layout_copy(const dm_layout *layout, dm_layout **copy, dm_error *err);

int
dm_layout_ndim(const dm_layout *layout);

/* Number of elements of one dim, and of the layout. */
int64_t
dm_layout_size(const dm_layout *layout, int dim);

int64_t
dm_layout_numel(const dm_layout *layout);

/* One more than the largest offset. */
int64_t
dm_layout_cosize(const dm_layout *layout);

/* The canonical factors of a dim, borrowed; 0 factors for a dim of size 1. */
int
dm_layout_factors(const dm_layout *layout, int dim, const dm_factor **factors);

bool
dm_layout_equal(const dm_layout *a, const dm_layout *b);

/* Stable across processes and runs; equal layouts hash alike. */
uint64_t
dm_layout_hash(const dm_layout *layout);

/* No two coordinates share an offset, by torch's rule: with all dims flattened
 * and the factors sorted by stride, each stride is a multiple of the next smaller
 * stride times its size. Stricter than torch in one point: a stride of 0 is always
 * an overlap. O(1). */
bool
dm_layout_is_orthogonal(const dm_layout *layout);

/* The strides of the factors never increase once all dims are flattened. O(1). */
bool
dm_layout_is_sorted(const dm_layout *layout);

/* --- new layouts from old ------------------------------------------------- */

/* The dims dims[0..n-1], in that order; the same one may come twice (and then
 * overlaps). DM_ERR_VALUE: an index out of range. */
dm_status
dm_layout_select(const dm_layout *layout, const int *dims, int n, dm_layout **out,
                 dm_error *err);

/* All dims as one. */
dm_status
dm_layout_flatten(const dm_layout *layout, dm_layout **out, dm_error *err);

/* Dim `dim` split row-major into n dims. DM_ERR_VALUE: dim out of range, a size
 * below 1, a product of sizes that is not the dim's size, or a split that cuts a
 * factor unevenly. */
dm_status
dm_layout_unflatten(const dm_layout *layout, int dim, const int64_t *sizes, int n,
                    dm_layout **out, dm_error *err);

/* The dims of all layouts one after the other. DM_ERR_VALUE: an overflow. */
dm_status
dm_layout_concatenate(const dm_layout *const *layouts, int n, dm_layout **out,
                      dm_error *err);

/* --- coordinates ----------------------------------------------------------- */

/* Reading a coordinate from an offset is unambiguous in an orthogonal layout only;
 * in any other the functions stay defined but their answers mean nothing. */

/* offset -> coordinate (ndim values). The offset may belong to any sibling of
 * a slice: only the digits of this layout's dims are read. */
void
dm_layout_coordinate(const dm_layout *layout, int64_t offset, int64_t *coordinate);

/* One entry of that coordinate. */
int64_t
dm_layout_coordinate_on(const dm_layout *layout, int dim, int64_t offset);

/* coordinate -> offset within the layout. The coordinates must be in range. */
int64_t
dm_layout_offset(const dm_layout *layout, const int64_t *coordinate);

/* The offset of the same line's element 0: `offset` with the digits of this
 * layout's dims (all of them) set to 0. */
int64_t
dm_layout_base(const dm_layout *layout, int64_t offset);

/* Writes the numel offsets of the layout in row-major order, each plus `base`. */
void
dm_layout_offsets(const dm_layout *layout, int64_t base, int64_t *offsets);

/* The factors that fill what `layout` leaves out of 0..cosize-1, as a layout of
 * one dim: its offsets are the bases of all siblings of a slice, ascending.
 * DM_ERR_VALUE when the layout does not tile `cosize` (torch rounds up there) or
 * is not orthogonal. */
dm_status
dm_layout_complement(const dm_layout *layout, int64_t cosize, dm_layout **out,
                     dm_error *err);

#endif
