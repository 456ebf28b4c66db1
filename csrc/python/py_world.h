/* The World type: rank, size, store and time-out of a set of processes. */
#ifndef PY_WORLD_H
#define PY_WORLD_H

#include "group/dm_world.h"
#include "python/py_state.h"

/* The dm_world of a World object, borrowed; NULL with TypeError naming `name`. */
dm_world *
py_world_of(py_state *state, PyObject *object, const char *name);

/* The World to make meshes in when none was given: the process's default world,
 * found by devicemesh.bootstrap on first use. New reference. */
PyObject *
py_world_default(py_state *state);

#endif
