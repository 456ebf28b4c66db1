/* The ProcessGroup type. */
#ifndef PY_GROUP_H
#define PY_GROUP_H

#include "group/dm_group.h"
#include "python/py_state.h"

/* The ProcessGroup for a dm_group: always the same object while one lives. Takes
 * over nothing: holds the group itself. New reference. */
PyObject *
py_group_wrap(py_state *state, dm_group *group);

/* The dm_group of a ProcessGroup, borrowed; NULL with TypeError naming `name`. */
dm_group *
py_group_of(py_state *state, PyObject *object, const char *name);

#endif
