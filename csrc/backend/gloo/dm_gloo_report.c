/* Reports through the store: see dm_gloo_report.h. */
#include "backend/gloo/dm_gloo_report.h"

#include <stdio.h>
#include <string.h>

#include "store/dm_store.h"

enum { KEY_SIZE = DM_STORE_KEY_MAX };

static dm_wait
briefly(void)
{
    dm_wait wait = {dm_clock_deadline(DM_GLOO_REPORT_NS), NULL, NULL};
    return wait;
}

void
dm_gloo_report_put(dm_store *store, const char *name, int32_t rank,
                   const dm_gloo_report *report)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof(key), "%s/waits/%d", name, rank);
    dm_wait wait = briefly();
    dm_store_set(store, key, report, sizeof(*report), &wait, NULL);
}

bool
dm_gloo_report_get(dm_store *store, const char *name, int32_t rank,
                   dm_gloo_report *report)
{
    char text[KEY_SIZE];
    snprintf(text, sizeof(text), "%s/waits/%d", name, rank);
    const char *key = text;
    dm_wait wait = briefly();
    bool there = false;
    dm_bytes value = {NULL, 0};
    if (dm_store_check(store, &key, 1, &wait, &there, NULL) != DM_OK || !there ||
        dm_store_get(store, key, &wait, &value, NULL) != DM_OK) {
        return false;
    }
    bool whole = value.size == sizeof(*report);
    if (whole) {
        memcpy(report, value.data, sizeof(*report));
        report->text[DM_GLOO_REPORT_TEXT_SIZE - 1] = '\0';
    }
    dm_bytes_free(&value);
    return whole;
}

const char *
dm_gloo_broken_key(const char *name, char *text, size_t size)
{
    snprintf(text, size, "%s/broken", name);
    return text;
}

dm_gloo_cause
dm_gloo_last_words(dm_store *store, const char *name, const dm_gloo_cause *cause)
{
    char key[KEY_SIZE];
    dm_gloo_broken_key(name, key, sizeof(key));
    dm_wait wait = briefly();
    dm_bytes value = {NULL, 0};
    dm_gloo_cause found = {DM_OK, {0}};
    if (dm_store_compare_set(store, key, "", 0, cause, sizeof(*cause), &wait, &value,
                             NULL) == DM_OK) {
        if (value.size == sizeof(found)) {
            memcpy(&found, value.data, sizeof(found));
            found.text[sizeof(found.text) - 1] = '\0';
        }
        dm_bytes_free(&value);
    }
    return found;
}
