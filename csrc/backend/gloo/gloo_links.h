/* The connections of one group, opened in stages as its operations need them.
 *
 * A small group connects all its members at its first operation. A large one connects
 * ring neighbours and powers of two, which is what its common operations use, and more
 * only when an operation needs them: the root of a gather, the two ends of a send,
 * everybody for all_to_all. Each stage is decided from the operation alone, so that
 * both ends of a connection come to the same stage.
 *
 * gloo's connect blocks, so a helper thread that lives for the stage does it; the
 * calling thread waits in slices. When a stage returns, every peer of it has finished
 * its stage too: nobody's leaving can disturb it any more.
 */
#ifndef GLOO_LINKS_H
#define GLOO_LINKS_H

#include <memory>
#include <string>
#include <vector>

#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_device.h"
#include "backend/gloo/gloo_transport.h"

namespace dm_gloo {

/* Groups up to this size connect all members at once. */
constexpr int32_t kSmallGroup = 16;

class Links {
  public:
    Links(const dm_comm_config &config, Waiter &waiter);
    ~Links();
    Links(const Links &) = delete;
    Links &
    operator=(const Links &) = delete;

    /* Opens the first stage. Throws. */
    void
    open(const dm_wait &wait);

    /* Opens what the operation needs beyond it. Throws. */
    void
    prepare(const dm_op &op, const dm_wait &wait);

    /* Closes every connection; what was sent still arrives. Waits for no peer. */
    void
    shut() noexcept;

    /* Set by open(). */
    const std::shared_ptr<Context> &
    context() const
    {
        return context_;
    }

    Transport &
    transport()
    {
        return *transport_;
    }

    bool
    is_full() const
    {
        return size_ <= kSmallGroup;
    }

  private:
    void
    connect(const std::string &stage, const std::vector<int> &wanted,
            const dm_wait &wait);

    void
    greet(const std::string &stage, const std::vector<int> &peers);

    std::vector<int>
    others() const;

    const int32_t rank_;
    const int32_t size_;
    const int32_t *const ranks_;
    const std::string name_;
    dm_store *const store_;
    Waiter &waiter_;
    std::shared_ptr<Device> device_;
    std::shared_ptr<Transport> transport_;
    std::shared_ptr<Context> context_;
};

} // namespace dm_gloo

#endif
