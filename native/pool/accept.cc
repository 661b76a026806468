// The acceptance of a pool that lost power under durability `process`. FORMAT.md says what such a
// pool may hold: each page in any version that it had since its last sync.
#include "pool/catalogue.h"
#include "pool/layout.h"
#include "pool/pool.h"

namespace petps::pool {

using base::Code;
using base::Status;
using media::Flusher;
using media::Site;

Status Pool::accept_lost_power() {
  PETPS_RETURN_IF_ERROR(check_writable());
  if (!lost_power_) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + media_->path() + "' did not lose power: open it as it is");
  }
  Flusher flusher(*media_);
  PETPS_RETURN_IF_ERROR(lower_progress(flusher));
  {
    // Clear records and rows whose extent record did not reach the disk; the next table would
    // find them.
    std::lock_guard lock(extents_mutex_);
    const auto* words = reinterpret_cast<const uint64_t*>(base_ + map_->extents());
    const uint64_t listed = catalogue_->extents.size();
    for (uint64_t i = listed; i < map_->max_extents(); ++i) {
      const uint64_t none = 0;
      if (words[i] != 0)
        flusher.copy(base_ + map_->extents() + i * 8, &none, sizeof none, Site::kExtentRecord);
    }
    zero(end_, media_->size(), Site::kReusedExtent, flusher);
  }
  // No sync here. A clean close syncs everything; if the power fails before that, the pool has
  // lost power again and all of this is repeated.
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kAdoptedDrain));
  std::lock_guard lock(mutex_);
  catalogue_->sequence += kAcceptedStep;
  catalogue_->boot_id = current_boot_id();
  PETPS_RETURN_IF_ERROR(write_superblock());
  lost_power_ = false;
  return Status();
}

}  // namespace petps::pool
