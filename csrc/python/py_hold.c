/* What an operation holds until it has ended: see py_hold.h. */
#include "python/py_hold.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dm_alloc.h"

enum { NAME_SIZE = 64 };

void
py_hold_init(py_hold *hold)
{
    for (int i = 0; i < PY_HOLD_FEW; i++) {
        hold->few[i].holder = PY_ARRAY_NONE;
        hold->few[i].bytes = 0;
    }
    hold->arrays = hold->few;
    hold->count = PY_HOLD_FEW;
    hold->input = hold->output = (py_pieces){NULL, 0, NULL, NULL, 0};
}

int
py_hold_reserve(py_hold *hold, int count)
{
    if (count > PY_HOLD_FEW) {
        py_array *arrays = dm_calloc((size_t)count, sizeof(*arrays));
        if (arrays == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        hold->arrays = arrays;
        hold->count = count;
    }
    return 0;
}

static void
pieces_free(py_pieces *pieces)
{
    dm_free(pieces->staging);
    dm_free(pieces->sizes);
    *pieces = (py_pieces){NULL, 0, NULL, NULL, 0};
}

void
py_hold_release(py_hold *hold)
{
    /* Releasing runs code of others, which must not find half of this. */
    for (int i = 0; i < hold->count; i++) {
        py_array_release(&hold->arrays[i]);
    }
    if (hold->input.sizes != NULL) {
        pieces_free(&hold->input);
    }
    if (hold->output.sizes != NULL) {
        pieces_free(&hold->output);
    }
    if (hold->arrays != hold->few) {
        dm_free(hold->arrays);
        hold->arrays = hold->few;
        hold->count = 0;
    }
}

size_t
py_hold_bytes(const py_hold *hold)
{
    size_t bytes = 0;
    for (int i = 0; i < hold->count; i++) {
        bytes += hold->arrays[i].bytes;
    }
    return bytes;
}

/* --- lists ---------------------------------------------------------------------------- */

void
py_pieces_name(char *text, size_t size, const char *name, int index)
{
    snprintf(text, size, "%s[%d]", name, index);
}

/* The arrays themselves; `items` is a list or tuple of the right length. */
static int
export_items(py_state *state, PyObject *items, const char *name, int flags,
             py_pieces *pieces)
{
    char text[NAME_SIZE];
    for (int i = 0; i < pieces->count; i++) {
        /* The exports run code that may shorten a list. */
        if (PySequence_Fast_GET_SIZE(items) != pieces->count) {
            PyErr_Format(PyExc_RuntimeError, "%s changed while it was read", name);
            return -1;
        }
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, i));
        py_pieces_name(text, sizeof(text), name, i);
        int failed = py_array_export(state, item, text, flags, &pieces->arrays[i]);
        Py_DECREF(item);
        if (failed < 0) {
            return -1;
        }
        const py_array *array = &pieces->arrays[i];
        if (array->dtype != pieces->arrays[0].dtype) {
            PyErr_Format(PyExc_ValueError,
                         "%s must be arrays of one dtype: %s[0] is %s, %s is %s", name,
                         name, dm_dtype_name(pieces->arrays[0].dtype), text,
                         dm_dtype_name(array->dtype));
            return -1;
        }
        pieces->sizes[i] = array->count;
        pieces->total += array->count;
    }
    return 0;
}

int
py_pieces_export(py_state *state, PyObject *list, const char *name, int flags,
                 int32_t count, py_hold *hold, int first, py_pieces *pieces)
{
    if (!PyList_Check(list) && !PyTuple_Check(list)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list of %d arrays, got %.200s",
                     name, (int)count, Py_TYPE(list)->tp_name);
        return -1;
    }
    if (PySequence_Fast_GET_SIZE(list) != count) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have one array for each of the %d members, it has %zd",
                     name, (int)count, PySequence_Fast_GET_SIZE(list));
        return -1;
    }
    pieces->sizes = dm_malloc_array((size_t)count, sizeof(*pieces->sizes));
    if (pieces->sizes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pieces->arrays = hold->arrays + first;
    pieces->count = (int)count;
    return export_items(state, list, name, flags, pieces);
}

/* The first array that has elements, or the first. */
static const py_array *
first_array(const py_pieces *pieces)
{
    for (int i = 0; i < pieces->count; i++) {
        if (pieces->arrays[i].bytes != 0) {
            return &pieces->arrays[i];
        }
    }
    return &pieces->arrays[0];
}

int
py_pieces_place(py_pieces *pieces)
{
    const char *next = first_array(pieces)->data;
    bool in_line = true;
    for (int i = 0; i < pieces->count && in_line; i++) {
        const py_array *array = &pieces->arrays[i];
        if (array->bytes != 0) {
            in_line = array->data == next;
            next += array->bytes;
        }
    }
    if (!in_line) {
        pieces->staging =
            dm_malloc_array(pieces->total, dm_dtype_size(pieces->arrays[0].dtype));
        if (pieces->staging == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

void *
py_pieces_data(const py_pieces *pieces)
{
    return pieces->staging != NULL ? pieces->staging : first_array(pieces)->data;
}

void
py_pieces_load(const py_pieces *pieces)
{
    char *at = pieces->staging;
    if (at == NULL) {
        return;
    }
    for (int i = 0; i < pieces->count; i++) {
        const py_array *array = &pieces->arrays[i];
        if (array->bytes != 0) {
            memcpy(at, array->data, array->bytes);
            at += array->bytes;
        }
    }
}

void
py_pieces_store(const py_pieces *pieces)
{
    const char *at = pieces->staging;
    if (at == NULL) {
        return;
    }
    for (int i = 0; i < pieces->count; i++) {
        const py_array *array = &pieces->arrays[i];
        if (array->bytes != 0) {
            memcpy(array->data, at, array->bytes);
            at += array->bytes;
        }
    }
}

/* --- overlap -------------------------------------------------------------------------- */

typedef struct extent {
    const char *start;
    const char *end;
    int index;
} extent;

static int
compare_extents(const void *a, const void *b)
{
    const extent *x = a;
    const extent *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

static void
name_of(const py_apart *apart, int index, char *text, size_t size)
{
    bool output = index < apart->outputs;
    const char *name = output ? apart->output_name : apart->input_name;
    if (output ? apart->output_is_list : apart->input_is_list) {
        py_pieces_name(text, size, name, output ? index : index - apart->outputs);
    }
    else {
        snprintf(text, size, "%s", name);
    }
}

/* Whether these two may share memory as they do. */
static bool
allowed(const py_hold *hold, const py_apart *apart, int a, int b)
{
    if (a >= apart->outputs && b >= apart->outputs) {
        return true; /* both are only read */
    }
    const py_array *x = &hold->arrays[a];
    const py_array *y = &hold->arrays[b];
    bool own = (a == apart->own_output && b == apart->own_input) ||
               (b == apart->own_output && a == apart->own_input);
    return own && x->data == y->data && x->bytes == y->bytes;
}

/* The pair that may share memory is looked at apart, so that it hides no other overlap. */
enum { OUTPUTS, INPUTS, OWN_OUTPUT, OWN_INPUT, KINDS };

static int
kind_of(const py_apart *apart, int index)
{
    if (index == apart->own_output) {
        return OWN_OUTPUT;
    }
    if (index == apart->own_input) {
        return OWN_INPUT;
    }
    return index < apart->outputs ? OUTPUTS : INPUTS;
}

static int
raise_overlap(const py_apart *apart, const extent *x, const extent *y)
{
    char a[NAME_SIZE];
    char b[NAME_SIZE];
    name_of(apart, x->index, a, sizeof(a));
    name_of(apart, y->index, b, sizeof(b));
    PyErr_Format(
        PyExc_ValueError,
        "%s and %s must not overlap: %s is %zu bytes at %p, %s is %zu bytes at "
        "%p",
        a, b, a, (size_t)(x->end - x->start), (const void *)x->start, b,
        (size_t)(y->end - y->start), (const void *)y->start);
    return -1;
}

/* Sorted by where they begin, an array overlaps earlier ones where it begins before the
 * furthest end of those. */
static int
check_sorted(const py_hold *hold, const py_apart *apart, const extent *extents, int n)
{
    const extent *furthest[KINDS] = {NULL};
    for (int i = 0; i < n; i++) {
        const extent *e = &extents[i];
        for (int kind = 0; kind < KINDS; kind++) {
            const extent *before = furthest[kind];
            if (before != NULL && e->start < before->end &&
                !allowed(hold, apart, e->index, before->index)) {
                return raise_overlap(apart, before, e);
            }
        }
        const extent **mine = &furthest[kind_of(apart, e->index)];
        if (*mine == NULL || e->end > (*mine)->end) {
            *mine = e;
        }
    }
    return 0;
}

int
py_hold_check_apart(const py_hold *hold, const py_apart *apart)
{
    extent *extents = dm_malloc_array((size_t)hold->count, sizeof(*extents));
    if (extents == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int n = 0;
    for (int i = 0; i < hold->count; i++) {
        const py_array *array = &hold->arrays[i];
        if (array->holder != PY_ARRAY_NONE && array->bytes != 0) {
            const char *start = array->data;
            extents[n++] = (extent){start, start + array->bytes, i};
        }
    }
    qsort(extents, (size_t)n, sizeof(*extents), compare_extents);
    int result = check_sorted(hold, apart, extents, n);
    dm_free(extents);
    return result;
}
