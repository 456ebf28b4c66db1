/* gloo without our bridge, for comparison: gloo's own rendezvous, buffers and waits, with
 * our reduce kernels. */
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <pthread.h>
#include <sched.h>

extern "C" {
#include "raw_gloo.h"
}

struct raw_gloo {
    std::shared_ptr<gloo::rendezvous::Context> context;
};

raw_gloo *
raw_gloo_open(int rank, int size, const char *folder, int batch)
{
    /* A thread inherits its scheduling. */
    struct sched_param param = {};
    pthread_setschedparam(pthread_self(), batch ? SCHED_BATCH : SCHED_OTHER, &param);
    auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
    pthread_setschedparam(pthread_self(), SCHED_OTHER, &param);
    gloo::rendezvous::FileStore store(folder);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->connectFullMesh(store, device);
    return new raw_gloo{context};
}

void
raw_gloo_all_reduce(raw_gloo *raw, float *data, size_t count, raw_gloo_reduce fn)
{
    gloo::AllreduceOptions options(raw->context);
    options.setOutput(data, count);
    options.setReduceFunction(fn);
    gloo::allreduce(options);
}

void
raw_gloo_broadcast(raw_gloo *raw, float *data, size_t count)
{
    gloo::BroadcastOptions options(raw->context);
    options.setOutput(data, count);
    options.setRoot(0);
    gloo::broadcast(options);
}

void
raw_gloo_barrier(raw_gloo *raw)
{
    gloo::BarrierOptions options(raw->context);
    gloo::barrier(options);
}
