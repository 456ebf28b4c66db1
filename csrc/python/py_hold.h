/* What an operation holds until it has ended: exported arrays, and the memory through
 * which lists of arrays go.
 *
 * A backend wants the pieces of a list one after the other in memory. Where they lie so
 * anyway, it works in them; else in one piece of memory of ours, which inputs are copied
 * into before the operation and outputs out of after it. So a list costs a copy at most,
 * and an operation that fails leaves its outputs alone.
 *
 * A hold may point into itself: never copied or moved.
 */
#ifndef PY_HOLD_H
#define PY_HOLD_H

#include "python/py_array.h"

enum { PY_HOLD_FEW = 2 };

/* A list of exported arrays, and where the backend finds its elements. */
typedef struct py_pieces {
    py_array *arrays; /* in the hold; NULL: there is no such list */
    int count;
    char *staging; /* owned; NULL where the arrays lie one after the other */
    size_t *sizes; /* elements of each; owned. Also without a list: of uneven pieces */
    size_t total;  /* elements of all */
} py_pieces;

typedef struct py_hold {
    py_array few[PY_HOLD_FEW];
    py_array *arrays; /* `few`, or more than that on the heap */
    int count;
    py_pieces input;
    py_pieces output;
} py_hold;

void
py_hold_init(py_hold *hold);

/* Room for `count` arrays, once and before the first export. 0, or -1 with MemoryError. */
int
py_hold_reserve(py_hold *hold, int count);

/* Releases the arrays and frees the rest. Idempotent; runs code of the exporters. */
void
py_hold_release(py_hold *hold);

/* Bytes of all arrays together. */
size_t
py_hold_bytes(const py_hold *hold);

/* Exports the arrays of `list`, which must be a list or tuple of `count` arrays of one dtype,
 * into hold->arrays[first...]; errors speak of "outputs[2]". `flags` as py_array_export's.
 * 0 or -1. */
int
py_pieces_export(py_state *state, PyObject *list, const char *name, int flags,
                 int32_t count, py_hold *hold, int first, py_pieces *pieces);

/* After all checks: decides where the backend finds the pieces. 0, or -1 with
 * MemoryError. */
int
py_pieces_place(py_pieces *pieces);

/* Where that is. */
void *
py_pieces_data(const py_pieces *pieces);

/* Copies the arrays into the staging memory, if there is one. Needs no GIL. */
void
py_pieces_load(const py_pieces *pieces);

/* And back. */
void
py_pieces_store(const py_pieces *pieces);

/* Writes the name of an array of the list, "outputs[2]". */
void
py_pieces_name(char *text, size_t size, const char *name, int index);

/* Which arrays of a hold may share memory with which: see py_hold_check_apart. */
typedef struct py_apart {
    int outputs; /* the first so many arrays are outputs, the others inputs */
    const char *output_name;
    const char *input_name;
    bool output_is_list; /* errors speak of "outputs[2]" */
    bool input_is_list;
    int own_output; /* these two may be exactly the same memory; -1: none */
    int own_input;
} py_apart;

/* ValueError where an output has a byte in common with another array. 0 or -1. */
int
py_hold_check_apart(const py_hold *hold, const py_apart *apart);

#endif
