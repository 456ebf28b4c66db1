/* Tests of the tcp client and server together, on loopback.
 *
 * sources: base store
 * sanitize: address,undefined thread
 */
#include "store_calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/dm_net.h"
#include "store/dm_wire.h"

static dm_store_server *
new_server(const char *token)
{
    dm_store_server_config config = {"127.0.0.1", 0, token, -1};
    dm_store_server *server = NULL;
    CHECK_OK(dm_store_server_start(&config, &server, &err));
    CHECK(dm_store_server_port(server) != 0);
    return server;
}

static dm_store *
new_client(const dm_store_server *server, const char *token)
{
    dm_wait wait = within_ms(20000);
    dm_store *store = NULL;
    CHECK_OK(dm_store_tcp_new("127.0.0.1", dm_store_server_port(server), token, &wait,
                              &store, &err));
    return store;
}

/* Waits until the server has that many clients. */
static void
check_clients(dm_store_server *server, int n)
{
    int64_t deadline = dm_clock_deadline(20 * DM_NS_PER_S);
    while (dm_store_server_clients(server) != n) {
        CHECK(dm_clock_left(deadline) > 0);
        sched_yield();
    }
}

static void
bad_arguments(void)
{
    dm_store_server *server = NULL;
    dm_store_server_config config = {"127.0.0.1", 0, "", -1};
    CHECK_ERR(dm_store_server_start(&config, &server, &err), DM_ERR_VALUE);
    config = (dm_store_server_config){"", 0, NULL, -1};
    CHECK_ERR(dm_store_server_start(&config, &server, &err), DM_ERR_VALUE);
    config = (dm_store_server_config){"192.0.2.1", 0, NULL, -1};
    CHECK_ERR(dm_store_server_start(&config, &server, &err), DM_ERR_SYSTEM);
    CHECK_INT(err.native, EADDRNOTAVAIL);
    CHECK_CONTAINS(err.text, "192.0.2.1");
    config = (dm_store_server_config){NULL, 0, NULL, 0}; /* no socket */
    int fds[2];
    CHECK(pipe(fds) == 0);
    config.listen_fd = fds[0];
    CHECK_ERR(dm_store_server_start(&config, &server, &err), DM_ERR_VALUE);
    close(fds[0]);
    close(fds[1]);
    config.listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_ERR(dm_store_server_start(&config, &server, &err), DM_ERR_VALUE);
    CHECK(close(config.listen_fd) == 0); /* still ours */

    server = new_server(NULL);
    config =
        (dm_store_server_config){"127.0.0.1", dm_store_server_port(server), NULL, -1};
    dm_store_server *second = NULL;
    CHECK_ERR(dm_store_server_start(&config, &second, &err), DM_ERR_SYSTEM);
    CHECK_CONTAINS(err.text, "Address already in use");
    dm_store_server_stop(server);

    dm_store *store = NULL;
    dm_wait wait = within_ms(20);
    CHECK_ERR(dm_store_tcp_new("127.0.0.1", config.port, NULL, &wait, &store, &err),
              DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "127.0.0.1");
    CHECK_CONTAINS(err.text, "Connection refused");
    CHECK_ERR(dm_store_tcp_new("", 1, NULL, &wait, &store, &err), DM_ERR_VALUE);
    dm_store_server_stop(NULL);
}

static void
every_call(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    CHECK_STR(dm_store_kind(store), "tcp");
    CHECK_INT(dm_store_server_clients(server), 1);
    check_calls(store);
    check_queues(store);
    check_timeouts(store);
    check_barriers(store);

    dm_store *other = new_client(server, NULL);
    check_clients(server, 2);
    check_value(other, "p", "potato");
    dm_store_release(other);
    check_clients(server, 1);
    dm_store_close(store);
    check_clients(server, 0);
    dm_bytes value;
    CHECK_ERR(dm_store_get(store, "p", &forever, &value, &err), DM_ERR_CLOSED);
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
large_values(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    char *data = malloc(DM_STORE_VALUE_MAX);
    for (size_t i = 0; i < DM_STORE_VALUE_MAX; i++) {
        data[i] = (char)(i * 7);
    }
    CHECK_OK(dm_store_set(store, "big", data, DM_STORE_VALUE_MAX, &forever, &err));
    const char *keys[] = {"big", "big", "big", "big", "big", "big"};
    dm_bytes values[6];
    CHECK_OK(dm_store_multi_get(store, keys, 6, &forever, values, &err));
    for (int i = 0; i < 6; i++) {
        CHECK_INT(values[i].size, DM_STORE_VALUE_MAX);
        CHECK(memcmp(values[i].data, data, DM_STORE_VALUE_MAX) == 0);
    }
    /* More than one request holds. */
    const char *names[] = {"a", "b", "c", "d", "e", "f"};
    CHECK_OK(dm_store_multi_set(store, names, values, 6, &forever, &err));
    for (int i = 0; i < 6; i++) {
        dm_bytes_free(&values[i]);
        CHECK_OK(dm_store_get(store, names[i], &forever, &values[i], &err));
        CHECK_INT(values[i].size, DM_STORE_VALUE_MAX);
        dm_bytes_free(&values[i]);
    }
    CHECK_ERR(dm_store_append(store, "big", "x", 1, &forever, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "key 'big'");
    free(data);
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
many_keys(void)
{
    enum { N = 3000 };
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    char names[N][16];
    const char *keys[N];
    dm_bytes values[N];
    for (int i = 0; i < N; i++) {
        snprintf(names[i], sizeof(names[i]), "key/%d", i);
        keys[i] = names[i];
        values[i] = (dm_bytes){names[i], strlen(names[i])};
    }
    CHECK_OK(dm_store_multi_set(store, keys, values, N - 1, &forever, &err));
    dm_wait soon = within_ms(20);
    CHECK_ERR(dm_store_wait(store, keys, N, &soon, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "waiting for 'key/2999'");
    CHECK_ERR(dm_store_wait(store, keys + N - 2, 2, &soon, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "waiting for 'key/2999'");
    CHECK_OK(dm_store_set(store, keys[N - 1], "x", 1, &forever, &err));
    CHECK_OK(dm_store_multi_get(store, keys, N, &forever, values, &err));
    for (int i = 0; i < N; i++) {
        CHECK_STR(values[i].data, i < N - 1 ? keys[i] : "x");
        dm_bytes_free(&values[i]);
    }
    dm_bytes *list;
    size_t n;
    CHECK_OK(dm_store_list_keys(store, &forever, &list, &n, &err));
    CHECK_INT(n, N);
    while (n-- > 0) {
        dm_bytes_free(&list[n]);
    }
    dm_free(list);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* --- waiting ------------------------------------------------------------------------- */

static void
waits_do_not_block_others(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    worker workers[3];
    /* Unanswered when the first of them begins to wait. */
    CHECK_OK(dm_store_set(store, "before", "1", 1, &forever, &err));
    for (int i = 0; i < 3; i++) {
        start(&workers[i], store, "late", work_get);
    }
    /* A request of the same client passes the waiting ones. */
    CHECK_OK(dm_store_set(store, "late", "1", 1, &forever, &err));
    for (int i = 0; i < 3; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_STR(workers[i].err.text, "");
    }
    CHECK_INT(dm_store_server_clients(server), 1);

    start(&workers[0], store, "never", work_get);
    start(&workers[1], store, "never", work_unless);
    CHECK_OK(dm_store_set(store, "gone", "rank 3 is gone", 14, &forever, &err));
    pthread_join(workers[1].thread, NULL);
    CHECK_INT(workers[1].status, DM_ERR_PEER);
    CHECK_STR(workers[1].err.text, "rank 3 is gone");
    dm_store_close(store);
    pthread_join(workers[0].thread, NULL);
    CHECK_INT(workers[0].status, DM_ERR_CLOSED);
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
server_goes_away(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    worker waiting;
    CHECK_OK(dm_store_set(store, "sync", "", 0, &forever, &err));
    start(&waiting, store, "never", work_get);
    dm_store_server_stop(server);
    pthread_join(waiting.thread, NULL);
    CHECK_INT(waiting.status, DM_ERR_CONNECTION);
    CHECK_CONTAINS(waiting.err.text, "store at 127.0.0.1:");
    int64_t n;
    CHECK_ERR(dm_store_add(store, "n", 1, &forever, &n, &err), DM_ERR_CONNECTION);
    CHECK_ERR(dm_store_add(store, "n", 1, &forever, &n, &err), DM_ERR_CONNECTION);
    dm_store_release(store);
}

/* What one thread has set, every later call of it sees, whichever connection it takes. */
static void *
work_order(void *arg)
{
    worker *self = arg;
    self->status = DM_OK;
    for (int i = 0; i < 300 && self->status == DM_OK; i++) {
        char text[16];
        int size = snprintf(text, sizeof(text), "%d", i);
        dm_bytes value = {NULL, 0};
        self->status = dm_store_set(self->store, self->key, text, (size_t)size,
                                    &forever, &self->err);
        if (self->status == DM_OK) {
            self->status =
                dm_store_get(self->store, self->key, &forever, &value, &self->err);
        }
        if (self->status == DM_OK) {
            CHECK_STR(value.data, text);
        }
        dm_bytes_free(&value);
    }
    return NULL;
}

static void
program_order(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    worker workers[4];
    const char *keys[] = {"a", "b", "c", "d"};
    for (int i = 0; i < 4; i++) {
        start(&workers[i], store, keys[i], work_order);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_STR(workers[i].err.text, "");
    }
    dm_store_release(store);
    dm_store_server_stop(server);
}

static dm_status
poll_stops(void *arg, dm_error *record)
{
    int *left = arg;
    return --*left < 0 ? dm_error_set(record, DM_ERR_INTERRUPTED, "stop") : DM_OK;
}

static void
interrupted(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    dm_bytes value;
    for (int after = 0; after < 3; after++) {
        int left = after;
        dm_wait wait = {DM_FOREVER, poll_stops, &left};
        CHECK_ERR(dm_store_get(store, "never", &wait, &value, &err),
                  DM_ERR_INTERRUPTED);
        left = after;
        CHECK_ERR(dm_store_queue_pop(store, "q", true, &wait, &value, &err),
                  DM_ERR_INTERRUPTED);
        left = after;
        CHECK_ERR(dm_store_barrier(store, "b", 2, &wait, &err), DM_ERR_INTERRUPTED);
    }
    /* The connection is as good as before, and nothing of all that is left. */
    check_clients(server, 1);
    int64_t n;
    CHECK_OK(dm_store_num_keys(store, &forever, &n, &err));
    CHECK_INT(n, 0);
    CHECK_OK(dm_store_barrier(store, "b", 1, &forever, &err));
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* --- departures ------------------------------------------------------------------------ */

static void
wills(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    dm_store *leaver = new_client(server, NULL);
    dm_store *view;
    CHECK_OK(dm_store_prefix_new(leaver, "w", &view, &err));
    CHECK_OK(dm_store_will(view, "departed/3", "old", 3, &forever, &err));
    CHECK_OK(dm_store_will(view, "departed/3", "rank 3 is gone", 14, &forever, &err));
    CHECK_OK(dm_store_will(view, "other", "too", 3, &forever, &err));
    check_clients(server, 2);
    const char *never = "never", *departed = "w/departed/3";
    bool ready;
    CHECK_OK(dm_store_check(store, &departed, 1, &forever, &ready, &err));
    CHECK(!ready);
    dm_store_release(view);
    dm_store_release(leaver); /* without close */
    CHECK_ERR(dm_store_wait_unless(store, &never, 1, &departed, 1, &forever, &err),
              DM_ERR_PEER);
    CHECK_STR(err.text, "rank 3 is gone");
    check_value(store, "w/other", "too");

    leaver = new_client(server, NULL);
    CHECK_OK(dm_store_will(leaver, "polite", "no", 2, &forever, &err));
    dm_store_close(leaver);
    CHECK_ERR(dm_store_will(leaver, "polite", "no", 2, &forever, &err), DM_ERR_CLOSED);
    check_clients(server, 1);
    dm_store_release(leaver);
    leaver = new_client(server, NULL);
    CHECK_OK(dm_store_will(leaver, "impolite", "yes", 3, &forever, &err));
    dm_store_release(leaver);
    check_value(store, "impolite", "yes");
    const char *polite = "polite";
    CHECK_OK(dm_store_check(store, &polite, 1, &forever, &ready, &err));
    CHECK(!ready);
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
dead_process(void)
{
    dm_store_server *server = new_server(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dm_store *store = new_client(server, NULL);
        CHECK_OK(dm_store_will(store, "dead", "killed", 6, &forever, &err));
        CHECK_OK(dm_store_set(store, "ready", "", 0, &forever, &err));
        kill(getpid(), SIGKILL);
    }
    dm_store *store = new_client(server, NULL);
    const char *never = "never", *dead = "dead";
    CHECK_ERR(dm_store_wait_unless(store, &never, 1, &dead, 1, &forever, &err),
              DM_ERR_PEER);
    CHECK_STR(err.text, "killed");
    check_value(store, "ready", "");
    CHECK(waitpid(pid, NULL, 0) == pid);
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
forked_child(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    pid_t pid = fork();
    if (pid == 0) {
        int64_t n;
        CHECK_ERR(dm_store_add(store, "n", 1, &forever, &n, &err), DM_ERR_FORKED);
        dm_store_close(store);
        dm_store_release(store);
        dm_store_server_stop(server);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_INT(status, 0);
    int64_t n;
    CHECK_OK(dm_store_add(store, "n", 1, &forever, &n, &err));
    CHECK_INT(n, 1);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* --- tokens ------------------------------------------------------------------------------ */

static void
tokens(void)
{
    dm_store_server *server = new_server("secret");
    dm_store *store = new_client(server, "secret");
    check_calls(store);
    check_barriers(store); /* on further connections too */
    dm_store_release(store);
    dm_wait wait = within_ms(20000);
    const char *wrong[] = {NULL, "", "secreT", "secre", "secretsecret"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        CHECK_ERR(dm_store_tcp_new("127.0.0.1", dm_store_server_port(server), wrong[i],
                                   &wait, &store, &err),
                  DM_ERR_CONNECTION);
        CHECK_CONTAINS(err.text, "token");
    }
    check_clients(server, 0);
    dm_store_server_stop(server);

    server = new_server(NULL);
    store = new_client(server, "not asked for");
    check_calls(store);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* --- other clients ------------------------------------------------------------------------ */

static int
raw_client(const dm_store_server *server)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(dm_store_server_port(server)),
                                  .sin_addr = {htonl(INADDR_LOOPBACK)}};
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    return fd;
}

static void
raw_send(int fd, const void *data, size_t size)
{
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

/* The server closes the connection without another byte. */
static void
check_closed(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, 0);
    CHECK(n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
}

static const char validate[] = "\x00\xce\xf7\x85\x3c";

static void
bad_clients(void)
{
    dm_store_server *server = new_server("secret");
    int fd = raw_client(server);
    raw_send(fd, "\x00\xce\xf7\x85\x3d", 5); /* a wrong magic */
    check_closed(fd);
    fd = raw_client(server);
    raw_send(fd, "GET / HTTP/1.0\r\n\r\n", 18);
    check_closed(fd);
    fd = raw_client(server);
    raw_send(fd, "\x11", 1); /* a good request before the magic */
    check_closed(fd);
    fd = raw_client(server);
    raw_send(fd, validate, 5);
    raw_send(fd, "\x11", 1); /* before the token */
    check_closed(fd);
    dm_store_server_stop(server);

    server = new_server(NULL);
    fd = raw_client(server);
    raw_send(fd, validate, 5);
    raw_send(fd, "\x7f", 1); /* no such opcode */
    check_closed(fd);
    fd = raw_client(server);
    raw_send(fd, validate, 5);
    raw_send(fd, "\x03\xff\xff\xff\xff\xff\xff\xff\xff", 9); /* an endless key */
    check_closed(fd);

    /* Half a request, and silence: nobody else notices. */
    int half = raw_client(server);
    raw_send(half, validate, 5);
    raw_send(half, "\x01\x05\x00\x00\x00\x00\x00\x00\x00/a", 11);
    int silent = raw_client(server);
    dm_store *store = new_client(server, NULL);
    check_calls(store);
    check_clients(server, 2);
    close(half);
    close(silent);
    check_clients(server, 1);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* A client that asks for much and reads nothing does not make the server keep it all. */
static void
greedy_client(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    char *data = calloc(1, DM_STORE_VALUE_MAX);
    CHECK_OK(dm_store_set(store, "big", data, DM_STORE_VALUE_MAX, &forever, &err));
    CHECK_OK(
        dm_store_check(store, &(const char *){"big"}, 1, &forever, &(bool){0}, &err));
    int fd = raw_client(server);
    raw_send(fd, validate, 5);
    dm_wire_buffer out = {0};
    dm_wire_put_u8(&out, DM_WIRE_MULTI_GET);
    dm_wire_put_u64(&out, 2000);
    for (int i = 0; i < 2000; i++) {
        dm_wire_put_key(&out, "big");
    }
    raw_send(fd, out.data, out.size);
    check_calls(store);
    /* It gets them when it reads, one after the other. */
    size_t left = 10 * ((size_t)DM_STORE_VALUE_MAX + 8);
    while (left > 0) {
        ssize_t n =
            recv(fd, data, left < DM_STORE_VALUE_MAX ? left : DM_STORE_VALUE_MAX, 0);
        CHECK(n > 0);
        left -= (size_t)n;
    }
    close(fd);
    check_clients(server, 1);
    free(data);
    dm_wire_buffer_fini(&out);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* Requests in one packet are answered in order, also behind a wait. */
static void
pipelined_requests(void)
{
    dm_store_server *server = new_server(NULL);
    int fd = raw_client(server);
    dm_wire_buffer out = {0};
    dm_wire_put_raw(&out, validate, 5);
    dm_wire_put_u8(&out, DM_WIRE_PING);
    dm_wire_put_u32(&out, 4711);
    dm_wire_put_u8(&out, DM_WIRE_WAIT);
    dm_wire_put_keys(&out, &(const char *){"late"}, 1);
    dm_wire_put_u8(&out, DM_WIRE_ADD);
    dm_wire_put_key(&out, "n");
    dm_wire_put_u64(&out, 5);
    raw_send(fd, out.data, out.size);
    char answers[16];
    CHECK(recv(fd, answers, 4, MSG_WAITALL) == 4);
    CHECK_INT(dm_wire_load_u32(answers), 4711);

    dm_store *store = new_client(server, NULL);
    bool ready;
    CHECK_OK(dm_store_check(store, &(const char *){"n"}, 1, &forever, &ready, &err));
    CHECK(!ready);
    CHECK_OK(dm_store_set(store, "late", "", 0, &forever, &err));
    CHECK(recv(fd, answers, 9, MSG_WAITALL) == 9);
    CHECK_INT(answers[0], 0);
    CHECK_INT(dm_wire_load_u64(answers + 1), 5);
    close(fd);
    dm_wire_buffer_fini(&out);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* Torch's barrier counts for ever: it can be used once. */
static void
torch_barrier(void)
{
    dm_store_server *server = new_server(NULL);
    dm_wire_buffer out = {0};
    dm_wire_put_raw(&out, validate, 5);
    dm_wire_put_u8(&out, DM_WIRE_BARRIER);
    dm_wire_put_key(&out, "b");
    dm_wire_put_u64(&out, 2);
    int fds[2];
    for (int i = 0; i < 2; i++) {
        fds[i] = raw_client(server);
        raw_send(fds[i], out.data, out.size);
    }
    char answer;
    for (int i = 0; i < 2; i++) {
        CHECK(recv(fds[i], &answer, 1, 0) == 1);
        CHECK_INT(answer, 0);
        close(fds[i]);
    }
    dm_store *store = new_client(server, NULL);
    check_value(store, "b", "2");
    dm_store_release(store);
    dm_wire_buffer_fini(&out);
    dm_store_server_stop(server);
}

/* --- starting --------------------------------------------------------------------------------- */

static void *
start_late(void *arg)
{
    dm_store_server_config *config = arg;
    dm_store_server *server = NULL;
    dm_error local = DM_ERROR_INIT;
    dm_status status = dm_store_server_start(config, &server, &local);
    CHECK_STR(local.text, "");
    CHECK_INT(status, DM_OK);
    return server;
}

static void
client_before_server(void)
{
    /* A port that was free a moment ago. */
    dm_store_server *server = new_server(NULL);
    dm_store_server_config config = {"127.0.0.1", dm_store_server_port(server), NULL,
                                     -1};
    dm_store_server_stop(server);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, start_late, &config) == 0);
    dm_wait wait = within_ms(20000);
    dm_store *store;
    CHECK_OK(dm_store_tcp_new("localhost", config.port, NULL, &wait, &store, &err));
    void *late;
    pthread_join(thread, &late);
    check_calls(store);
    dm_store_release(store);
    dm_store_server_stop(late);
}

static void
inherited_listener(void)
{
    int fd = -1;
    dm_wait wait = within_ms(1000);
    CHECK_OK(dm_net_listen("localhost", 0, &wait, &fd, &err));
    CHECK_INT(dm_net_listen_outward("localhost", fd), -1);
    uint16_t port;
    CHECK_OK(dm_net_port(fd, &port, &err));
    dm_store_server_config config = {NULL, 0, NULL, fd};
    dm_store_server *server;
    CHECK_OK(dm_store_server_start(&config, &server, &err));
    CHECK_INT(dm_store_server_port(server), port);
    dm_store *store = new_client(server, NULL);
    check_calls(store);
    dm_store_release(store);
    dm_store_server_stop(server);
    CHECK(close(fd) != 0);
}

static void
something_else_listens(void)
{
    int fd = -1;
    dm_wait wait = within_ms(1000);
    CHECK_OK(dm_net_listen("127.0.0.1", 0, &wait, &fd, &err));
    CHECK_INT(dm_net_listen_outward("127.0.0.1", fd), -1);
    uint16_t port;
    CHECK_OK(dm_net_port(fd, &port, &err));
    dm_store *store;
    wait = within_ms(20);
    CHECK_ERR(dm_store_tcp_new("127.0.0.1", port, NULL, &wait, &store, &err),
              DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "does not answer");
    close(fd);
}

static void
names(void)
{
    dm_wait wait = within_ms(20000);
    dm_net_address addresses[DM_NET_MAX_ADDRESSES];
    int n;
    const char *good[] = {"127.0.0.1", "::1",       "[::1]",
                          "localhost", "LocalHost", "0.0.0.0"};
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        CHECK_OK(dm_net_resolve(good[i], 80, &wait, addresses, &n, &err));
        CHECK(n >= 1);
    }
    char name[300];
    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    CHECK_ERR(dm_net_resolve(name, 80, &wait, addresses, &n, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_net_resolve("[]", 80, &wait, addresses, &n, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_net_resolve("no such host!", 80, &wait, addresses, &n, &err),
              DM_ERR_CONNECTION);
    CHECK_CONTAINS(err.text, "no such host!");
}

/* A poll function may use the store whose call it belongs to. */
typedef struct nested {
    dm_store *store;
    dm_status status;
} nested;

static dm_status
ask_store(void *arg, dm_error *error)
{
    nested *n = arg;
    const char *keys[] = {"there"};
    bool ready = false;
    dm_wait wait = within_ms(5000);
    n->status = dm_store_check(n->store, keys, 1, &wait, &ready, error);
    return dm_error_set(error, DM_ERR_INTERRUPTED, "enough");
}

static void
calls_from_a_poll_function(void)
{
    dm_store_server *server = new_server(NULL);
    dm_store *store = new_client(server, NULL);
    nested n = {store, DM_ERR_STATE};
    dm_wait wait = {dm_clock_deadline(20 * DM_NS_PER_S), ask_store, &n};
    dm_bytes value;
    /* Nothing has answered the SET when the wait begins on the same connection. */
    CHECK_OK(dm_store_set(store, "there", "1", 1, &forever, &err));
    CHECK_ERR(dm_store_get(store, "never", &wait, &value, &err), DM_ERR_INTERRUPTED);
    CHECK_INT(n.status, DM_OK);
    dm_store_release(store);
    dm_store_server_stop(server);
}

/* This machine's own name: its loopback address, and that by which others know it. */
static void
own_name(void)
{
    char name[DM_NET_HOST_MAX] = {0};
    CHECK(gethostname(name, sizeof(name) - 1) == 0);
    dm_wait wait = within_ms(20000);
    int fds[2] = {-1, -1};
    if (dm_net_listen(name, 0, &wait, &fds[0], &err) != DM_OK) {
        return; /* it has no address of its own */
    }
    fds[1] = dm_net_listen_outward(name, fds[0]);
    uint16_t port = 0;
    for (int i = 0; i < 2 && fds[i] >= 0; i++) {
        struct sockaddr_storage address;
        socklen_t size = sizeof(address);
        CHECK(getsockname(fds[i], (struct sockaddr *)&address, &size) == 0);
        uint16_t other;
        CHECK_OK(dm_net_port(fds[i], &other, &err));
        CHECK(i == 0 || other == port);
        port = other;
        if (address.ss_family == AF_INET) {
            CHECK(((struct sockaddr_in *)&address)->sin_addr.s_addr != INADDR_ANY);
        }
        close(fds[i]);
    }
}

TEST_MAIN(TEST(bad_arguments), TEST(names), TEST(own_name), TEST(every_call),
          TEST(large_values), TEST(many_keys), TEST(waits_do_not_block_others),
          TEST(server_goes_away), TEST(program_order), TEST(calls_from_a_poll_function),
          TEST(interrupted), TEST(wills), TEST(dead_process), TEST(forked_child),
          TEST(tokens), TEST(bad_clients), TEST(greedy_client),
          TEST(pipelined_requests), TEST(torch_barrier), TEST(client_before_server),
          TEST(inherited_listener), TEST(something_else_listens))
