/* The bridge against gloo alone: the same operations in the same processes, batches of
 * both sides by turns. Prints one JSON object a line: median and quartiles of the time
 * of one operation on rank 0 and of the ratios of neighbouring batches, and the processor
 * time that one operation takes on rank 0, which says more on a busy machine.
 *
 *     bench_gloo PATH/TO/_gloo.so RANKS [SECONDS PER CASE [batch]]
 *
 * With `batch`, gloo's loop thread is scheduled as the bridge's is: then the difference
 * is the cost of the wrapping alone.
 */
#include "dm_test.h"

#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/dm_backend.h"
#include "backend/reduce/dm_reduce.h"
#include "base/dm_clock.h"
#include "raw_gloo.h"
#include "store/dm_store.h"

enum { MAX_RANKS = 64, MAX_BATCHES = 2000 };

typedef enum kind { ALL_REDUCE, BROADCAST, BARRIER, KINDS } kind;

static const char *const kind_names[] = {"all_reduce", "broadcast", "barrier"};

typedef struct bench {
    const dm_backend *backend;
    dm_comm *comm;
    raw_gloo *raw;
    int rank;
    int size;
    float *data;
} bench;

static void
run_ours(bench *b, kind k, size_t n)
{
    static const dm_op_kind kinds[] = {DM_OP_ALL_REDUCE, DM_OP_BROADCAST,
                                       DM_OP_BARRIER};
    dm_op op = {.kind = kinds[k],
                .dtype = DM_FLOAT32,
                .reduce = DM_SUM,
                .output = b->data,
                .count = n};
    dm_wait wait = DM_WAIT_FOREVER;
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(b->backend->comm_run(b->comm, &op, &wait, &err));
}

static void
run_raw(bench *b, kind k, size_t n)
{
    switch (k) {
    case ALL_REDUCE:
        raw_gloo_all_reduce(b->raw, b->data, n, dm_reduce_lookup(DM_FLOAT32, DM_SUM));
        break;
    case BROADCAST:
        raw_gloo_broadcast(b->raw, b->data, n);
        break;
    default:
        raw_gloo_barrier(b->raw);
        break;
    }
}

/* Processor time of this process, all threads: microseconds. */
static double
cpu_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

/* Time of one operation; adds its processor time to `cpu`. */
static double
batch(bench *b, kind k, size_t n, int repeats, bool ours, double *cpu)
{
    run_ours(b, BARRIER, 0);
    double cpu_start = cpu_now();
    int64_t start = dm_clock_now();
    for (int i = 0; i < repeats; i++) {
        if (ours) {
            run_ours(b, k, n);
        }
        else {
            run_raw(b, k, n);
        }
    }
    double took = (double)(dm_clock_now() - start) / 1e3 / repeats;
    *cpu += (cpu_now() - cpu_start) / repeats;
    return took;
}

static int
compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void
print(const char *name, double *values, int n, bool last)
{
    qsort(values, (size_t)n, sizeof(*values), compare);
    printf("\"%s\": {\"min\": %.2f, \"median\": %.2f, \"q1\": %.2f, \"q3\": %.2f}%s",
           name, values[0], values[n / 2], values[n / 4], values[3 * n / 4],
           last ? "}\n" : ", ");
}

/* Rank 0 decides whether there is time for another pair of batches. */
static bool
go_on(bench *b, int64_t end)
{
    float flag = dm_clock_now() < end, *data = b->data;
    b->data = &flag;
    run_ours(b, BROADCAST, 1);
    b->data = data;
    return flag != 0;
}

static void
measure(bench *b, kind k, size_t n, double seconds)
{
    static double ours[MAX_BATCHES], raw[MAX_BATCHES], ratio[MAX_BATCHES];
    int repeats = n <= 4096 ? 50 : n <= 65536 ? 20 : n <= 262144 ? 5 : 1;
    int count = 0;
    int64_t end = dm_clock_now() + (int64_t)(seconds * 1e9);
    memset(b->data, 0, n * sizeof(float));
    double warm = 0, cpu_ours = 0, cpu_raw = 0;
    batch(b, k, n, repeats, true, &warm);
    batch(b, k, n, repeats, false, &warm);
    while (count < MAX_BATCHES && go_on(b, count < 3 ? INT64_MAX : end)) {
        bool first = count % 2 == 0;
        for (int side = 0; side < 2; side++) {
            bool is_ours = first == (side == 0);
            (is_ours ? ours : raw)[count] =
                batch(b, k, n, repeats, is_ours, is_ours ? &cpu_ours : &cpu_raw);
        }
        ratio[count] = ours[count] / raw[count];
        count++;
    }
    if (b->rank == 0) {
        printf("{\"op\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"batches\": %d, "
               "\"repeats\": %d, \"unit\": \"us\", "
               "\"cpu\": {\"bridge\": %.2f, \"gloo\": %.2f}, ",
               kind_names[k], b->size, n * sizeof(float), count, repeats,
               cpu_ours / count, cpu_raw / count);
        print("bridge", ours, count, false);
        print("gloo", raw, count, false);
        print("ratio", ratio, count, true);
        fflush(stdout);
    }
}

static void
rank_main(bench *b, uint16_t port, const char *folder, double seconds,
          bool batch_scheduled)
{
    dm_wait wait = DM_WAIT_FOREVER;
    dm_error err = DM_ERROR_INIT;
    dm_store *store;
    CHECK_OK(dm_store_tcp_new("127.0.0.1", port, NULL, &wait, &store, &err));
    int32_t ranks[MAX_RANKS];
    for (int i = 0; i < b->size; i++) {
        ranks[i] = i;
    }
    dm_comm_config config = {.rank = b->rank,
                             .size = b->size,
                             .ranks = ranks,
                             .name = "bench",
                             .store = store,
                             .timeout_ns = -1};
    CHECK_OK(b->backend->comm_new(&config, &b->comm, &err));
    int64_t start = dm_clock_now();
    CHECK_OK(b->backend->comm_connect(b->comm, &wait, &err));
    int64_t ours = dm_clock_now() - start;
    run_ours(b, BARRIER, 0);
    start = dm_clock_now();
    b->raw = raw_gloo_open(b->rank, b->size, folder, batch_scheduled);
    int64_t raw = dm_clock_now() - start;
    if (b->rank == 0) {
        printf(
            "{\"op\": \"connect\", \"ranks\": %d, \"unit\": \"us\", \"bridge\": %.0f, "
            "\"gloo\": %.0f}\n",
            b->size, (double)ours / 1e3, (double)raw / 1e3);
    }

    static const size_t counts[] = {1, 256, 4096, 16384, 65536, 262144, 4194304};
    b->data = dm_calloc(4194304, sizeof(float));
    measure(b, BARRIER, 0, seconds);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        measure(b, ALL_REDUCE, counts[i], seconds);
    }
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i += 2) {
        measure(b, BROADCAST, counts[i], seconds);
    }
}

static void
remove_folder(const char *folder)
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

int
main(int argc, char **argv)
{
    CHECK(argc >= 3);
    signal(SIGPIPE, SIG_IGN); /* as Python does */
    bench b = {.size = atoi(argv[2])};
    CHECK(b.size >= 2 && b.size <= MAX_RANKS);
    double seconds = argc > 3 ? atof(argv[3]) : 1.0;
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        TEST_FAIL("%s", dlerror());
    }
    const dm_backend *(*entry)(int abi);
    *(void **)&entry = dlsym(library, "dm_gloo_backend");
    CHECK(entry != NULL);
    b.backend = entry(DM_BACKEND_ABI);

    dm_store_server_config config = {.host = "127.0.0.1", .listen_fd = -1};
    dm_store_server *server;
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(dm_store_server_start(&config, &server, &err));
    char folder[] = "/tmp/bench-gloo-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    pid_t pids[MAX_RANKS];
    for (b.rank = 0; b.rank < b.size; b.rank++) {
        pids[b.rank] = fork();
        if (pids[b.rank] == 0) {
            rank_main(&b, dm_store_server_port(server), folder, seconds, argc > 4);
            /* Together: gloo alone complains about a peer that leaves early. */
            run_ours(&b, BARRIER, 0);
            _exit(0);
        }
    }
    int failed = 0;
    for (int i = 0; i < b.size; i++) {
        int status;
        waitpid(pids[i], &status, 0);
        failed |= status != 0;
    }
    dm_store_server_stop(server);
    remove_folder(folder);
    return failed;
}
