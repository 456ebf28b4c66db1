/* The backends that there are, and how they are found: see dm_backend.h.
 *
 * The gloo bridge's table is the one process-wide thing of the core: a library that was
 * opened stays open, since threads of its own may run in it. One mutex guards it; it is
 * held during dlopen, so that a library is opened once.
 */
#include "backend/dm_backend.h"

#include <assert.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/dm_alloc.h"

static const struct entry {
    const char *name;
    const dm_backend *backend; /* NULL: not part of this build */
} entries[] = {
    {"gloo", &dm_backend_cpu},
    {"nccl", NULL},
    {"fake", &dm_backend_fake},
};

enum { ENTRY_COUNT = sizeof(entries) / sizeof(entries[0]) };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *library_folder;         /* these two: guarded by lock */
static const dm_backend *gloo_table; /* NULL until it is loaded */

/* --- loading ------------------------------------------------------------------- */

#define GLOO_LIBRARY "_gloo.so"
#define GLOO_SYMBOL "dm_gloo_backend"
#define GLOO_REMEDY                                                                    \
    "the gloo backend needs libgloo: 'apt-get install libgloo-dev' and install "       \
    "devicemesh again"

static dm_status
load_gloo(const dm_backend **backend, dm_error *err)
{
    if (library_folder == NULL) {
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "cannot load the gloo backend: nobody said in which "
                            "folder " GLOO_LIBRARY " lies");
    }
    char path[4096];
    int n = snprintf(path, sizeof(path), "%s/" GLOO_LIBRARY, library_folder);
    if (n < 0 || (size_t)n >= sizeof(path)) {
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "cannot load the gloo backend: the path of its folder is "
                            "too long: %.200s...",
                            library_folder);
    }

    /* Local: torch may carry its own gloo in this process. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "cannot load the gloo backend: tried %s: %s; " GLOO_REMEDY,
                            path, why != NULL ? why : "unknown error");
    }

    const dm_backend *(*entry)(int abi);
    void *symbol = dlsym(library, GLOO_SYMBOL);
    memcpy(&entry, &symbol, sizeof(entry));
    if (symbol == NULL) {
        dlclose(library);
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "cannot load the gloo backend: %s has no " GLOO_SYMBOL
                            "; " GLOO_REMEDY,
                            path);
    }
    const dm_backend *table = entry(DM_BACKEND_ABI);
    if (table == NULL || table->abi != DM_BACKEND_ABI) {
        int abi = table != NULL ? table->abi : -1;
        dlclose(library);
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "cannot load the gloo backend: %s was built for another "
                            "version of devicemesh (interface %d, not %d); install "
                            "devicemesh again",
                            path, abi, DM_BACKEND_ABI);
    }
    *backend = table;
    return DM_OK;
}

dm_status
dm_backend_load_gloo(const dm_backend **backend, dm_error *err)
{
    dm_status status = DM_OK;
    pthread_mutex_lock(&lock);
    if (gloo_table == NULL) {
        status = load_gloo(&gloo_table, err);
    }
    if (status == DM_OK) {
        *backend = gloo_table;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* --- registry ------------------------------------------------------------------ */

static const struct entry *
find_entry(const char *name)
{
    for (int i = 0; i < ENTRY_COUNT; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return &entries[i];
        }
    }
    return NULL;
}

dm_status
dm_backend_check_name(const char *name, dm_error *err)
{
    if (find_entry(name) != NULL) {
        return DM_OK;
    }
    char known[128] = "";
    size_t used = 0;
    for (int i = 0; i < ENTRY_COUNT; i++) {
        int n = snprintf(known + used, sizeof(known) - used, "%s'%s'",
                         i == 0 ? "" : ", ", entries[i].name);
        used += (size_t)n;
        assert(used < sizeof(known));
    }
    return dm_error_set(err, DM_ERR_VALUE, "unknown backend '%.64s': there are %s",
                        name, known);
}

dm_status
dm_backend_find(const char *name, const dm_backend **backend, dm_error *err)
{
    DM_TRY(dm_backend_check_name(name, err));
    const struct entry *entry = find_entry(name);
    if (entry->backend == NULL) {
        return dm_error_set(err, DM_ERR_LIBRARY,
                            "this build of devicemesh has no %s backend", name);
    }
    *backend = entry->backend;
    return DM_OK;
}

dm_status
dm_backend_set_path(const char *folder, dm_error *err)
{
    char *copy = dm_strdup(folder);
    if (copy == NULL) {
        return dm_error_set_no_memory(err, "the path of the backends");
    }
    pthread_mutex_lock(&lock);
    char *old = library_folder;
    library_folder = copy;
    pthread_mutex_unlock(&lock);
    dm_free(old);
    return DM_OK;
}

const char *
dm_backend_default(const char *device_type)
{
    if (strcmp(device_type, "cpu") == 0) {
        return "gloo";
    }
    if (strcmp(device_type, "cuda") == 0) {
        return "nccl";
    }
    return NULL;
}
