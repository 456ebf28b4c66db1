/* A store in a folder, one file for each key: what several processes of a test share.
 *
 * Holds what a backend needs to meet (set, get, check, compare_set against absence); a
 * wait polls the folder. Failures of the file system end the test.
 */
#ifndef FOLDER_STORE_H
#define FOLDER_STORE_H

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "dm_test.h"
#include "store/dm_store.h"

typedef struct folder_store {
    dm_store head;
    char path[256];
} folder_store;

static const char *
file_of(dm_store *store, const char *key, char *text, size_t size)
{
    int n = snprintf(text, size, "%s/", ((folder_store *)store)->path);
    for (const char *c = key; *c != '\0' && (size_t)n + 1 < size; c++) {
        text[n++] = *c == '/' ? '!' : *c;
    }
    text[n] = '\0';
    return text;
}

/* Writes beside, then moves or links into place: a reader sees all or nothing. */
static bool
put(dm_store *store, const char *key, const void *data, size_t size, bool only_new)
{
    char path[512], draft[560];
    file_of(store, key, path, sizeof(path));
    snprintf(draft, sizeof(draft), "%s.%d.draft", path, getpid());
    int fd = open(draft, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK_INT(write(fd, data, size), size);
    close(fd);
    bool done = only_new ? link(draft, path) == 0 : rename(draft, path) == 0;
    if (only_new) {
        unlink(draft);
    }
    return done;
}

static bool
read_now(dm_store *store, const char *key, dm_bytes *value)
{
    char path[512];
    int fd = open(file_of(store, key, path, sizeof(path)), O_RDONLY);
    if (fd < 0) {
        return false;
    }
    value->size = (size_t)lseek(fd, 0, SEEK_END);
    value->data = dm_malloc_array(value->size + 1, 1);
    CHECK_INT(pread(fd, value->data, value->size, 0), value->size);
    value->data[value->size] = '\0';
    close(fd);
    return true;
}

static dm_status
folder_set(dm_store *store, const char *key, const void *data, size_t size,
           const dm_wait *wait, dm_error *err)
{
    (void)wait;
    (void)err;
    CHECK(put(store, key, data, size, false));
    return DM_OK;
}

static dm_status
folder_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
           dm_error *err)
{
    while (!read_now(store, key, value)) {
        DM_TRY(dm_wait_poll(wait, err));
        usleep(1000);
    }
    return DM_OK;
}

static dm_status
folder_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
             bool *ready, dm_error *err)
{
    (void)wait;
    (void)err;
    *ready = true;
    for (size_t i = 0; i < n; i++) {
        char path[512];
        *ready =
            *ready && access(file_of(store, keys[i], path, sizeof(path)), F_OK) == 0;
    }
    return DM_OK;
}

static dm_status
folder_compare_set(dm_store *store, const char *key, const void *expected,
                   size_t expected_size, const void *desired, size_t desired_size,
                   const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    (void)expected;
    CHECK_INT(expected_size, 0);
    put(store, key, desired, desired_size, true);
    return folder_get(store, key, wait, value, err);
}

static void
folder_free(dm_store *store)
{
    dm_free(store);
}

static const dm_store_ops folder_ops = {
    .kind = "folder",
    .set = folder_set,
    .get = folder_get,
    .check = folder_check,
    .compare_set = folder_compare_set,
    .free = folder_free,
};

static dm_store *
folder_new(const char *path)
{
    folder_store *store = dm_calloc(1, sizeof(*store));
    dm_store_init(&store->head, &folder_ops);
    snprintf(store->path, sizeof(store->path), "%s", path);
    return &store->head;
}

static inline void
folder_remove(const char *folder)
{
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries != NULL && (e = readdir(entries)) != NULL;) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        unlink(path);
    }
    closedir(entries);
    rmdir(folder);
}

#endif
