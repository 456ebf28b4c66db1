/* Meeting through the store: see dm_gloo_meet.h.
 *
 * A blob is a head and then, for each peer, its group rank and an address of
 * address_size bytes. Byte order is the host's: gloo itself does not cross byte
 * orders, and the head's magic shows it.
 */
#include "backend/gloo/dm_gloo_meet.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "backend/gloo/dm_gloo_report.h"
#include "base/dm_alloc.h"
#include "store/dm_store.h"

enum {
    MAGIC = 0x31676d64, /* "dmg1" */
    NETIF_SIZE = 96,
    HOST_SIZE = 64,
    MISSING_NAMED = 8, /* ranks named in a time-out */
};

struct head {
    uint32_t magic;
    uint32_t address_size;
    uint32_t count;
    int32_t loopback;
    char host[HOST_SIZE]; /* which host and network namespace */
    char netif[NETIF_SIZE];
};

/* What loopback addresses are good within: one boot of one kernel, one network
 * namespace. */
static void
identify_host(char host[HOST_SIZE])
{
    char boot[40] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        size_t n = fread(boot, 1, 36, file);
        boot[n] = '\0';
        fclose(file);
    }
    struct stat ns = {0};
    unsigned long inode = 0;
    if (stat("/proc/self/ns/net", &ns) == 0) {
        inode = (unsigned long)ns.st_ino;
    }
    snprintf(host, HOST_SIZE, "%s/%lu", boot, inode);
}

static void
make_key(const dm_gloo_meeting *m, int32_t rank, char *key, size_t size)
{
    snprintf(key, size, "%s/addr/%s/%d", m->name, m->stage, rank);
}

static size_t
entry_size(const dm_gloo_meeting *m)
{
    return sizeof(int32_t) + m->address_size;
}

static dm_status
publish(const dm_gloo_meeting *m, const struct head *head, const char *mine,
        const dm_wait *wait, dm_error *err)
{
    size_t size = sizeof(*head) + m->peer_count * entry_size(m);
    char *blob = dm_malloc_array(size, 1);
    if (blob == NULL) {
        return dm_error_set_no_memory(err, "a group's addresses");
    }
    memcpy(blob, head, sizeof(*head));
    char *at = blob + sizeof(*head);
    for (size_t i = 0; i < m->peer_count; i++) {
        memcpy(at, &m->peers[i], sizeof(int32_t));
        memcpy(at + sizeof(int32_t), mine + i * m->address_size, m->address_size);
        at += entry_size(m);
    }

    char key[DM_STORE_KEY_MAX];
    make_key(m, m->rank, key, sizeof(key));
    dm_status status = dm_store_set(m->store, key, blob, size, wait, err);
    dm_free(blob);
    return status;
}

/* Finds the address that `peer` has published for me. */
static dm_status
read_blob(const dm_gloo_meeting *m, const struct head *head, int32_t peer,
          const dm_bytes *blob, char *address, dm_error *err)
{
    struct head theirs;
    size_t need = sizeof(theirs);
    if (blob->size >= need) {
        memcpy(&theirs, blob->data, sizeof(theirs));
        theirs.host[HOST_SIZE - 1] = '\0';
        theirs.netif[NETIF_SIZE - 1] = '\0';
    }
    if (blob->size < need || theirs.magic != MAGIC ||
        theirs.address_size != head->address_size ||
        (blob->size - need) / entry_size(m) < theirs.count) {
        return dm_error_set(err, DM_ERR_PROTOCOL,
                            "rank %d (group rank %d) has published %zu bytes that are "
                            "no addresses: does it run another version?",
                            m->ranks[peer], peer, blob->size);
    }
    if ((theirs.loopback || head->loopback) && strcmp(theirs.host, head->host) != 0) {
        const char *mine = head->loopback ? "this rank" : "it";
        return dm_error_set(
            err, DM_ERR_CONNECTION,
            "rank %d (group rank %d) is on another host and uses %s, this rank uses "
            "%s: %s can be reached on its own host only; set MASTER_ADDR to an "
            "address that all hosts reach, or DEVICEMESH_SOCKET_IFNAME",
            m->ranks[peer], peer, theirs.netif, head->netif, mine);
    }
    const char *at = blob->data + sizeof(theirs);
    for (uint32_t i = 0; i < theirs.count; i++, at += entry_size(m)) {
        int32_t rank;
        memcpy(&rank, at, sizeof(rank));
        if (rank == m->rank) {
            memcpy(address, at + sizeof(rank), m->address_size);
            return DM_OK;
        }
    }
    return dm_error_set(err, DM_ERR_PROTOCOL,
                        "rank %d (group rank %d) has published no address for rank %d: "
                        "does it have another list of members?",
                        m->ranks[peer], peer, m->ranks[m->rank]);
}

/* Rewrites a time-out's text: which ranks are missing. */
static void
name_missing(const dm_gloo_meeting *m, const char *const *keys, int64_t started,
             dm_error *err)
{
    if (err == NULL) {
        return;
    }
    dm_wait wait = {dm_clock_deadline(DM_NS_PER_S), NULL, NULL};
    char text[512];
    size_t used = 0;
    int named = 0;
    size_t missing = 0;
    for (size_t i = 0; i < m->peer_count; i++) {
        bool ready = false;
        if (dm_store_check(m->store, &keys[i], 1, &wait, &ready, NULL) != DM_OK) {
            return;
        }
        if (ready) {
            continue;
        }
        missing++;
        if (named < MISSING_NAMED) {
            int n = snprintf(text + used, sizeof(text) - used, "%s%d (group rank %d)",
                             named > 0 ? ", " : "", m->ranks[m->peers[i]], m->peers[i]);
            used += n > 0 ? (size_t)n : 0;
            named++;
        }
    }
    if (missing == 0) {
        return;
    }
    char more[32] = "";
    if (missing > (size_t)named) {
        snprintf(more, sizeof(more), " and %zu more", missing - (size_t)named);
    }
    double seconds = (double)(dm_clock_now() - started) / (double)DM_NS_PER_S;
    dm_error_set(err, err->status,
                 "timed out after %.1f s waiting for rank%s %s%s to join the group",
                 seconds, missing > 1 ? "s" : "", text, more);
}

/* Keys of all peers in one allocation: pointers first, texts behind. */
static const char **
make_keys(const dm_gloo_meeting *m)
{
    size_t length = strlen(m->name) + strlen(m->stage) + 24;
    const char **keys = dm_malloc_array(m->peer_count, sizeof(char *) + length);
    if (keys == NULL) {
        return NULL;
    }
    char *text = (char *)(keys + m->peer_count);
    for (size_t i = 0; i < m->peer_count; i++, text += length) {
        make_key(m, m->peers[i], text, length);
        keys[i] = text;
    }
    return keys;
}

/* Until all peers have published, or one has left word that it will not. */
static dm_status
wait_for_peers(const dm_gloo_meeting *m, const char *const *keys, const dm_wait *wait,
               dm_error *err)
{
    char text[DM_STORE_KEY_MAX];
    const char *broken = dm_gloo_broken_key(m->name, text, sizeof(text));
    return dm_store_wait_unless(m->store, keys, m->peer_count, &broken, 1, wait, err);
}

dm_status
dm_gloo_meet(const dm_gloo_meeting *meeting, const void *mine, void *theirs,
             const dm_wait *wait, dm_error *err)
{
    const dm_gloo_meeting *m = meeting;
    const int64_t started = dm_clock_now();
    struct head head = {
        .magic = MAGIC,
        .address_size = (uint32_t)m->address_size,
        .count = (uint32_t)m->peer_count,
        .loopback = m->loopback,
    };
    identify_host(head.host);
    snprintf(head.netif, sizeof(head.netif), "%s", m->netif);
    DM_TRY(publish(m, &head, mine, wait, err));

    dm_status status = DM_ERR_NO_MEMORY;
    size_t got = 0;
    dm_bytes *blobs = dm_calloc(m->peer_count, sizeof(*blobs));
    const char **keys = make_keys(m);
    if (blobs == NULL || keys == NULL) {
        dm_error_set_no_memory(err, "a group's addresses");
        goto free_all;
    }
    status = wait_for_peers(m, keys, wait, err);
    if (status == DM_OK) {
        status = dm_store_multi_get(m->store, keys, m->peer_count, wait, blobs, err);
    }
    if (status == DM_ERR_TIMEOUT) {
        name_missing(m, keys, started, err);
    }
    if (status != DM_OK) {
        goto free_all;
    }
    got = m->peer_count;
    for (size_t i = 0; i < m->peer_count && status == DM_OK; i++) {
        char *address = (char *)theirs + i * m->address_size;
        status = read_blob(m, &head, m->peers[i], &blobs[i], address, err);
    }

free_all:
    for (size_t i = 0; i < got; i++) {
        dm_bytes_free(&blobs[i]);
    }
    dm_free(keys);
    dm_free(blobs);
    return status;
}
