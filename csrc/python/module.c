/* devicemesh._core: a table of contents. Each line of `module_exec` is one file. */
#include "python/py_state.h"

static int
module_exec(PyObject *module)
{
    if (py_state_init(module) < 0) {
        return -1;
    }
    if (py_store_register(module) < 0) {
        return -1;
    }
    if (py_world_register(module) < 0) {
        return -1;
    }
    if (py_group_register(module) < 0) {
        return -1;
    }
    if (py_work_register(module) < 0) {
        return -1;
    }
    if (py_mesh_register(module) < 0) {
        return -1;
    }
    return 0;
}

static void
module_free(void *module)
{
    py_state_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

struct PyModuleDef py_core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "devicemesh._core",
    .m_doc = "The C core of devicemesh: meshes, groups, stores.",
    .m_size = sizeof(py_state),
    .m_slots = module_slots,
    .m_traverse = py_state_traverse,
    .m_clear = py_state_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&py_core_module);
}
