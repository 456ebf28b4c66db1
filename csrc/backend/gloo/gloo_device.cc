/* The process's one gloo device: see gloo_device.h. */
#include "backend/gloo/gloo_device.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

namespace dm_gloo {

namespace {

constexpr long kTurnNs = 50 * 1000;
constexpr int kTurns = 200;

/* What a process knows of its device. Never freed: a forked child makes its own and
 * leaves the parent's alone, whatever state its mutex was in. */
struct Process {
    pid_t pid;
    std::mutex mutex;
    std::weak_ptr<Device> device; /* guarded by mutex */
};

Process &
this_process()
{
    static std::atomic<Process *> current{nullptr};
    /* Acquire and release: the object behind the pointer is complete. */
    Process *process = current.load(std::memory_order_acquire);
    pid_t pid = getpid();
    while (process == nullptr || process->pid != pid) {
        std::unique_ptr<Process> fresh(new Process{pid, {}, {}});
        if (current.compare_exchange_strong(process, fresh.get(),
                                            std::memory_order_acq_rel)) {
            process = fresh.release();
        }
    }
    return *process;
}

/* A thread that is started while this lives does not preempt others when it wakes up.
 * gloo's loop thread is woken by the answer to a message whose sender is still inside
 * the pair's lock; where it takes the sender's processor, it turns without getting the
 * lock until its time is up, which costs milliseconds for a message that takes
 * microseconds. On an idle processor nothing changes. */
class BatchScheduled {
  public:
    BatchScheduled() noexcept
    {
        int policy;
        active_ = pthread_getschedparam(pthread_self(), &policy, &param_) == 0 &&
                  policy == SCHED_OTHER &&
                  pthread_setschedparam(pthread_self(), SCHED_BATCH, &param_) == 0;
    }

    ~BatchScheduled()
    {
        if (active_) {
            pthread_setschedparam(pthread_self(), SCHED_OTHER, &param_);
        }
    }

    BatchScheduled(const BatchScheduled &) = delete;
    BatchScheduled &
    operator=(const BatchScheduled &) = delete;

  private:
    bool active_;
    struct sched_param param_;
};

} // namespace

SignalsBlocked::SignalsBlocked() noexcept
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
}

SignalsBlocked::~SignalsBlocked()
{
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
}

/* A timerfd in gloo's loop. */
class Device::Timer : public gloo::transport::tcp::Handler {
  public:
    Timer(const std::shared_ptr<gloo::transport::Device> &device,
          std::function<void()> call)
        : loop_(*static_cast<gloo::transport::tcp::Device *>(device.get())),
          call_(std::move(call)),
          fd_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC))
    {
        if (fd_ < 0) {
            fail(DM_ERR_SYSTEM, "timerfd_create: %s", std::strerror(errno));
        }
        loop_.registerDescriptor(fd_, EPOLLIN, this);
    }

    ~Timer() override
    {
        loop_.unregisterDescriptor(fd_, this);
        close(fd_);
    }

    /* Fires every `ns` nanoseconds; 0 stops it. */
    void
    set(long ns) noexcept
    {
        struct timespec every = {ns / DM_NS_PER_S, ns % DM_NS_PER_S};
        struct itimerspec spec = {every, every};
        timerfd_settime(fd_, 0, &spec, nullptr);
    }

    void
    handleEvents(int) override
    {
        uint64_t count;
        if (read(fd_, &count, sizeof(count)) == sizeof(count)) {
            call_();
        }
    }

  private:
    gloo::transport::tcp::Device &loop_;
    std::function<void()> call_;
    int fd_;
};

std::shared_ptr<Device>
Device::acquire()
{
    Process &process = this_process();
    std::lock_guard<std::mutex> lock(process.mutex);
    std::shared_ptr<Device> device = process.device.lock();
    if (device == nullptr) {
        dm_error error = DM_ERROR_INIT;
        dm_netif netif;
        check(dm_netif_from_environment(&netif, &error), error);
        device = std::make_shared<Device>(netif);
        process.device = device;
    }
    return device;
}

Device::Device(const dm_netif &netif) : netif_(netif)
{
    gloo::transport::tcp::attr attr(netif.text);
    attr.ai_family = netif.address.ss_family;
    {
        SignalsBlocked blocked;
        BatchScheduled batch;
        transport_ = gloo::transport::tcp::CreateDevice(attr);
    }

    slices_ = std::make_unique<Timer>(transport_, [this] {
        std::lock_guard<std::mutex> lock(mutex_);
        for (Watched *w = first_; w != nullptr; w = w->next_) {
            w->on_slice();
        }
    });
    turns_ = std::make_unique<Timer>(transport_, [this] {
        /* Relaxed: only a count; a turn more or less does no harm. */
        if (turns_left_.fetch_sub(1, std::memory_order_relaxed) <= 1) {
            turns_->set(0);
        }
    });
    slices_->set(DM_WAIT_SLICE_NS);
}

Device::~Device()
{
    hurry();
    slices_.reset();
    turns_.reset();
}

void
Device::hurry() noexcept
{
    turns_left_.store(kTurns, std::memory_order_relaxed);
    turns_->set(kTurnNs);
}

void
Device::watch(Watched *watched)
{
    std::lock_guard<std::mutex> lock(mutex_);
    watched->next_ = first_;
    watched->previous_ = nullptr;
    if (first_ != nullptr) {
        first_->previous_ = watched;
    }
    first_ = watched;
}

void
Device::forget(Watched *watched) noexcept
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (watched->previous_ != nullptr) {
        watched->previous_->next_ = watched->next_;
    }
    else if (first_ == watched) {
        first_ = watched->next_;
    }
    if (watched->next_ != nullptr) {
        watched->next_->previous_ = watched->previous_;
    }
}

} // namespace dm_gloo
