/* Meeting: see dm_shm_meet.h. */
#include "backend/shm/dm_shm_meet.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "backend/shm/dm_shm_peers.h"
#include "base/dm_alloc.h"
#include "store/dm_store.h"

enum {
    CARD_MAGIC = 0x31736d64, /* "dms1" */
    HOST_SIZE = 160,
    SOCKET_SIZE = 32,  /* hexadecimal digits of a random number */
    MISSING_NAMED = 8, /* ranks named in a time-out */
    ENDING_MS = 200,   /* between a process's last breath and its end */
};

/* How often a member that waits looks for word of another that gave up. */
#define LOOK_INTERVAL_NS (250 * DM_NS_PER_MS)

typedef enum wish { WISH_ANY, WISH_SHM, WISH_TCP } wish;

typedef struct card {
    uint32_t magic;
    uint32_t wish;
    int32_t pid;
    uint32_t uid;
    char host[HOST_SIZE]; /* equal on members that can share memory */
    char
        socket[SOCKET_SIZE]; /* group rank 0's, without NUL; zero where there is none */
} card;

/* What travels over the socket, besides the descriptor. */
typedef struct hello {
    uint32_t magic;
    int32_t rank; /* the sender's group rank */
} hello;

/* --- who and where ------------------------------------------------------------------- */

static unsigned long long
namespace_of(const char *path)
{
    struct stat st = {0};
    return stat(path, &st) == 0 ? (unsigned long long)st.st_ino : 0;
}

/* Processes share memory, signals and abstract sockets if they run on the same boot of
 * the same kernel and in the same ipc, pid and net namespaces. */
static void
identify_host(char host[HOST_SIZE])
{
    const char *asked = getenv("DEVICEMESH_HOST_ID");
    if (asked != NULL && asked[0] != '\0') {
        snprintf(host, HOST_SIZE, "%s", asked);
        return;
    }
    char boot[40] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        size_t n = fread(boot, 1, 36, file);
        boot[n] = '\0';
        fclose(file);
    }
    snprintf(host, HOST_SIZE, "%s ipc %llu pid %llu net %llu", boot,
             namespace_of("/proc/self/ns/ipc"), namespace_of("/proc/self/ns/pid"),
             namespace_of("/proc/self/ns/net"));
}

static dm_status
read_wish(wish *w, dm_error *err)
{
    const char *text = getenv("DEVICEMESH_TRANSPORT");
    if (text == NULL || text[0] == '\0' || strcmp(text, "auto") == 0) {
        *w = WISH_ANY;
    }
    else if (strcmp(text, "shm") == 0) {
        *w = WISH_SHM;
    }
    else if (strcmp(text, "tcp") == 0) {
        *w = WISH_TCP;
    }
    else {
        return dm_error_set(err, DM_ERR_VALUE,
                            "DEVICEMESH_TRANSPORT must be 'shm', 'tcp' or 'auto', got "
                            "'%.64s'",
                            text);
    }
    return DM_OK;
}

/* --- cards through the store --------------------------------------------------------- */

static void
make_key(const dm_comm *comm, int32_t rank, char *key, size_t size)
{
    snprintf(key, size, "%s/card/%d", comm->name, (int)rank);
}

/* Keys of all members in one allocation: pointers first, texts behind. */
static const char **
make_keys(const dm_comm *comm)
{
    size_t n = (size_t)comm->size;
    size_t length = strlen(comm->name) + 24;
    const char **keys = dm_malloc_array(n, sizeof(char *) + length);
    if (keys == NULL) {
        return NULL;
    }
    char *text = (char *)(keys + n);
    for (int32_t i = 0; i < comm->size; i++, text += length) {
        make_key(comm, i, text, length);
        keys[i] = text;
    }
    return keys;
}

/* Rewrites a time-out's text: which ranks are missing. */
static void
name_missing(const dm_comm *comm, const char *const *keys, dm_error *err)
{
    if (err == NULL) {
        return;
    }
    dm_wait wait = {dm_clock_deadline(DM_NS_PER_S), NULL, NULL};
    char text[512];
    size_t used = 0;
    int32_t missing = 0;
    for (int32_t i = 0; i < comm->size; i++) {
        bool ready = false;
        if (dm_store_check(comm->store, &keys[i], 1, &wait, &ready, NULL) != DM_OK) {
            return;
        }
        if (!ready && missing++ < MISSING_NAMED) {
            int n = snprintf(text + used, sizeof(text) - used, "%s%d (group rank %d)",
                             used > 0 ? ", " : "", (int)comm->ranks[i], (int)i);
            used += n > 0 ? (size_t)n : 0;
        }
    }
    if (missing == 0) {
        return;
    }
    char more[32] = "";
    if (missing > MISSING_NAMED) {
        snprintf(more, sizeof(more), " and %d more", (int)missing - MISSING_NAMED);
    }
    dm_error_set(err, err->status,
                 "timed out waiting for rank%s %s%s to join the group",
                 missing > 1 ? "s" : "", text, more);
}

/* Reads all values, however long that takes. A look at the caller's poll function, which
 * also looks for members that gave up, comes between requests. */
static dm_status
read_all(const dm_comm *comm, const char *const *keys, dm_bytes *values,
         const dm_wait *wait, dm_error *err)
{
    for (;;) {
        dm_wait part = *wait;
        int64_t soon = dm_clock_deadline(LOOK_INTERVAL_NS);
        part.deadline = soon < wait->deadline ? soon : wait->deadline;
        dm_status status = dm_store_multi_get(comm->store, keys, (size_t)comm->size,
                                              &part, values, err);
        if (status != DM_ERR_TIMEOUT || part.deadline == wait->deadline) {
            return status;
        }
    }
}

/* Publishes my card and fills `cards` with everybody's. */
static dm_status
exchange(const dm_comm *comm, const card *mine, card *cards, const dm_wait *wait,
         dm_error *err)
{
    const size_t n = (size_t)comm->size;
    dm_status status = DM_ERR_NO_MEMORY;
    size_t got = 0;
    dm_bytes *values = dm_calloc(n, sizeof(*values));
    const char **keys = make_keys(comm);
    if (values == NULL || keys == NULL) {
        dm_error_set_no_memory(err, "a group's cards");
        goto free_all;
    }
    DM_TRY_GOTO(
        status,
        dm_store_set(comm->store, keys[comm->rank], mine, sizeof(*mine), wait, err),
        free_all);
    status = read_all(comm, keys, values, wait, err);
    if (status == DM_ERR_TIMEOUT) {
        name_missing(comm, keys, err);
    }
    if (status != DM_OK) {
        goto free_all;
    }
    got = n;
    for (int32_t i = 0; i < comm->size; i++) {
        if (values[i].size == sizeof(card)) {
            memcpy(&cards[i], values[i].data, sizeof(card));
        }
        if (values[i].size != sizeof(card) || cards[i].magic != CARD_MAGIC) {
            status =
                dm_error_set(err, DM_ERR_PROTOCOL,
                             "rank %d (group rank %d) has published %zu bytes that "
                             "are no card: does it run another version?",
                             (int)comm->ranks[i], (int)i, values[i].size);
            break;
        }
        cards[i].host[HOST_SIZE - 1] = '\0';
    }

free_all:
    for (size_t i = 0; i < got; i++) {
        dm_bytes_free(&values[i]);
    }
    dm_free(keys);
    dm_free(values);
    return status;
}

/* --- members that give up ---------------------------------------------------------- */

/* How a member waits while it meets the others: looks, now and then, whether one of them
 * has left word that it will not come. */
typedef struct meeting {
    dm_wait wait;
    const dm_wait *outer;
    const dm_comm *comm;
    int64_t next_look;
} meeting;

static void
make_broken_key(const dm_comm *comm, char *key, size_t size)
{
    snprintf(key, size, "%s/card/broken", comm->name);
}

static dm_status
poll_meeting(void *arg, dm_error *err)
{
    meeting *m = arg;
    if (m->outer->poll != NULL) {
        DM_TRY(m->outer->poll(m->outer->arg, err));
    }
    int64_t now = dm_clock_now();
    if (now < m->next_look) {
        return DM_OK;
    }
    m->next_look = now + LOOK_INTERVAL_NS;

    char text[DM_STORE_KEY_MAX];
    make_broken_key(m->comm, text, sizeof(text));
    const char *key = text;
    dm_wait briefly = {dm_clock_deadline(DM_NS_PER_S), NULL, NULL};
    bool there = false;
    dm_bytes why = {NULL, 0};
    if (dm_store_check(m->comm->store, &key, 1, &briefly, &there, NULL) != DM_OK ||
        !there || dm_store_get(m->comm->store, key, &briefly, &why, NULL) != DM_OK) {
        return DM_OK;
    }
    dm_status status = dm_error_set(err, DM_ERR_PEER, "%s", why.data);
    dm_bytes_free(&why);
    return status;
}

/* Leaves word for those who still wait for me. */
static void
say_broken(const dm_comm *comm, dm_status status, const dm_error *err)
{
    if (status == DM_ERR_PEER || err == NULL) {
        return; /* they see what I saw */
    }
    char key[DM_STORE_KEY_MAX];
    char text[512];
    make_broken_key(comm, key, sizeof(key));
    int n =
        snprintf(text, sizeof(text), "rank %d gave up while the members met: %.400s",
                 (int)comm->ranks[comm->rank], err->text);
    dm_wait briefly = {dm_clock_deadline(DM_NS_PER_S), NULL, NULL};
    dm_store_set(comm->store, key, text, (size_t)n, &briefly, NULL);
}

/* --- the decision ---------------------------------------------------------------------- */

/* What the cards amount to; all members come to the same. */
static dm_status
decide(const dm_comm *comm, const card *cards, bool *together, dm_error *err)
{
    int32_t for_shm = -1;
    int32_t for_tcp = -1;
    int32_t apart = -1;
    for (int32_t i = 0; i < comm->size; i++) {
        for_shm = for_shm < 0 && cards[i].wish == WISH_SHM ? i : for_shm;
        for_tcp = for_tcp < 0 && cards[i].wish == WISH_TCP ? i : for_tcp;
        bool same =
            strcmp(cards[i].host, cards[0].host) == 0 && cards[i].uid == cards[0].uid;
        apart = apart < 0 && !same ? i : apart;
    }
    if (for_shm >= 0 && for_tcp >= 0) {
        return dm_error_set(
            err, DM_ERR_MISMATCH,
            "DEVICEMESH_TRANSPORT is 'shm' on rank %d and 'tcp' on rank "
            "%d",
            (int)comm->ranks[for_shm], (int)comm->ranks[for_tcp]);
    }
    bool possible =
        apart < 0 && cards[0].socket[0] != '\0' && comm->size <= DM_SHM_MEMBERS_MAX;
    if (for_shm >= 0 && apart >= 0) {
        return dm_error_set(err, DM_ERR_CONNECTION,
                            "DEVICEMESH_TRANSPORT is 'shm', but ranks %d and %d do not "
                            "share a host and a user ('%s' and '%s')",
                            (int)comm->ranks[0], (int)comm->ranks[apart], cards[0].host,
                            cards[apart].host);
    }
    if (for_shm >= 0 && !possible) {
        return dm_error_set(err, DM_ERR_CONNECTION,
                            "DEVICEMESH_TRANSPORT is 'shm', but rank %d could not make "
                            "shared memory for %d members",
                            (int)comm->ranks[0], (int)comm->size);
    }
    *together = possible && for_tcp < 0;
    return DM_OK;
}

/* --- the socket ------------------------------------------------------------------------- */

static socklen_t
abstract_address(const char name[SOCKET_SIZE], struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1,
                     "devicemesh-%.*s", SOCKET_SIZE, name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int
new_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* A listening socket under a random name, -1 when there can be none. */
static int
open_listener(int32_t members, char name[SOCKET_SIZE])
{
    unsigned char random[SOCKET_SIZE / 2];
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        return -1;
    }
    for (size_t i = 0; i < sizeof(random); i++) {
        name[2 * i] = "0123456789abcdef"[random[i] >> 4];
        name[2 * i + 1] = "0123456789abcdef"[random[i] & 15];
    }
    struct sockaddr_un address;
    socklen_t length = abstract_address(name, &address);
    int fd = new_socket();
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&address, length) < 0 ||
                    listen(fd, members) < 0)) {
        close(fd);
        fd = -1;
    }
    if (fd < 0) {
        name[0] = '\0';
    }
    return fd;
}

/* Whether to go on waiting. */
static dm_status
still_wanted(const dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    if (atomic_load(&comm->aborted)) {
        return dm_error_set(err, DM_ERR_ABORTED, "the group was aborted");
    }
    return dm_wait_poll(wait, err);
}

static dm_status
say_exited(dm_comm *comm, int32_t member, int32_t pid, dm_error *err)
{
    comm->parting = dm_shm_record(DM_SHM_DIED, member, member);
    return dm_error_set(err, DM_ERR_PEER, "rank %d (pid %d) exited",
                        (int)comm->ranks[member], (int)pid);
}

/* Whether the process at the other end has our user and that pid. */
static bool
is_who_it_says(int fd, int32_t pid)
{
    struct ucred peer = {0};
    socklen_t size = sizeof(peer);
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           peer.uid == geteuid() && peer.pid == pid;
}

static bool
pass_descriptor(int socket, int fd)
{
    hello h = {CARD_MAGIC, 0};
    struct iovec data = {&h, sizeof(h)};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.space = {0}};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof(control.space)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(h);
}

/* The descriptor in the next message, -1 when there is none in it. */
static int
receive_descriptor(int socket)
{
    hello h = {0};
    struct iovec data = {&h, sizeof(h)};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.space = {0}};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof(control.space)};
    ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = n >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (c == NULL || c->cmsg_type != SCM_RIGHTS ||
        c->cmsg_len != CMSG_LEN(sizeof(int))) {
        return -1;
    }
    int fd;
    memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    if (n != (ssize_t)sizeof(h) || h.magic != CARD_MAGIC) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Group rank 0: reads one visitor's hello and passes the segment to it. A visitor that
 * is not who it says, or goes away, is ignored. */
static dm_status
serve_one(const dm_comm *comm, int visitor, const card *cards, bool *served,
          const dm_wait *wait, dm_error *err)
{
    struct pollfd readable = {.fd = visitor, .events = POLLIN};
    do {
        DM_TRY(still_wanted(comm, wait, err));
    } while (poll(&readable, 1, dm_wait_slice_ms(wait)) <= 0);
    hello h = {0};
    if (recv(visitor, &h, sizeof(h), 0) == (ssize_t)sizeof(h) &&
        h.magic == CARD_MAGIC && h.rank > 0 && h.rank < comm->size &&
        is_who_it_says(visitor, cards[h.rank].pid) &&
        pass_descriptor(visitor, comm->segment->fd)) {
        served[h.rank] = true;
    }
    return DM_OK;
}

/* Group rank 0: passes the segment to everybody else. */
static dm_status
serve(dm_comm *comm, int listener, const card *cards, const dm_wait *wait,
      dm_error *err)
{
    bool served[DM_SHM_MEMBERS_MAX] = {false};
    for (;;) {
        int32_t missing = -1;
        for (int32_t i = comm->size - 1; i > 0; i--) {
            missing = served[i] ? missing : i;
        }
        if (missing < 0) {
            return DM_OK;
        }
        dm_status status = still_wanted(comm, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            comm->parting = dm_shm_record(DM_SHM_TIMED_OUT, comm->rank, missing);
            return dm_error_set(err, status,
                                "timed out waiting for rank %d (pid %d) to join the "
                                "group",
                                (int)comm->ranks[missing], (int)cards[missing].pid);
        }
        DM_TRY(status);
        struct pollfd readable = {.fd = listener, .events = POLLIN};
        if (poll(&readable, 1, dm_wait_slice_ms(wait)) <= 0) {
            for (int32_t i = 1; i < comm->size; i++) {
                if (!served[i] && dm_shm_process_ended(cards[i].pid, 0)) {
                    return say_exited(comm, i, cards[i].pid, err);
                }
            }
            continue;
        }
        int visitor = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (visitor >= 0) {
            status = serve_one(comm, visitor, cards, served, wait, err);
            close(visitor);
            DM_TRY(status);
        }
    }
}

/* Another rank: fetches the segment from group rank 0. */
static dm_status
fetch(dm_comm *comm, const card *cards, dm_shm_segment **segment, const dm_wait *wait,
      dm_error *err)
{
    struct sockaddr_un address;
    socklen_t length = abstract_address(cards[0].socket, &address);
    dm_status status;
    int fd = -1;
    int host = new_socket();
    if (host < 0) {
        return dm_error_set_errno(err, errno, "cannot open a unix socket");
    }
    while (connect(host, (struct sockaddr *)&address, length) < 0) {
        if (errno != EAGAIN && errno != EINTR) {
            if (dm_shm_process_ended(cards[0].pid, ENDING_MS)) {
                status = say_exited(comm, 0, cards[0].pid, err);
            }
            else {
                status = dm_error_set_native(
                    err, DM_ERR_PEER, errno,
                    "rank %d (pid %d) gave up or cannot be reached while the members "
                    "met (errno %d)",
                    (int)comm->ranks[0], (int)cards[0].pid, errno);
            }
            goto close_host;
        }
        DM_TRY_GOTO(status, still_wanted(comm, wait, err), close_host);
        poll(NULL, 0, 1); /* more members come at once than the queue holds */
    }
    if (!is_who_it_says(host, cards[0].pid)) {
        status = dm_error_set(err, DM_ERR_PROTOCOL,
                              "the process behind the socket of rank %d is not pid %d "
                              "of this user",
                              (int)comm->ranks[0], (int)cards[0].pid);
        goto close_host;
    }
    hello h = {CARD_MAGIC, comm->rank};
    struct pollfd readable = {.fd = host, .events = POLLIN};
    if (send(host, &h, sizeof(h), MSG_NOSIGNAL) == (ssize_t)sizeof(h)) {
        do {
            DM_TRY_GOTO(status, still_wanted(comm, wait, err), close_host);
        } while (poll(&readable, 1, dm_wait_slice_ms(wait)) <= 0);
        fd = receive_descriptor(host);
    }
    if (fd < 0) {
        bool ended = dm_shm_process_ended(cards[0].pid, ENDING_MS);
        status = ended ? say_exited(comm, 0, cards[0].pid, err)
                       : dm_error_set(err, DM_ERR_PEER,
                                      "rank %d (pid %d) gave up while the members met",
                                      (int)comm->ranks[0], (int)cards[0].pid);
        goto close_host;
    }
    status = dm_shm_segment_open(fd, comm->size, segment, err);

close_host:
    close(host);
    return status;
}

/* --- joining ------------------------------------------------------------------------------ */

static void
publish_cpus(dm_shm_member *self)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    for (size_t i = 0; i < DM_SHM_CPU_WORDS; i++) {
        uint64_t word = 0;
        for (size_t bit = 0; bit < 64; bit++) {
            bool mine = CPU_ISSET(i * 64 + bit, &set);
            word |= (uint64_t)mine << bit;
        }
        atomic_store_explicit(&self->cpus[i], word, memory_order_relaxed);
    }
}

/* Pausing helps where every member can have a processor to itself; where they share,
 * whoever waits is in the way of whom it waits for. */
static int
choose_pauses(const dm_comm *comm)
{
    int cpus = 0;
    for (size_t i = 0; i < DM_SHM_CPU_WORDS; i++) {
        uint64_t word = 0;
        for (int32_t j = 0; j < comm->size; j++) {
            word |=
                atomic_load_explicit(&comm->members[j].cpus[i], memory_order_relaxed);
        }
        cpus += __builtin_popcountll(word);
    }
    return cpus >= comm->size ? DM_SHM_PAUSES : 0;
}

dm_status
dm_shm_attach(dm_comm *comm, dm_shm_segment *segment, const int32_t *pids,
              dm_error *err)
{
    comm->segment = segment;
    comm->head = dm_shm_segment_head(segment);
    comm->members = dm_shm_segment_members(segment);
    comm->self = &comm->members[comm->rank];
    DM_TRY(dm_shm_segment_lock(segment, comm->rank, err));
    for (int32_t i = 0; i < comm->size; i++) {
        /* All write the same; needed from the beginning, to see who dies before it
         * joins. */
        int32_t pid = pids != NULL ? pids[i] : (int32_t)getpid();
        atomic_store_explicit(&comm->members[i].pid, pid, memory_order_relaxed);
    }
    publish_cpus(comm->self);
    /* Sequentially consistent, both: either comm_abort sees that there is a segment, or
     * this thread sees, in its next wait, that it was aborted. */
    atomic_store(&comm->attached, true);
    uint64_t outside = 0;
    atomic_compare_exchange_strong(&comm->self->state, &outside, DM_SHM_JOINED);
    dm_shm_wake(comm);
    return DM_OK;
}

dm_status
dm_shm_await_joined(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    const dm_shm_goal goal = {
        .first_word = &comm->members[0].state,
        .stride = sizeof(dm_shm_member),
        .first = 0,
        .end = comm->size,
        .want = DM_SHM_JOINED,
    };
    DM_TRY(dm_shm_wait(comm, &goal, wait, err));
    comm->pauses = choose_pauses(comm);
    return DM_OK;
}

/* The members are together: all get the segment. `made` is group rank 0's. */
static dm_status
join(dm_comm *comm, const card *cards, dm_shm_segment **made, int listener,
     const dm_wait *wait, dm_error *err)
{
    int32_t pids[DM_SHM_MEMBERS_MAX];
    for (int32_t i = 0; i < comm->size; i++) {
        pids[i] = cards[i].pid;
    }
    dm_shm_segment *segment = *made;
    if (comm->rank != 0) {
        DM_TRY(fetch(comm, cards, &segment, wait, err));
    }
    *made = NULL;
    DM_TRY(dm_shm_attach(comm, segment, pids, err));
    if (comm->rank == 0) {
        DM_TRY(serve(comm, listener, cards, wait, err));
    }
    return dm_shm_await_joined(comm, wait, err);
}

/* The meeting proper; `wait` looks for members that gave up. */
static dm_status
meet(dm_comm *comm, wish w, const dm_wait *wait, bool *together, dm_error *err)
{
    card mine = {.magic = CARD_MAGIC,
                 .wish = (uint32_t)w,
                 .pid = (int32_t)getpid(),
                 .uid = (uint32_t)geteuid()};
    identify_host(mine.host);

    int listener = -1;
    dm_shm_segment *made = NULL;
    if (comm->rank == 0 && w != WISH_TCP && comm->size <= DM_SHM_MEMBERS_MAX) {
        /* Where it cannot be made, the members talk over tcp. */
        if (dm_shm_segment_new(comm->size, &made, NULL) == DM_OK) {
            listener = open_listener(comm->size, mine.socket);
        }
    }
    dm_status status;
    bool same = false;
    card *cards = dm_calloc((size_t)comm->size, sizeof(*cards));
    if (cards == NULL) {
        status = dm_error_set_no_memory(err, "a group's cards");
        goto release_all;
    }
    DM_TRY_GOTO(status, exchange(comm, &mine, cards, wait, err), release_all);
    DM_TRY_GOTO(status, decide(comm, cards, &same, err), release_all);
    if (same) {
        DM_TRY_GOTO(status, join(comm, cards, &made, listener, wait, err), release_all);
    }
    *together = same;

release_all:
    dm_free(cards);
    dm_shm_segment_release(made, false);
    if (listener >= 0) {
        close(listener);
    }
    return status;
}

dm_status
dm_shm_meet(dm_comm *comm, const dm_wait *wait, bool *together, dm_error *err)
{
    dm_error own;
    err = err != NULL ? err : &own; /* the others may want to know */
    wish w = WISH_ANY;
    meeting m = {.outer = wait, .comm = comm};
    m.wait = (dm_wait){wait->deadline, poll_meeting, &m};
    m.next_look = dm_clock_now() + LOOK_INTERVAL_NS;
    dm_status status = read_wish(&w, err);
    if (status == DM_OK) {
        status = meet(comm, w, &m.wait, together, err);
    }
    if (status != DM_OK) {
        say_broken(comm, status, err);
    }
    return status;
}
