/* The process's one gloo device: its loop thread, and the clock that we add to it.
 *
 * Made with the first group that communicates, gone with the last: an idle process
 * has no thread. gloo's loop thread also runs our two timers, so that no thread of
 * our own is needed: one ends waits in flight every DM_WAIT_SLICE_NS, so that the
 * waiting thread can look around; the other makes the loop turn at once while
 * connections open and close (gloo waits for a turn of the loop, up to 10 ms, for
 * each descriptor that it takes out of it).
 *
 * Fork: a child inherits the object without its thread. It never uses or destroys
 * it; the first group of the child makes a device of its own.
 */
#ifndef GLOO_DEVICE_H
#define GLOO_DEVICE_H

#include <atomic>
#include <csignal>
#include <memory>
#include <mutex>

#include <gloo/transport/tcp/device.h>

#include "backend/gloo/gloo_core.h"

namespace dm_gloo {

class Watched;

class Device {
  public:
    /* The device, made if need be. Throws. */
    static std::shared_ptr<Device>
    acquire();

    explicit Device(const dm_netif &netif);
    ~Device();
    Device(const Device &) = delete;
    Device &
    operator=(const Device &) = delete;

    const std::shared_ptr<gloo::transport::Device> &
    transport() const
    {
        return transport_;
    }

    const dm_netif &
    netif() const
    {
        return netif_;
    }

    /* The loop turns every 50 microseconds for the next 10 milliseconds. Any thread. */
    void
    hurry() noexcept;

    /* `watched->on_slice()` is called on the loop thread every slice from now on,
     * until forget() has returned. */
    void
    watch(Watched *watched);

    void
    forget(Watched *watched) noexcept;

  private:
    class Timer;

    dm_netif netif_;
    std::shared_ptr<gloo::transport::Device> transport_;
    std::unique_ptr<Timer> slices_;
    std::unique_ptr<Timer> turns_;
    std::atomic<int> turns_left_{0};
    std::mutex mutex_;
    Watched *first_ = nullptr; /* guarded by mutex_ */
};

/* Something that wants to be called every slice. An entry of an intrusive list. */
class Watched {
  public:
    /* On the loop thread, with the device's mutex held: short, no waiting. */
    virtual void
    on_slice() noexcept = 0;

  protected:
    ~Watched() = default;

  private:
    friend class Device;
    Watched *next_ = nullptr;
    Watched *previous_ = nullptr;
};

/* Blocks all signals for the calling thread while it lives: a thread that is started
 * meanwhile never runs a signal handler. */
class SignalsBlocked {
  public:
    SignalsBlocked() noexcept;
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked &) = delete;
    SignalsBlocked &
    operator=(const SignalsBlocked &) = delete;

  private:
    sigset_t old_;
};

} // namespace dm_gloo

#endif
